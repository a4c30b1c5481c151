"""The layers on one device: one compiled program a bucket, the pool donated from each to the next.

Everything is compiled ahead of time, for exactly the shapes that plans come in. A call with any other shape is an
error, not a compilation, so nothing can compile once the engine is ready.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve import attention, kv_cache, sampler, scoring
from jaxserve.batch import BatchLayout, PackedPlan, admit, empty_state, pack, sample_points, unpack
from jaxserve.buckets import BucketCost
from jaxserve.iteration import Chunk, IterationPlan, IterationResult, SamplerVariant, TableChange, max_chunks
from jaxserve.models import Model
from pallas_kernels.api import AttentionShape, Backend

Progress = Callable[[str, int, int], None]

_COMPILE_THREADS = 4
_SCORING_TILE = 8192  # vocabulary entries scored at a time
_WARM_UP_CONTEXT = 128  # context at which the buckets' costs are measured
_WARM_UP_RUNS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class StageShape:
    """The sizes that every program of a stage is compiled for."""

    max_rows: int
    n_rows: int
    max_context: int
    attention: AttentionShape
    backend: Backend
    scoring: bool

    def layout(self, bucket: int) -> BatchLayout:
        """The packed form of plans of this bucket."""
        return BatchLayout(
            bucket=bucket,
            max_rows=self.max_rows,
            n_rows=self.n_rows,
            block_size=self.attention.block_size,
            max_context=self.max_context,
        )


@dataclass(frozen=True, slots=True)
class Launched:
    """An iteration under way: device arrays that will hold its answers."""

    chosen: jax.Array | None  # int32[2, C]: tokens, and logprobs bit for bit
    top: tuple[jax.Array, jax.Array] | None
    scores: tuple[jax.Array, jax.Array, jax.Array] | None


def forward(
    model: Model,
    shape: StageShape,
    layout: BatchLayout,
    scored: bool,
    params: Any,
    pools: list[Any],
    tables: jax.Array,
    history: jax.Array,
    packed: jax.Array,
):
    """One iteration of all layers. Traced.

    Returns:
      (pools, tables, chunks int32[C, 4], logits float32[C, V], scores): scores are (logprob float32[T], top ids
      int32[T, K], top logprobs float32[T, K]) of each token's successor, or None.
    """
    view, tables = unpack(packed, layout, tables, history)
    meta = shape.backend.prepare(view.attention, shape.attention)
    x = model.embed(params, view.tokens, view.attention.positions)  # [T, H]
    pools = list(pools)
    for layer in range(model.config.num_layers):
        attend = attention.make_attend(model.config, shape.backend, shape.attention, meta, layer)
        x, pools[layer] = model.layer(params, layer, x, attend, pools[layer])
    scores = None
    if scored:
        with jax.named_scope("prompt_scoring"):
            hidden = model.norm(params, x)
            vocab = model.config.vocab_size
            tile = partial(model.logits_tile, params, hidden)
            scores = scoring.score(tile, vocab, min(vocab, _SCORING_TILE), view.next_tokens)
    last = jnp.maximum(view.attention.query_offsets[1:] - 1, 0)  # [C]
    logits = model.logits(params, model.norm(params, x[last]))
    return pools, tables, view.chunks, logits, scores


def choose(
    variant: SamplerVariant, logits: jax.Array, rows: sampler.RowSampling, history: jax.Array, chunks: jax.Array
):
    """Chooses the next tokens and writes them to the rows' histories. Traced.

    Returns:
      (history, chosen int32[2, C], top): top is (ids, logprobs) with SamplerVariant.FULL, else None.
    """
    points = sample_points(chunks)
    with jax.named_scope("sampler"):
        output = sampler.sample(
            logits,
            jax.tree.map(lambda field: field[points.rows], rows),
            points.positions,
            history[points.rows],
            variant=variant,
        )
    written = jnp.where(points.samples, points.rows, history.shape[0])  # no such row: dropped
    history = history.at[written, points.positions].set(output.tokens, mode="drop")
    chosen = jnp.stack([output.tokens, jax.lax.bitcast_convert_type(output.logprobs, jnp.int32)])
    top = None if variant is not SamplerVariant.FULL else (output.top_ids, output.top_logprobs)
    return history, chosen, top


class StageRunner:
    """Compiled programs, weights, pool and row state of the layers one device owns."""

    def __init__(self, model: Model, params: Any, shape: StageShape, buckets: Sequence[int]) -> None:
        self.model = model
        self.params = params
        self.shape = shape
        self.buckets = tuple(buckets)
        self.n_blocks = 0
        self.compile_seconds: dict[int, float] = {}
        self._forward: dict[tuple[int, bool], Any] = {}
        self._choose: dict[tuple[int, SamplerVariant], Any] = {}
        self._admit: Any = None
        self._pools: list[Any] = []
        self._state = jax.tree.map(jnp.asarray, empty_state(shape.layout(self.buckets[-1])))
        self._admission_size = 1 + sum(int(np.prod(leaf.shape[1:])) for leaf in jax.tree.leaves(self._state))

    def _lower_forward(self, bucket: int, scored: bool, n_blocks: int):
        layout = self.shape.layout(bucket)
        pools = [self.shape.backend.pool(self.shape.attention, n_blocks)] * self.model.config.num_layers
        step = jax.jit(partial(forward, self.model, self.shape, layout, scored), donate_argnums=(1, 2))
        return step.lower(
            _abstract(self.params),
            pools,
            _abstract(self._state.tables),
            _abstract(self._state.history),
            jax.ShapeDtypeStruct((layout.size,), jnp.int32),
        )

    def temporaries(self) -> int:
        """Bytes that the largest iteration needs beside its arguments, from the compiled program itself."""
        one = self._lower_forward(self.buckets[-1], False, 1).compile().memory_analysis()
        return one.temp_size_in_bytes + max(0, one.output_size_in_bytes - one.alias_size_in_bytes)

    def compile(self, n_blocks: int, progress: Progress) -> None:
        """Compiles every program that any plan can ask for, then allocates the pool.

        Args:
          n_blocks: blocks of the pool.
        """
        self.n_blocks = n_blocks
        scored = (False, True) if self.shape.scoring else (False,)
        jobs: list[Callable[[], None]] = [
            partial(self._compile_forward, bucket, score) for bucket in reversed(self.buckets) for score in scored
        ]
        for chunks in sorted({max_chunks(bucket, self.shape.max_rows) for bucket in self.buckets}):
            jobs += [partial(self._compile_choose, chunks, variant) for variant in SamplerVariant]
        jobs.append(self._compile_admit)
        progress("compiling", 0, len(jobs))
        with ThreadPoolExecutor(_COMPILE_THREADS) as threads:
            for done, _ in enumerate(threads.map(lambda job: job(), jobs), start=1):
                progress("compiling", done, len(jobs))
        self._pools = kv_cache.allocate(
            self.shape.backend, self.shape.attention, self.model.config.num_layers, self.n_blocks
        )

    def _compile_forward(self, bucket: int, scored: bool) -> None:
        started = time.perf_counter()
        self._forward[bucket, scored] = self._lower_forward(bucket, scored, self.n_blocks).compile()
        if not scored:
            self.compile_seconds[bucket] = time.perf_counter() - started

    def _compile_choose(self, chunks: int, variant: SamplerVariant) -> None:
        step = jax.jit(partial(choose, variant), donate_argnums=2)
        self._choose[chunks, variant] = step.lower(
            jax.ShapeDtypeStruct((chunks, self.model.config.vocab_size), jnp.float32),
            _abstract(self._state.sampling),
            _abstract(self._state.history),
            jax.ShapeDtypeStruct((chunks, 4), jnp.int32),
        ).compile()

    def _compile_admit(self) -> None:
        packed = jax.ShapeDtypeStruct((self._admission_size,), jnp.int32)
        self._admit = jax.jit(admit, donate_argnums=0).lower(_abstract(self._state), packed).compile()

    def launch(self, plan: IterationPlan, packed: PackedPlan) -> Launched:
        """Enqueues one iteration; returns before it has run."""
        state = self._state
        for admission in packed.admissions:
            state = self._admit(state, admission)
        step = self._forward[plan.bucket, plan.scoring]
        self._pools, tables, chunks, logits, scores = step(
            self.params, self._pools, state.tables, state.history, packed.iteration
        )
        history, chosen, top = state.history, None, None
        if plan.sampler is not None:
            history, chosen, top = self._choose[chunks.shape[0], plan.sampler](logits, state.sampling, history, chunks)
        self._state = state._replace(tables=tables, history=history)
        launched = Launched(chosen, top, scores)
        for answer in jax.tree.leaves((chosen, top, scores)):
            answer.copy_to_host_async()
        return launched

    def measure(self, progress: Progress) -> list[BucketCost]:
        """Runs every bucket a few times, at most rows decoding and the rest a prompt, and reports the medians."""
        costs = []
        for done, bucket in enumerate(self.buckets, start=1):
            plan = self._warm_up_plan(bucket)
            packed = pack(plan, self.shape.layout(bucket))
            seconds = []
            for _ in range(1 + _WARM_UP_RUNS):
                started = time.perf_counter()
                wait(self.launch(plan, packed))
                seconds.append(time.perf_counter() - started)
            costs.append(
                BucketCost(
                    size=bucket,
                    compile_seconds=self.compile_seconds[bucket],
                    milliseconds=1e3 * statistics.median(seconds[1:]),
                )
            )
            progress("measuring buckets", done, len(self.buckets))
        return costs

    def _warm_up_plan(self, bucket: int) -> IterationPlan:
        """A full bucket: decodes at a middling context in all rows but one, and a prompt chunk in that.

        Keys are written to slots of the pool that no request holds yet. Each row writes a block of its own where the
        pool has enough of them; what is read does not matter.
        """
        block_size, rows = self.shape.attention.block_size, max_chunks(bucket, self.shape.max_rows)
        context = min(_WARM_UP_CONTEXT, self.shape.max_context - 1)
        prompt = min(bucket - rows + 1, self.shape.max_context, self.n_blocks * block_size)
        lengths = [1] * (rows - 1) + [prompt]
        chunks, changes, block = [], [], 0
        for row, length in enumerate(lengths):
            start = context if length == 1 else 0
            chunks.append(Chunk(row, start, length, True))
            for index in range(start // block_size, (start + length - 1) // block_size + 1):
                changes.append(TableChange(row, index, block % self.n_blocks))
                block += 1
        return IterationPlan(
            sequence=0,
            bucket=bucket,
            admissions=(),
            chunks=tuple(chunks),
            table_changes=tuple(changes),
            sampler=SamplerVariant.PLAIN,
            scoring=False,
        )


def wait(launched: Launched) -> IterationResult:
    """The answers of an iteration, once it has run."""
    empty = np.zeros((2, 0), np.int32)
    chosen = empty if launched.chosen is None else np.asarray(launched.chosen)
    top_ids, top_logprobs = (None, None) if launched.top is None else map(np.asarray, launched.top)
    scores = (None, None, None) if launched.scores is None else tuple(np.asarray(s) for s in launched.scores)
    return IterationResult(
        tokens=chosen[0],
        logprobs=chosen[1].view(np.float32),
        top_ids=top_ids,
        top_logprobs=top_logprobs,
        score_logprobs=scores[0],
        score_top_ids=scores[1],
        score_top_logprobs=scores[2],
    )


def _abstract(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)
