"""`python -m benchmarks overlap`: the bytes of collectives that a device sends while it multiplies, by the schedule."""

from __future__ import annotations

import argparse
import dataclasses
from collections import Counter

from rich.table import Table

from jaxserve.config import EngineConfig
from jaxserve.planning import model_catalog, targets
from jaxserve.planning.deployment import Deployment, programs
from jaxserve.planning.overlap import exchanges
from jaxserve.runner import compiler_options
from server.commands import console
from sharding import devices, specs
from sharding.spec import read

HELP = """\
Compiles some layers of an iteration for devices that are not there, and reads from the scheduled program which
collectives run while the device multiplies or attends, and which it waits for.

  python -m benchmarks overlap --model llama-3-70b --topology v6e:2x4 --tensor 8 --sharding seq.toml
  python -m benchmarks overlap --model llama-3-70b --topology h200:8 --tensor 8 --option NAME=VALUE"""


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
