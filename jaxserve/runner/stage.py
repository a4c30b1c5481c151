"""Compiles and runs the programs of one stage, and owns its weights, pool and row state.

All programs are compiled ahead of time for a closed set of shapes. A call with another shape is an error rather than a
compilation, so nothing compiles once the engine is ready.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental.layout import Layout

from jaxserve import weights
from jaxserve.iteration import IterationPlan, IterationResult, SamplerVariant
from jaxserve.models import Params
from jaxserve.models.products import Quantized
from jaxserve.runner import batch, compiler_options, kv_cache
from jaxserve.runner.block_copies import COUNT, HostBlock
from jaxserve.runner.lowering import StagePrograms, ends, temporaries
from jaxserve.runner.program_cache import ProgramCache
from jaxserve.runner.programs import Forward, Scores, points_for
from jaxserve.weights import is_matrix, narrow

Progress = Callable[[str, int, int], None]

_COMPILE_THREADS = min(8, max(2, (os.cpu_count() or 2) // 2))  # each needs about 200 MB while it compiles


class Launched(NamedTuple):
    """Device arrays that will hold the results of an iteration.

    Attributes:
      chosen: int32[2, S] tokens, and the bits of their logprobs.
      top: (ids, logprobs) [S, MAX_LOGPROBS], with SamplerVariant.FULL and above.
      scores: with plan.scoring.
      pooled: float32[max_rows, H], with plan.pooled.
    """

    chosen: jax.Array | None = None
    top: tuple[jax.Array, jax.Array] | None = None
    scores: Scores | None = None
    pooled: jax.Array | None = None


class StageRunner:
    """Compiled programs, weights, pool and row state of the layers that one sub-mesh owns.

    Attributes:
      block_shapes: of each cache group with layers here, if blocks are copied to the host: a block outside the pool.
    """

    def __init__(
        self, programs: StagePrograms, params: Params, buckets: Sequence[int], cache: ProgramCache | None
    ) -> None:
        """Args:
        params: the whole model's, on any device; the stage's part is moved to its devices.
        cache: compiled programs of earlier starts.
        """
        self.programs = programs
        self._cache = cache
        self.replace_params(params)
        self.buckets = tuple(buckets)
        self._counts = programs.shape.point_counts(buckets)
        self._decode_buckets = frozenset(programs.shape.decode_buckets(buckets))
        self.compile_seconds: dict[int, float] = {}
        self.num_programs = 0
        self._forward: dict[tuple[int, bool], Any] = {}  # by bucket, and whether for decodes only
        self._head: dict[int, Any] = {}
        self._score: dict[int, Any] = {}
        self._pool: dict[int, Any] = {}
        self._choose: dict[tuple[int, SamplerVariant], Any] = {}
        self._feed: dict[int, Any] = {}
        self._all_allowed: dict[int, jax.Array] = {}
        self._admit: Any = None
        self._draft: Any = None
        self._copy: Any = None
        self._store: dict[int, Any] = {}
        self._load: dict[int, Any] = {}
        self.block_shapes: dict[int, HostBlock] = {}
        self.pool: Any = None
        state = batch.empty_state(programs.shape.layout(1), is_first=programs.is_first, is_last=programs.is_last)
        self._state = jax.tree.map(self._whole, state)

    def _own(self, params: Params) -> Params:
        wanted = self.programs.params()
        part = self.programs.model.part(weights.padded(self.programs.model, params), self.programs.layers)
        return jax.tree.map(_placed, part, wanted, is_leaf=is_matrix)

    def replace_params(self, params: Params) -> None:
        """Takes the weights, or others of the same shapes; `params` is the whole model's."""
        self.params = self._own(params)
        self._taken = self.programs.taken(self.params, lambda vectors: self._whole(np.stack(vectors)))

    def temporaries(self) -> int:
        """Most bytes that an iteration takes on a device beside its arguments, as compiled."""
        programs = [self._compiled(self.programs.lower_forward, self.buckets[-1], 1)]
        if self.programs.is_last:
            self._compile(self._head, self._counts[-1], self.programs.lower_head, self._counts[-1])
            programs.append(self._head[self._counts[-1]])
        return temporaries(*programs)

    def compile(self, n_blocks: int, progress: Progress, *, host_copies: bool = False) -> None:
        """Compiles every program that a plan can need, then allocates the pool.

        Args:
          n_blocks: blocks of the pool.
          host_copies: whether blocks are copied to the host and back.
        """
        programs = self.programs
        jobs: list[Callable[[], None]] = [
            partial(self._compile_forward, bucket, n_blocks) for bucket in reversed(self.buckets)
        ]
        counts = self._counts
        if programs.is_last:
            heads = [count for count in reversed(counts) if count not in self._head]
            jobs += [partial(self._compile, self._head, count, programs.lower_head, count) for count in heads]
            if programs.shape.scoring:
                jobs += [partial(self._compile, self._score, b, programs.lower_score, b) for b in self.buckets]
                jobs += [partial(self._compile, self._pool, b, programs.lower_pool, b) for b in self.buckets]
            keys = [
                (points, variant) for points in counts for variant in SamplerVariant if variant is _chosen_by(variant)
            ]
            jobs += [partial(self._compile, self._choose, key, programs.lower_choose, *key) for key in keys]
            for points in counts:
                everything = np.full((points, programs.mask_words), 0xFFFFFFFF, np.uint32)
                self._all_allowed[points] = self._whole(everything)
        elif programs.is_first:
            jobs += [partial(self._compile, self._feed, count, programs.lower_feed, count) for count in counts]
        jobs += [self._compile_admit, partial(self._compile_copy, n_blocks)]
        if programs.shape.draft_tokens and (programs.is_first or programs.is_last):
            jobs.append(self._compile_draft)
        for group in range(programs.shape.groups.count if host_copies else 0):
            if programs.first_blocks_of(group, n_blocks):
                self.block_shapes[group] = programs.host_block(group, n_blocks)
                jobs.append(partial(self._compile, self._store, group, programs.lower_store, group, n_blocks))
                jobs.append(partial(self._compile, self._load, group, programs.lower_load, group, n_blocks))
        progress("compiling", 0, len(jobs))
        with ThreadPoolExecutor(_COMPILE_THREADS) as threads:
            for done, _ in enumerate(threads.map(lambda job: job(), jobs), start=1):
                progress("compiling", done, len(jobs))
        self.pool = kv_cache.allocate(programs.pool(n_blocks))

    def _compile_forward(self, bucket: int, n_blocks: int) -> None:
        started = time.perf_counter()
        for decodes_only in (False, True) if bucket in self._decode_buckets else (False,):
            program = self._compiled(self.programs.lower_forward, bucket, n_blocks, decodes_only)
            self._forward[bucket, decodes_only] = program
        self.compile_seconds[bucket] = time.perf_counter() - started

    def _compile_admit(self) -> None:
        self._admit = self._compiled(self.programs.lower_admit)

    def _compile_copy(self, n_blocks: int) -> None:
        self._copy = self._compiled(self.programs.lower_copy, n_blocks)

    def _compile_draft(self) -> None:
        self._draft = self._compiled(self.programs.lower_draft)

    def _compile(self, into: dict[Any, Any], key: Any, lower: Callable[..., jax.stages.Lowered], *sizes: Any) -> None:
        into[key] = self._compiled(lower, *sizes)

    def _compiled(self, lower: Callable[..., jax.stages.Lowered], *sizes: Any) -> Any:
        self.num_programs += 1
        programs = self.programs
        options = compiler_options.of(programs.platform, sampler=lower == programs.lower_choose)

        def compile() -> jax.stages.Compiled:
            program = lower(*sizes).compile(options)
            _give_back_memory()
            return program

        if self._cache is None:
            return _taking_int4(compile())
        made_from = f"{lower.__name__}{sizes} of {programs.made_from()}"
        return _taking_int4(self._cache.get(made_from, list(programs.mesh.devices.flat), compile))

    def _whole(self, values: Any) -> jax.Array:
        """A host array on every device of this stage; other hosts of the stage hold the same."""
        held = np.asarray(values)
        return jax.make_array_from_callback(held.shape, self.programs.everywhere, lambda index: held[index])

    def admit(self, admissions: Iterable[np.ndarray]) -> None:
        """Enqueues the admission of requests to their rows."""
        for admission in admissions:
            self._state = self._admit(self._state, admission)

    def draft(self, drafts: np.ndarray) -> None:
        """Enqueues drafted tokens (`batch.PackedPlan.drafts`), if the stage has token histories."""
        if self._draft is not None:
            self._state = self._state._replace(history=self._draft(self._state.history, drafts))

    def copy(self, copies: np.ndarray) -> None:
        """Enqueues block copies (`batch.PackedPlan.copies`) in all of the stage's layers."""
        self.pool = self._copy(self.pool, copies)

    def store(self, group: int, blocks: Sequence[int]) -> tuple[HostBlock, ...] | None:
        """Enqueues copies of at most COUNT blocks; None if no layer here is in the cache group."""
        if group not in self._store:
            return None
        return self._store[group](self.pool, _padded(blocks))[: len(blocks)]

    def load(self, group: int, blocks: Sequence[int], held: Sequence[HostBlock]) -> jax.Array:
        """Enqueues the writing of COUNT blocks; returns bool[COUNT]: whether the checksum is right."""
        entries = tuple(held) + (held[0],) * (COUNT - len(held))
        self.pool, intact = self._load[group](self.pool, _padded(blocks), entries)
        intact.copy_to_host_async()
        return intact

    def forward(self, plan: IterationPlan, packed: np.ndarray, x: jax.Array | None) -> Forward:
        """Enqueues one iteration of the stage's layers; returns before it has run.

        Args:
          packed: the plan's packed form.
          x: [T, H] hidden states on this stage's devices; None in the first stage.
        """
        state, decodes_only = self._state, plan.bucket in self._decode_buckets and plan.is_decodes
        program = self._forward[plan.bucket, decodes_only]
        out = Forward(*program(self._taken, self.pool, state.tables, state.history, packed, x))
        self.pool, self._state = out.pool, state._replace(tables=out.tables)
        return out

    def sample(self, plan: IterationPlan, out: Forward, allowed: np.ndarray | None = None) -> Launched:
        """Enqueues the scoring, pooling, head and sampler that the plan needs; last stage only.

        Args:
          allowed: uint32[S, words] grammar masks (`sampler.sample`); None allows everything. The array must not be
            written to afterwards.
        """
        chosen = top = scores = pooled = None
        if plan.scoring:
            scores = self._score[plan.bucket](ends(self.params), out.hidden, out.next_tokens)
        if plan.pooled:
            owners = batch.pooled_owners(plan, self.programs.shape.max_rows)
            pooled = self._pool[plan.bucket](ends(self.params), out.hidden, owners)
        if plan.sampler is not None:
            points = points_for(plan, self._counts)
            logits = self._head[points](ends(self.params), out.last)
            variant, masks = _chosen_by(plan.sampler), ()
            if variant is SamplerVariant.CONSTRAINED:
                masks = (self._all_allowed[points] if allowed is None else allowed,)
            choose = self._choose[points, variant]
            history, chosen, top = choose(logits, self._state.sampling, self._state.history, out.points, *masks)
            self._state = self._state._replace(history=history)
        launched = Launched(chosen, top, scores, pooled)
        if self.programs.platform != "cpu":  # there the results are in the host's memory
            for array in jax.tree.leaves(launched):
                array.copy_to_host_async()
        return launched

    def feed_back_tokens(self, points: jax.Array | None, chosen: jax.Array | None) -> None:
        """Enqueues the last stage's tokens int32[2, S] for the first stage's histories."""
        assert points is not None
        assert chosen is not None
        history = self._feed[chosen.shape[1]](self._state.history, points, chosen)
        self._state = self._state._replace(history=history)


def _padded(blocks: Sequence[int]) -> np.ndarray:
    """int32[COUNT]: the blocks, and the first of them in the other places."""
    padded = np.full(COUNT, blocks[0], np.int32)
    padded[: len(blocks)] = blocks
    return padded


def wait(launched: Launched) -> IterationResult:
    """Wait for an iteration and return its result."""
    empty = np.zeros((2, 0), np.int32)
    chosen = empty if launched.chosen is None else np.asarray(launched.chosen)
    top_ids, top_logprobs = (None, None) if launched.top is None else map(np.asarray, launched.top)
    scores = (None, None, None) if launched.scores is None else map(np.asarray, launched.scores)
    score_logprobs, score_top_ids, score_top_logprobs = scores
    return IterationResult(
        tokens=chosen[0],
        logprobs=chosen[1].view(np.float32),
        top_ids=top_ids,
        top_logprobs=top_logprobs,
        score_logprobs=score_logprobs,
        score_top_ids=score_top_ids,
        score_top_logprobs=score_top_logprobs,
        pooled=None if launched.pooled is None else np.asarray(launched.pooled),
    )


def _chosen_by(variant: SamplerVariant) -> SamplerVariant:
    """The variant whose program is used.

    CONSTRAINED with everything allowed also serves FULL: it takes 1 to 5% longer and saves a compiled program, which
    is 16 MB on a CPU.
    """
    return SamplerVariant.CONSTRAINED if variant is SamplerVariant.FULL else variant


def _placed(values: Any, wanted: jax.ShapeDtypeStruct | Quantized) -> jax.Array | Quantized:
    """A parameter on its devices, quantized if it should be and is not yet."""
    if not isinstance(wanted, Quantized):
        return _put(values, wanted)
    if isinstance(values, Quantized):
        if jax.tree.structure(values) != jax.tree.structure(wanted) or values.scales.shape != wanted.scales.shape:
            raise ValueError(f"a matrix {values.shape} is quantized in another way than `quantize` says")
        return jax.tree.map(_put, values, wanted)
    whole = jax.ShapeDtypeStruct(wanted.shape, values.dtype, sharding=wanted.values.format)
    return narrow.on_devices(_put(values, whole), wanted)


def _put(values: Any, wanted: jax.ShapeDtypeStruct) -> jax.Array:
    if isinstance(values, jax.Array) and (values.dtype, values.sharding) == (wanted.dtype, wanted.sharding):
        held: Any = values
        layout = wanted.format.layout
        if not isinstance(layout, Layout) or held.format.layout.major_to_minor == layout.major_to_minor:
            return values  # already there; an array over several hosts cannot be copied by one of them
    # In two steps, because jax does not move arrays to other devices and into another layout at once.
    moved = jax.device_put(values.astype(wanted.dtype), wanted.sharding)
    return jax.device_put(moved, wanted.format) if isinstance(wanted.format.layout, Layout) else moved


def _taking_int4(program: Any) -> Any:
    """A compiled program that takes int4 arrays.

    jax (0.10.2) refuses them before a call on a CPU: it holds them as the program needs them, two numbers a byte, but
    an array says that its layout is another.
    """
    executable = program._executable
    executable._xla_in_layouts = [
        None if layout is not None and layout.sub_byte_element_size_in_bits == 4 else layout
        for layout in executable._xla_in_layouts
    ]
    return program


def _give_back_memory() -> None:
    """Returns memory that compiling has freed to the system, if the C library can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
