"""Times whole steps of known shapes beside their lower bounds, and the choice of tokens beside a sort."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.device import kernels
from benchmarks.device.models import CHOICE, TimedModel, timed
from benchmarks.device.records import Case
from jaxserve import startup
from jaxserve.config import EngineConfig
from jaxserve.iteration import SamplerVariant
from jaxserve.models.schema import ModelConfig
from jaxserve.sampling import sampler
from jaxserve.sampling_params import SamplingParams
from server.commands.bench import shapes, step

_STEPS = 20


def nbytes(config: ModelConfig, case: step.Case, weights: int, itemsize: int) -> int:
    """The bytes that a step must read: every weight once, and the slots in use."""
    slots = case.decodes * (case.context + 1) + case.prompt
    return weights + 2 * slots * config.num_layers * config.num_kv_heads * config.head_dim * itemsize


def flops(config: ModelConfig, case: step.Case, weights: int, itemsize: int) -> int:
    """The operations that a step needs: products with the weights, and causal attention.

    Only one position a row is multiplied with the token table.
    """
    table = config.vocab_size * config.hidden_size
    pairs = case.decodes * (case.context + 1) + case.prompt * (case.prompt + 1) // 2
    attended = 4 * config.num_layers * config.num_heads * config.head_dim * pairs
    return 2 * case.tokens * (weights // itemsize - table) + 2 * case.rows * table + attended


class TimedEngine:
    """The programs of a model's steps, compiled when the first is timed."""

    def __init__(self, model: TimedModel, steps: int) -> None:
        self.model, self.steps = model, steps

    @cached_property
    def started(self) -> startup.EngineParts:
        """The engine's parts, with random weights, a random pool, and buckets of the steps' exact sizes."""
        config, params = shapes.random_params(self.model.shape, "bfloat16")
        engine = EngineConfig(
            dtype="bfloat16",
            max_rows=max(self.model.rows),
            max_context=config.max_position or 2 * self.model.prompt,
            buckets=tuple(sorted({case.tokens for case in self.model.cases})),
            slots=max(case.slots(step.WARM_UP + self.steps) for case in self.model.cases),
            scoring=False,
        )
        started = startup.from_params(config, params, engine, startup.silent)
        for stage in started.loops[0].pipeline.stages:
            leaves = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), stage.pool)
            stage.pool = None  # there may be no memory for two
            stage.pool = kernels.random_pool(leaves)
        return started

    def compile(self) -> dict[str, Any]:
        """Starts the engine; returns what it took and what is on the device."""
        began = time.perf_counter()
        report = self.started.report
        return {
            "seconds": time.perf_counter() - began,
            "weights": report.weight_bytes,
            "pool": report.pool_bytes,
            **kernels.device(),
        }

    def time(self, case: step.Case) -> dict[str, Any]:
        """Milliseconds of a step (median and 95th percentile), and the bytes and operations that it needs."""
        (replica,), weights = self.started.loops, self.started.report.weight_bytes
        config, times = replica.pipeline.model.config, step.time_case(replica, case, self.steps)
        return {
            "ms": statistics.median(times),
            "p95 ms": float(np.percentile(times, 95)),
            "nbytes": nbytes(config, case, weights, 2),
            "flops": flops(config, case, weights, 2),
        }


def choose_by_sorting(logits: jax.Array, rows: sampler.RowSampling, positions: jax.Array) -> jax.Array:
    """Tokens by top_k, top_p and temperature, int32[S]: sorts the whole vocabulary, then draws."""
    order = jnp.argsort(-logits, axis=-1)
    ranked = jnp.take_along_axis(logits, order, -1) / rows.temperature[:, None]
    kept = jnp.arange(logits.shape[1]) < rows.top_k[:, None]
    shares = jax.nn.softmax(jnp.where(kept, ranked, -jnp.inf), axis=-1)
    before = jnp.cumsum(shares, axis=-1) - shares
    shares = jnp.where(before < rows.top_p[:, None], shares, 0)
    reached = jnp.cumsum(shares, axis=-1)
    target = sampler.uniform(rows.seed, rows.sample_index, positions)[:, None] * reached[:, -1:]
    return jnp.take_along_axis(order, jnp.argmax(reached > target, axis=-1, keepdims=True), -1)[:, 0]


def time_choices(count: int, vocabulary: int) -> Iterator[Case]:
    """Milliseconds to choose the next token of `count` rows, by our sampler and by a sort."""
    params = SamplingParams(temperature=0.8, top_k=50, top_p=0.9, max_tokens=1)
    rows = jax.tree.map(lambda value: np.broadcast_to(value, (count, *value.shape)), sampler.encode(params, 0))
    rows = jax.tree.map(jnp.asarray, rows)
    logits = 4 * jax.random.normal(jax.random.key(0), (count, vocabulary))
    positions, history = jnp.arange(count, dtype=jnp.int32), jnp.zeros((count, 1), jnp.int32)

    def ours(variant: SamplerVariant) -> Any:
        choose = jax.jit(partial(sampler.sample, variant=variant))
        return lambda: choose(logits, rows, positions, history).tokens

    sort = jax.jit(choose_by_sorting)
    ways = {
        "sampler, temperature alone": ours(SamplerVariant.PLAIN),
        "sampler, top_k 50 and top_p 0.9": ours(SamplerVariant.TRUNCATED),
        "sorting, top_k 50 and top_p 0.9": lambda: sort(logits, rows, positions),
    }
    for name, call in ways.items():
        yield f"{count} x {vocabulary}, {name}", partial(_timed, call)


def _timed(call: Callable[[], Any]) -> dict[str, Any]:
    return {"ms": 1e3 * kernels.seconds(call, 2)}


def cases(job: str, *, small: bool) -> Iterator[Case]:
    """The steps of one model, by its shape, or the choice of tokens."""
    if job == CHOICE:
        yield from time_choices(*(2, 1000) if small else (32, 250_880))
        return
    (model,) = (each for each in timed(small) if each.shape == job)
    engine = TimedEngine(model, 3 if small else _STEPS)
    yield f"{job} start", engine.compile
    for case in model.cases:
        yield f"{job} {case.name}", partial(engine.time, case)
