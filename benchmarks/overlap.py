"""`python -m benchmarks overlap`: the bytes of collectives that a device sends while it multiplies, by the schedule."""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from rich.table import Table

from jaxserve.config import EngineConfig
from jaxserve.planning import model_catalog, targets
from jaxserve.planning.compiled import KINDS, collectives
from jaxserve.planning.deployment import Deployment, programs
from jaxserve.runner import compiler_options
from server.commands import console
from sharding import devices, specs
from sharding.spec import read

HELP = """\
Compiles some layers of an iteration for devices that are not there, and reads from the scheduled program which
collectives run while the device multiplies or attends, and which it waits for.

  python -m benchmarks overlap --model llama-3-70b --topology v6e:2x4 --tensor 8 --sharding seq.toml
  python -m benchmarks overlap --model llama-3-70b --topology h200:8 --tensor 8 --option NAME=VALUE"""

_COMPUTATION = re.compile(r"(?:ENTRY )?%(?P<name>[\w.-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"%(?P<name>[\w.-]+) = (?:\(.*?\)|\S+) (?P<op>[a-z][a-z0-9-]*)\((?:%(?P<operand>[\w.-]+))?")
_CALLED = re.compile(r"(?:calls|to_apply|body)=%([\w.-]+)")
_RING = re.compile(r" collective-permute(?:-start)?\(.*source_target_pairs=\{(.*?)\}\}")
_PRODUCT = re.compile(
    r" (?:dot|convolution)\(| fusion\(.*kind=kOutput|__triton_(?:nested_)?gemm"
    r'|custom_call_target="(?:tpu_custom_call|__cublas|__cudnn|__gpu\$xla)'
)


class Exchange(NamedTuple):
    """A collective of a scheduled program.

    Attributes:
      sent: bytes that a device sends.
      under: whether the device multiplies or attends between its start and its end.
    """

    kind: str
    sent: float
    under: bool


def exchanges(text: str) -> Iterator[Exchange]:
    """The collectives of a scheduled HLO module, those in loops as often as they run."""
    parts: dict[str, list[str]] = {}
    lines: list[str] = []
    entry = ""
    for line in text.splitlines():
        if (opening := _COMPUTATION.match(line)) is not None:
            lines = parts.setdefault(opening["name"], [])
            entry = opening["name"] if line.startswith("ENTRY") else entry
        else:
            lines.append(line)
    yield from _scheduled(parts, entry, 1)


def _scheduled(parts: dict[str, list[str]], name: str, times: int) -> Iterator[Exchange]:
    """The exchanges of a computation that runs so often."""
    lines = parts[name]
    ends = {
        found["operand"]: index
        for index, line in enumerate(lines)
        if (found := _INSTRUCTION.search(line)) is not None and found["op"].endswith("-done")
    }
    for index, line in enumerate(lines):
        found, called = _INSTRUCTION.search(line), _CALLED.search(line)
        inside = parts.get(called[1], []) if called is not None else []
        op = "" if found is None else found["op"].removesuffix("-start")
        if op == "while" and called is not None:
            yield from _scheduled(parts, called[1], times * _trips(inside))
        elif found is not None and (op in KINDS or op in ("fusion", "call", "async")):
            until = ends.get(found["name"], index)
            under = any(_PRODUCT.search(between) for between in lines[index + 1 : until])
            for kind, sent in _sent([line] if op in KINDS else inside, line):
                yield from [Exchange(kind, sent, under)] * times


def _trips(body: list[str]) -> int:
    """How often a loop runs that multiplies by parts as they go around a ring: so often that each part comes once."""
    rings = [match[1].count("},{") + 1 for line in body if (match := _RING.search(line)) is not None]
    return max(rings[0] // len(rings), 1) if rings else 1


def _sent(lines: list[str], caller: str) -> Iterator[tuple[str, float]]:
    """(kind, bytes sent by a device) of the collectives among instructions, which may be what a caller calls."""
    for op in collectives("\n".join(lines)):
        share = (op.group - 1) / op.group if op.group else 1.0
        scattered = op.kind == "all-reduce" and "calls=%all-reduce-scatter" in caller  # so TPUs have reduce-scatters
        kind = "reduce-scatter" if scattered else op.kind
        size = op.nbytes * (op.group if op.kind == "reduce-scatter" else 1)
        yield from [(kind, size * share * (2 if kind == "all-reduce" else 1))] * op.times


def compiled(args: argparse.Namespace) -> str:
    """The scheduled program of some layers of an iteration."""
    name, config = model_catalog.find(args.model)
    spec, rows = specs.default(config.family), min(args.bucket, 64)
    engine = EngineConfig(
        mesh=args.mesh,
        sharding=args.sharding,
        tensor=args.tensor,
        dtype="bfloat16",
        max_rows=rows,
        buckets=(args.bucket,),
        max_context=2048,
        slots=rows * 2048,
    )
    deployment = Deployment(
        name=name,
        config=dataclasses.replace(config, num_layers=args.layers),
        topology=devices.parse(args.topology),
        engine=engine,
        spec=spec if args.sharding is None else read(args.sharding, spec),
    )
    (stage,) = programs(deployment, targets.devices_of(deployment.topology))
    with targets.lowering(stage.mesh):
        lowered = stage.lower_forward(args.bucket, rows * 2048 // stage.shape.attention.block_size)
    given = dict(option.split("=", 1) for option in args.option)
    return lowered.compile(compiler_options.of(stage.platform, absent=True) | given).as_text() or ""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags."""
    parser.add_argument("--model", required=True, help="a name of `jaxserve plan`")
    parser.add_argument("--topology", required=True, help="devices, as for `jaxserve plan`")
    parser.add_argument("--tensor", type=int, default=1, metavar="N", help="devices that share each layer")
    parser.add_argument("--mesh", metavar="NAME=N,...", help="axes of the mesh")
    parser.add_argument("--sharding", metavar="FILE", help="a spec file")
    parser.add_argument("--layers", type=int, default=2, metavar="N", help="layers to compile (default: %(default)s)")
    parser.add_argument("--bucket", type=int, default=256, metavar="N", help="tokens (default: %(default)s)")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="of the compiler")


def run(args: argparse.Namespace) -> int:
    """Compiles and tells."""
    sent: Counter[tuple[str, bool]] = Counter()
    count: Counter[tuple[str, bool]] = Counter()
    for kind, nbytes, under in exchanges(compiled(args)):
        sent[kind, under] += round(nbytes)
        count[kind, under] += 1
    table = Table("collective", "while it multiplies", "number", "KiB sent a layer", title=f"{args.layers} layers")
    for kind, under in sorted(sent):
        row = (
            kind,
            "yes" if under else "no",
            str(count[kind, under]),
            f"{sent[kind, under] / args.layers / 1024:,.0f}",
        )
        table.add_row(*row)
    out = console.tables()
    out.print(table)
    hidden = sum(nbytes for (_, under), nbytes in sent.items() if under)
    out.print(f"{hidden / max(sent.total(), 1):.0%} of the bytes are sent while the device multiplies")
    return 0
