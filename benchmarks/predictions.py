"""`python -m benchmarks predictions`: what `jaxserve plan` predicts against the compiler, for drawn specs."""

from __future__ import annotations

import argparse
import math
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from benchmarks.drawn_specs import Draw, draw
from jaxserve import models
from jaxserve.config import EngineConfig
from jaxserve.planning import compiled, targets
from jaxserve.planning.deployment import Deployment
from jaxserve.planning.hlo import CollectiveOp
from jaxserve.planning.predict import predict
from jaxserve.planning.stage_load import Collective
from jaxserve.planning.tables import UNKNOWN, Section, size
from server.commands import console
from sharding import devices, spec, specs
from sharding.spec import ShardingSpec
from sharding.spec import parts as parts_of

HELP = """\
Draws model families, meshes of eight devices and sharding rules from seeds, compiles the engine's programs for them,
and compares the bytes of each device and the collectives with what `jaxserve plan` predicts.

  python -m benchmarks predictions --draws 40
  python -m benchmarks predictions --draws 5 --topology v6e:2x4"""

TOPOLOGIES = ("v4:2x2x2", "v5e:2x4", "v5p:2x2x2", "v6e:2x4", "tpu7x:1x2x2")  # of eight devices
_PREDICTABLE = ("embed", "word_embed", "head_dim", "router")  # logical axes that every second draw leaves whole
_SIZES = {  # by the names of all families
    "vocab_size": 4096,
    "hidden_size": 1024,
    "n_embd": 1024,
    "n_layer": 2,
    "num_hidden_layers": 2,
    "n_head": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_local_experts": 8,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 1024,
    "n_positions": 512,
    "max_position_embeddings": 512,
    "intermediate_size": 2048,
    "ffn_dim": 2048,
    "rotary_pct": 0.5,
    "word_embed_proj_dim": 512,
}
_ENGINE: dict[str, Any] = {"max_rows": 8, "buckets": (32,), "max_context": 512}
# In each part of the pool. Programs for TPUs hold up to 0.8 MiB a layer that no plan foresees: 16 KiB for each result
# of several arrays.
_SLOTS = 2**16

Exchanges = Counter[tuple[str, int]]  # bytes of the results by kind and devices of a group


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A stage as predicted and as compiled.

    Attributes:
      known: whether the plan says what the collectives are.
      bytes_known: whether it says how many bytes the activations take.
      kinds: number of collectives by kind, predicted and compiled.
      payloads: their bytes, predicted and compiled.
      nbytes: bytes of each device, predicted and compiled.
    """

    seed: int
    draw: Draw
    stage: int
    known: bool
    bytes_known: bool
    kinds: tuple[Counter[str], Counter[str]]
    payloads: tuple[Exchanges, Exchanges]
    nbytes: tuple[int, int]

    @property
    def bytes_apart(self) -> float:
        """Predicted bytes over compiled bytes, less one; 0 where the plan says that it does not know."""
        return self.nbytes[0] / self.nbytes[1] - 1 if self.bytes_known else 0.0

    @property
    def links_apart(self) -> float:
        """The share of the larger payload that is in one program only; 0 where the plan says that it does not know."""
        ours, theirs = self.payloads
        differ = sum(abs(ours[each] - theirs[each]) for each in ours.keys() | theirs.keys())
        return differ / max(ours.total(), theirs.total(), 1) if self.known else 0.0

    @property
    def holds(self) -> bool:
        """Whether the bytes are within 3%, and the collectives equal, or either said to be unknown."""
        same = self.kinds[0] == self.kinds[1] and self.payloads[0] == self.payloads[1]
        return abs(self.bytes_apart) <= 0.03 and (same or not self.known)


def drawn(seed: int, topology: str | None = None, *, parts: tuple[str, ...] = ()) -> tuple[Draw, Deployment]:
    """A draw that a plan accepts, and its deployment.

    Args:
      topology: the devices; None draws them as well, to be compiled for CPUs.
      parts: what the pool is split by, of "rows" and "slots".
    """
    rng = random.Random(seed)
    whole = _PREDICTABLE if seed % 2 else ()
    while True:
        each, name = draw(rng, whole=whole, exceptions=True, parts=parts), topology or rng.choice(TOPOLOGIES)
        mesh: Any = each.sections["mesh"]
        try:
            rules = _read(each)
            pools = math.prod(parts_of(rules.pool.get(part), mesh) for part in parts)
            deployment = Deployment(
                name=each.family,
                config=models.parse_config({"model_type": each.family, **_SIZES}),
                topology=devices.parse(name),
                engine=EngineConfig(
                    **_ENGINE,
                    slots=_SLOTS * pools,
                    mesh=",".join(f"{axis}={size}" for axis, size in mesh.items()),
                    dtype="bfloat16" if topology else "float32",
                ),
                spec=rules,
                context=128,
                on_cpus=topology is None,
            )
            predict(deployment)
        except ValueError:
            continue
        return each, deployment


def _read(drawn: Draw) -> ShardingSpec:
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(drawn.text)
        file.flush()
        return spec.read(file.name, specs.default(drawn.family))


def compare(seed: int, topology: str | None = None, *, parts: tuple[str, ...] = ()) -> list[Comparison]:
    """Compiles what a seed draws, for the topology or for this machine's CPU, and compares each stage."""
    each, deployment = drawn(seed, topology, parts=parts)
    plan = predict(deployment)
    where = targets.devices_of(deployment.topology) if topology else targets.cpus(deployment.topology.num_devices)
    stages = compiled.compile_stages(plan, where, lambda *_: None)
    tokens, max_rows = deployment.buckets[-1], deployment.engine.max_rows
    return [
        Comparison(
            seed=seed,
            draw=each,
            stage=index,
            bytes_known=predicted.activations_known,
            known=(foreseen := predicted.load.collectives) is not None,
            kinds=(compiled.count_kinds(foreseen or ()), compiled.count_kinds(found.collectives)),
            payloads=(carried(foreseen or (), tokens, max_rows), carried(found.collectives, tokens, max_rows)),
            nbytes=(predicted.total, found.total),
        )
        for index, (predicted, found) in enumerate(zip(plan.stages, stages, strict=True))
    ]


def carried(collectives: Iterable[Collective | CollectiveOp], tokens: int, rows: int) -> Exchanges:
    """Bytes of the results of an iteration's collectives, by kind and devices of a group.

    Args:
      tokens: of the bucket.
      rows: most rows with logits.
    """
    found: Exchanges = Counter()
    for each in collectives:
        of_one = 1
        if isinstance(each, Collective):
            of_one = min(tokens, rows) if each.per_row else tokens
        found[each.kind, each.group] += round(each.times * each.nbytes * of_one)
    return found


def largest_misses(found: Iterable[Comparison], count: int = 10) -> Section:
    """A table of the comparisons that are furthest apart."""
    worst = sorted(found, key=lambda each: -max(each.links_apart, abs(each.bytes_apart)))[:count]
    columns = ("seed", "family", "mesh", "bytes predicted", "compiled", "apart", "collectives predicted", "compiled")
    return Section("The largest misses", columns, [_row(each) for each in worst])


def _row(each: Comparison) -> tuple[str, ...]:
    mesh = ", ".join(f"{axis} {count}" for axis, count in each.draw.sections["mesh"].items())
    where = f"{mesh}, stage {each.stage}" if "stage" in each.draw.sections["mesh"] else mesh
    (kinds, found), (one, other) = each.kinds, each.payloads
    foreseen = _told(kinds, one) if each.known else UNKNOWN
    ours, theirs = map(size, each.nbytes)
    nbytes = (ours, theirs, f"{100 * each.bytes_apart:+.2f}%") if each.bytes_known else (UNKNOWN, theirs, "")
    return (str(each.seed), each.draw.family, where, *nbytes, foreseen, _told(found, other))


def _told(kinds: Counter[str], payloads: Exchanges) -> str:
    return ", ".join(f"{kinds[kind]} {kind}" for kind in sorted(kinds)) + f"; {size(payloads.total())}"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags."""
    parser.add_argument("--draws", type=int, default=40, metavar="N", help="seeds from 0 (default: %(default)s)")
    parser.add_argument("--seed", type=int, metavar="N", help="only this one, with its spec")
    parser.add_argument("--topology", choices=TOPOLOGIES, help="compile for it, not for this machine's CPU")


def run(args: argparse.Namespace) -> int:
    """Compares all draws. The exit code is 1 if something was predicted wrongly."""
    console.check_positive(args, "draws")
    targets.cpus(8)
    started, found, out = time.perf_counter(), [], console.tables()
    for seed in [args.seed] if args.seed is not None else range(args.draws):
        found += compare(seed, args.topology)
    if args.seed is not None:
        out.print(found[0].draw.family)
        out.print(found[0].draw.text, markup=False)
    held, known, nbytes = (sum(getattr(each, name) for each in found) for name in ("holds", "known", "bytes_known"))
    out.print(
        f"{held} of {len(found)} stages are as predicted: {nbytes} with bytes within 3% and {known} with equal "
        f"collectives, the others unknown ({time.perf_counter() - started:.0f} s)"
    )
    largest_misses(found).show(out)
    return 0 if held == len(found) else 1
