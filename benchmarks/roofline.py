"""Times whole steps beside their lower bounds, and the choice of tokens beside a sort.

    python -m benchmarks.roofline [--small]

prints one line of JSON. `python -m pallas_kernels.bench` runs it and divides the figures by the device's measured
bandwidth and matmul rate.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import itertools
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import environments
from jaxserve import startup
from jaxserve.config import EngineConfig
from jaxserve.iteration import SamplerVariant
from jaxserve.models.schema import ModelConfig
from jaxserve.sampling import sampler
from jaxserve.sampling_params import SamplingParams
from pallas_kernels.bench import seconds
from server.commands.bench import machine, shapes, step

_STEPS = 20
_WANTED_ROWS = (1, 8, 32)  # of bloom-7b1, where the target holds


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedModel:
    """A shape, and the sizes of the steps that are timed on it."""

    shape: str
    context: int
    rows: tuple[int, ...]
    prompt: int

    @property
    def cases(self) -> list[step.Case]:
        return [*(step.Case(decodes=rows, context=self.context) for rows in self.rows), step.Case(prompt=self.prompt)]


_ROWS = (1, 8, 32, 128)
MODELS = (
    TimedModel(shape="bloom-560m-250k", context=512, rows=_ROWS, prompt=4096),
    TimedModel(shape="bloom-7b1", context=512, rows=_ROWS, prompt=4096),
    TimedModel(shape="gpt2-xl", context=512, rows=_ROWS, prompt=1000),
)
SMALL_MODELS = (TimedModel(shape="tiny", context=10, rows=(1, 3), prompt=8),)


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


def time_model(model: TimedModel, steps: int) -> list[dict[str, Any]]:
    """Median milliseconds of each case, and the bytes and operations that it needs."""
    config, dtype = shapes.config_of(model.shape), "bfloat16"
    engine = EngineConfig(max_rows=max(model.rows), max_context=config.max_position or 2 * model.prompt)
    timed, memory = step.measure(model.shape, dtype, model.cases, steps, engine, startup.silent)
    return [
        {
            "name": f"{model.shape} {each.case.name}",
            "ms": each.median,
            "nbytes": nbytes(config, each.case, memory.weights, 2),
            "flops": flops(config, each.case, memory.weights, 2),
            "prefill": each.case.decodes == 0,
            "wanted": model.shape == "bloom-7b1" and each.case.decodes in _WANTED_ROWS,
        }
        for each in timed
    ]


def time_transformers(models: Sequence[TimedModel], steps: int) -> dict[str, Any] | str:
    """Times the steps of the transformers library; a reason where it is not installed.

    Each model has a process of its own. The library has no continuous batching for BLOOM.
    """
    if not all(map(importlib.util.find_spec, ("torch", "transformers"))):
        return "not installed"
    result: dict[str, Any] = {"ms": {}, "continuous ms": {}}
    for model, continuous in itertools.product(models, (False, True)):
        entries = shapes.SHAPES[model.shape]
        if continuous and entries["model_type"] == "bloom":
            continue
        job = {
            "entries": entries,
            "dtype": "bfloat16",
            "cases": [dataclasses.asdict(case) for case in model.cases],
            "steps": steps,
            "continuous": continuous,
            "threads": machine.usable_cores(),
        }
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump(job, file)
            file.flush()
            said = json.loads(
                environments.run_script(Path(sys.executable), "run_transformers.py", file.name, name="transformers")
            )
        result["version"] = said["version"]
        for case, times in zip(model.cases, said["milliseconds"], strict=True):
            if times is not None:
                result["continuous ms" if continuous else "ms"][f"{model.shape} {case.name}"] = statistics.median(times)
    return result


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


def time_choices(count: int, vocabulary: int) -> list[dict[str, Any]]:
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
    return [{"name": f"{count} x {vocabulary}, {name}", "ms": 1e3 * seconds(call, 2)} for name, call in ways.items()]


def main() -> int:
    """Entry point of `python -m benchmarks.roofline`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.roofline")
    parser.add_argument("--small", action="store_true")
    small = parser.parse_args().small
    models, steps = (SMALL_MODELS, 3) if small else (MODELS, _STEPS)
    result = {
        "transformers": time_transformers(models, steps),  # before JAX takes the device's memory
        "steps": [each for model in models for each in time_model(model, steps)],
        "choice of tokens": time_choices(*(2, 1000) if small else (32, 250_880)),
    }
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
