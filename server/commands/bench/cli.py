"""The command line of `jaxserve bench`."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks import engine_commands, proof_commands, server_commands
from jaxserve.config import EngineConfig
from server.commands.bench.flags import Benchmarks


def add_arguments(
    parser: argparse.ArgumentParser,
    add_engine_flags: Callable[[argparse.ArgumentParser], None],
    engine_config: Callable[[argparse.Namespace], EngineConfig],
) -> None:
    """Adds the benchmarks as subcommands of `parser`.

    Args:
      add_engine_flags: adds the engine's flags, which are the same in every command, to a parser.
      engine_config: makes a configuration of them.
    """
    parser.set_defaults(engine_config=engine_config)
    commands = parser.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True)
    benchmarks = Benchmarks(commands=commands, add_engine_flags=add_engine_flags)
    for group in (engine_commands, server_commands, proof_commands):
        group.add(benchmarks)


def run(args: argparse.Namespace) -> int:
    """Runs the benchmark that was chosen; returns the exit code (2 for a mistake of the user's)."""
    from server.commands.bench import machine

    if (warning := machine.busy()) is not None:
        print(f"jaxserve: note: {warning}", file=sys.stderr)
    try:
        if args.out is not None:
            _check_out(args.out)
        timeline: Path | None = getattr(args, "timeline", None)
        if timeline is not None and (timeline.is_dir() or not timeline.parent.is_dir()):
            raise ValueError(f"--timeline {timeline} is no file in a folder that is there")
        return args.benchmark(args)
    except ValueError as problem:
        print(f"jaxserve: error: {problem}", file=sys.stderr)
        return 2


def _check_out(folder: Path) -> None:
    """Raises ValueError for a folder that nothing can be written to: before what is measured for it, and not after."""
    try:
        there = next(each for each in (folder, *folder.absolute().parents) if each.exists())
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as problem:
        raise ValueError(f"--out {folder} cannot be written to: {problem.strerror}") from None
