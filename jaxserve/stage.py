"""The layers on one device: one compiled program a bucket, the pool donated from each to the next.

Everything is compiled ahead of time, for exactly the shapes that plans come in. A call with any other shape is an
error, not a compilation, so nothing can compile once the engine is ready.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve import kv_cache
from jaxserve.batch import PackedPlan, admit, empty_state, pack
from jaxserve.buckets import BucketCost
from jaxserve.iteration import Chunk, IterationPlan, IterationResult, SamplerVariant, TableChange, max_chunks
from jaxserve.models import Model
from jaxserve.programs import Forward, Scores, StageShape, choose, forward, score

Progress = Callable[[str, int, int], None]

_COMPILE_THREADS = 2  # each takes some 200 MB while it compiles
_WARM_UP_CONTEXT = 128  # context at which the buckets' costs are measured
_WARM_UP_RUNS = 3


class Launched(NamedTuple):
    """An iteration under way: device arrays that will hold its answers.

    Attributes:
      chosen: int32[2, C] tokens, and logprobs bit for bit.
      top: (ids, logprobs) [C, MAX_LOGPROBS], with SamplerVariant.FULL.
      scores: with plan.scoring.
    """

    chosen: jax.Array | None
    top: tuple[jax.Array, jax.Array] | None
    scores: Scores | None


class StageRunner:
    """Compiled programs, weights, pool and row state of the layers one device owns."""

    def __init__(self, model: Model, params: Any, shape: StageShape, buckets: Sequence[int]) -> None:
        self.model = model
        self.params = params
        self.shape = shape
        self.buckets = tuple(buckets)
        self.n_blocks = 0
        self.compile_seconds: dict[int, float] = {}
        self._forward: dict[int, Any] = {}
        self._score: dict[int, Any] = {}
        self._choose: dict[tuple[int, SamplerVariant], Any] = {}
        self._admit: Any = None
        self._pool: Any = None
        self._state = jax.tree.map(jnp.asarray, empty_state(shape.layout(self.buckets[-1])))
        self._admission_size = 1 + sum(int(np.prod(leaf.shape[1:])) for leaf in jax.tree.leaves(self._state))

    def _lower_forward(self, bucket: int, n_blocks: int):
        layout = self.shape.layout(bucket)
        pool = self.shape.backend.pool(self.shape.attention, n_blocks * self.model.config.num_layers)
        step = jax.jit(partial(forward, self.model, self.shape, layout, n_blocks), donate_argnums=(1, 2))
        return step.lower(
            _abstract(self.params),
            pool,
            _abstract(self._state.tables),
            _abstract(self._state.history),
            jax.ShapeDtypeStruct((layout.size,), jnp.int32),
        )

    def temporaries(self) -> int:
        """Bytes that the largest iteration needs beside its arguments, from the compiled program itself."""
        one = self._lower_forward(self.buckets[-1], 1).compile().memory_analysis()
        assert one is not None
        return one.temp_size_in_bytes + max(0, one.output_size_in_bytes - one.alias_size_in_bytes)

    def compile(self, n_blocks: int, progress: Progress) -> None:
        """Compiles every program that any plan can ask for, then allocates the pool.

        Args:
          n_blocks: blocks of the pool.
        """
        self.n_blocks = n_blocks
        jobs: list[Callable[[], None]] = [partial(self._compile_forward, b) for b in reversed(self.buckets)]
        if self.shape.scoring:
            jobs += [partial(self._compile_score, bucket) for bucket in self.buckets]
        for chunks in sorted({max_chunks(bucket, self.shape.max_rows) for bucket in self.buckets}):
            jobs += [partial(self._compile_choose, chunks, variant) for variant in SamplerVariant]
        jobs.append(self._compile_admit)
        progress("compiling", 0, len(jobs))
        with ThreadPoolExecutor(_COMPILE_THREADS) as threads:
            for done, _ in enumerate(threads.map(lambda job: job(), jobs), start=1):
                progress("compiling", done, len(jobs))
        _give_back_memory()
        self._pool = kv_cache.allocate(
            self.shape.backend, self.shape.attention, self.model.config.num_layers, self.n_blocks
        )

    def _compile_forward(self, bucket: int) -> None:
        started = time.perf_counter()
        self._forward[bucket] = self._lower_forward(bucket, self.n_blocks).compile()
        self.compile_seconds[bucket] = time.perf_counter() - started

    def _compile_score(self, bucket: int) -> None:
        hidden = jax.eval_shape(
            self.model.embed,
            self.params,
            jax.ShapeDtypeStruct((bucket,), jnp.int32),
            jax.ShapeDtypeStruct((bucket,), jnp.int32),
        )
        self._score[bucket] = (
            jax.jit(partial(score, self.model))
            .lower(_abstract(self._ends), hidden, jax.ShapeDtypeStruct((bucket,), jnp.int32))
            .compile()
        )

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

    @property
    def _ends(self) -> Any:
        return {"embed": self.params["embed"], "head": self.params["head"]}

    def launch(self, plan: IterationPlan, packed: PackedPlan) -> Launched:
        """Enqueues one iteration; returns before it has run."""
        state = self._state
        for admission in packed.admissions:
            state = self._admit(state, admission)
        out = Forward(
            *self._forward[plan.bucket](self.params, self._pool, state.tables, state.history, packed.iteration)
        )
        self._pool, history = out.pool, state.history
        chosen = top = scores = None
        if plan.scoring:
            scores = self._score[plan.bucket](self._ends, out.hidden, out.next_tokens)
        if plan.sampler is not None:
            choose_ = self._choose[out.chunks.shape[0], plan.sampler]
            history, chosen, top = choose_(out.logits, state.sampling, history, out.chunks)
        self._state = state._replace(tables=out.tables, history=history)
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
    )


def _give_back_memory() -> None:
    """Returns what compiling has freed to the system, where the C library can: the pool takes its place."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _abstract(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)
