"""`jaxserve compile`: fills the compilation cache for servers that start later."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from server.commands.console import UserError, say, user_errors
from server.commands.engine_start import add_model_flags, load_engine

if TYPE_CHECKING:
    from sharding.devices import Topology

HELP = """\
Compiles every program of a server with these settings and keeps them in the compilation cache (--compilation-cache).
A server with the same settings on a machine of the same kind then loads them.

  jaxserve compile --model DIR --max-rows 32
  jaxserve compile --model DIR --tensor 8 --topology h200:8     an error where there are not eight GPUs

Run it where the server will run: while an image is built, or before traffic is moved. A program fits only the devices,
driver and versions that it was compiled with. Its number of slots depends on the memory that the weights leave. To see
what a compiler makes of a model for devices that are not here, use `jaxserve plan --compile`."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--topology", metavar="h200:8", help="fail unless the machine has these devices")
    add_model_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Returns 0 once everything is in the cache."""
    if args.compilation_cache == "off":
        raise UserError("--compilation-cache is off; compiled programs need a directory")
    if args.topology is not None:
        with user_errors():
            from sharding.devices import parse

            check_here(parse(args.topology))
    with user_errors():
        from jaxserve.runner.program_cache import ProgramCache

        ProgramCache(Path(args.compilation_cache)).check_kept()
    report = load_engine(args).report
    compiled = report.programs - report.programs_loaded
    say(f"{compiled} programs compiled, {report.programs_loaded} found, in {args.compilation_cache}")
    return 0


def check_here(topology: Topology) -> None:
    """Raises UserError if this machine lacks the devices of the topology."""
    import jax

    here = jax.devices()
    if here[0].platform != topology.device.platform or len(here) < topology.num_devices:
        raise UserError(
            f"--topology {topology} is not here: this machine has {len(here)} x {here[0].device_kind}. A program "
            "fits only the devices, driver and memory it was compiled with: run this where the server will run"
        )
