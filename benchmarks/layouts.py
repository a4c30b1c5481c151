"""`python -m benchmarks layouts`: each documented layout on eight virtual devices of this machine's CPU."""

from __future__ import annotations

import argparse
import functools
import gc
import statistics
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve import models, startup
from jaxserve.config import EngineConfig
from jaxserve.engine import Engine
from jaxserve.generation.completion import Completion
from jaxserve.models.schema import ModelConfig
from jaxserve.planning import compiled, targets
from jaxserve.planning.deployment import Deployment
from jaxserve.planning.predict import predict
from jaxserve.planning.tables import UNKNOWN, Section, size
from server.commands import console
from server.commands.bench.step import Case, time_case
from sharding import devices, specs
from sharding.spec import read

HELP = """\
Serves a small model in each layout of docs/sharding.md on eight virtual devices of this machine's CPU. Tells whether
the answers are those of one device, what each device holds beside what is predicted, the collectives of the compiled
program, and the time of a step. Times of virtual devices say nothing of accelerators.

  python -m benchmarks layouts
  python -m benchmarks layouts --only rows.toml --only context.toml"""

DEVICES = 8
LAYOUTS = {  # with the rules of docs/sharding.md, on meshes of eight
    "default": "mesh.tensor = 8",
    "square.toml": 'mesh = {x = 4, y = 2}\naxes = {vocab = ["x", "y"], ffn = ["x", "y"], heads = "x"}',
    "seq.toml": 'mesh.tensor = 8\nactivations.tokens = "tensor"',
    "fsdp.toml": 'mesh = {fsdp = 4, tensor = 2}\naxes.embed = "fsdp"',
    "gather.toml": """
        mesh = {fsdp = 4, tensor = 2}
        axes.embed = "fsdp"
        parameters."*norm*".embed = "none"
        gather.weights = "fsdp"
        activations.embed = "none"
    """,
    "experts.toml": """
        mesh = {expert = 4, tensor = 2}
        axes = {expert = "expert", ffn = "tensor", heads = "expert", vocab = ["expert", "tensor"]}
    """,
    "rows.toml": """
        mesh = {attn = 2, tensor = 4}
        axes = {vocab = ["tensor", "attn"], ffn = ["tensor", "attn"], heads = "tensor"}
        parameters."layers.*.out.kernel".heads = ["tensor", "attn"]
        pool.rows = "attn"
    """,
    "context.toml": """
        mesh = {context = 2, tensor = 4}
        axes = {vocab = ["tensor", "context"], ffn = ["tensor", "context"], heads = "tensor"}
        parameters."layers.*.out.kernel".heads = ["tensor", "context"]
        pool.slots = "context"
    """,
    "prefill.toml": 'mesh = {context = 4, tensor = 2}\nactivations.tokens = "context"\npool.slots = "context"',
}
_SIZES: dict[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 512,
}
_ENGINE = EngineConfig(
    dtype="float32", attention="xla", max_rows=8, buckets=(32,), max_context=256, slots=8192, scoring=False
)
_STEP = Case(decodes=7, context=96, prompt=25)  # fills the bucket
_NEW = 16  # tokens of each answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One layout as it runs.

    Attributes:
      same: answers with the tokens of one device, and answers in all.
      logprob: the largest difference of a logprob to one device's.
      held: bytes of all arrays that the busiest device holds: weights, pool, state of rows.
      predicted: the same by the plan.
      temporaries: bytes beside them, of the compiled program and by the plan; None if that does not know.
      collectives: of an iteration of the largest bucket, by kind.
      foreseen: the same by the plan; None if it does not know.
      sent: bytes that a device sends in such an iteration.
      milliseconds: median of a step that fills the bucket.
    """

    name: str
    same: tuple[int, int]
    logprob: float
    held: int
    predicted: int
    temporaries: tuple[int, int | None]
    collectives: Counter[str]
    foreseen: Counter[str] | None
    sent: int
    milliseconds: float

    @property
    def holds(self) -> bool:
        """Whether the answers are one device's, memory is within 0.5%, and collectives are as foreseen or unknown."""
        is_close = abs(self.held / self.predicted - 1) < 0.005
        return self.same[0] == self.same[1] and is_close and self.foreseen in (None, self.collectives)


def family_of(layout: str) -> str:
    """A dense model, but for layouts of experts."""
    return "qwen3_moe" if layout == "experts.toml" else "llama"


def measure(layout: str, folder: Path, steps: int) -> Measured:
    """Serves, times, plans and compiles one layout."""
    family, rules = family_of(layout), folder / layout
    (config, params), expected = _model(family), _of_one_device(family)
    rules.write_text(LAYOUTS[layout])
    engine = replace(_ENGINE, sharding=str(rules))
    found, held, milliseconds = _served(config, params, engine, steps)
    deployment = Deployment(
        name=family,
        config=config,
        topology=devices.parse(f"h200:{DEVICES}"),
        engine=engine,
        spec=read(str(rules), specs.default(family)),
        context=_STEP.context,
        on_cpus=True,
    )
    plan = predict(deployment)
    (stage,), (program,) = plan.stages, compiled.compile_stages(plan, targets.cpus(DEVICES), startup.silent)
    collectives = stage.load.collectives
    return Measured(
        name=layout,
        same=(sum(a.token_ids == b.token_ids for a, b in zip(expected, found, strict=True)), len(expected)),
        logprob=max(_apart(*pair) for pair in zip(expected, found, strict=True)),
        held=held,
        predicted=stage.weights + stage.pool + stage.state,
        temporaries=(program.temporaries, stage.activations if stage.activations_known else None),
        collectives=compiled.count_kinds(program.collectives),
        foreseen=None if collectives is None else compiled.count_kinds(collectives),
        sent=program.sent,
        milliseconds=milliseconds,
    )


@functools.cache
def _model(family: str) -> tuple[ModelConfig, Any]:
    """A small model with random weights on the host, large enough that it prefers some tokens to others."""
    config = models.parse_config({"model_type": family, **_SIZES})
    params = models.build(config).init(0, jnp.float32)
    return config, jax.tree.map(lambda leaf: np.asarray(leaf * 4 if leaf.ndim > 1 else leaf), params)


@functools.cache
def _of_one_device(family: str) -> list[Completion]:
    return _served(*_model(family), _ENGINE, 0)[0]


def _served(config: ModelConfig, params: Any, engine: EngineConfig, steps: int) -> tuple[list[Completion], int, float]:
    """Greedy answers, bytes of the busiest device, and milliseconds of a step (0 without steps)."""
    before = _alive()
    started = startup.from_params(config, params, engine, startup.silent)
    held = max((_alive() - before).values())
    prompts = [[(7 * row + 3 * place) % config.vocab_size for place in range(5 + 9 * row)] for row in range(8)]
    milliseconds = statistics.median(time_case(started.loops[0], _STEP, steps)) if steps else 0.0
    with Engine(engine, started, None) as served:
        answers = served.generate(prompts, max_tokens=_NEW, temperature=0.0, ignore_eos=True, logprobs=0)
    return answers, held, milliseconds


def _alive() -> Counter[Any]:
    """Bytes of all arrays on each device."""
    gc.collect()
    found: Counter[Any] = Counter()
    for array in jax.live_arrays():
        for shard in array.addressable_shards:
            found[shard.device] += shard.data.nbytes
    return found


def _apart(one: Completion, other: Completion) -> float:
    assert one.logprobs is not None
    assert other.logprobs is not None
    return max(abs(a - b) for a, b in zip(one.logprobs, other.logprobs, strict=True))


def table(found: list[Measured]) -> Section:
    """What was measured, beside what was predicted."""
    columns = (
        "layout",
        "answers",
        "logprobs apart",
        "held",
        "predicted",
        "temporaries",
        "predicted",
        "collectives",
        "predicted",
        "sent",
        "ms",
    )
    return Section("Layouts on eight virtual devices", columns, list(_rows(found)))


def _rows(found: list[Measured]) -> Iterator[tuple[str, ...]]:
    for each in found:
        made, ours = each.temporaries
        kinds, foreseen = _told(each.collectives), UNKNOWN
        if each.foreseen is not None:
            foreseen = "the same" if each.foreseen == each.collectives else _told(each.foreseen)
        yield (
            each.name,
            "equal" if each.same[0] == each.same[1] else f"{each.same[0]} of {each.same[1]}",
            f"{each.logprob:.0e}",
            size(each.held),
            size(each.predicted),
            size(made),
            UNKNOWN if ours is None else size(ours),
            kinds,
            foreseen,
            size(each.sent),
            f"{each.milliseconds:.1f}",
        )


def _told(kinds: Counter[str]) -> str:
    return ", ".join(f"{kinds[kind]} {kind}" for kind in sorted(kinds)) or "none"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags."""
    parser.add_argument("--only", action="append", choices=tuple(LAYOUTS), metavar="LAYOUT", help="one of them")
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="timed steps (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Measures the layouts. The exit code is 1 if one answers otherwise, or differs from its plan."""
    console.check_positive(args, "steps")
    targets.cpus(DEVICES)
    with tempfile.TemporaryDirectory() as folder:
        found = [measure(layout, Path(folder), args.steps) for layout in args.only or LAYOUTS]
    table(found).show(console.tables())
    return 0 if all(each.holds for each in found) else 1
