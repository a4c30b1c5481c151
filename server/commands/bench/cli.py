"""The command line of benchmarks: `jaxserve bench` and `python -m benchmarks`."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Mapping
from typing import NamedTuple

from server.commands.bench import machine
from server.commands.console import UserError, check_folder, say


class Benchmark(NamedTuple):
    """A benchmark's module, with HELP, add_flags(parser) and run(args), and its summary."""

    module: str
    summary: str


BENCHMARKS = {
    "offline": Benchmark("server.commands.bench.offline", "serve all requests at once, in this process"),
    "serve": Benchmark("server.commands.bench.serve", "load a server over gRPC"),
    "step": Benchmark("server.commands.bench.step", "time the compiled step alone"),
    "accuracy": Benchmark("server.commands.bench.accuracy", "compare the answers of eight bits with full width"),
}


def add_benchmarks(parser: argparse.ArgumentParser, benchmarks: Mapping[str, Benchmark], chosen: str | None) -> None:
    """Adds the benchmarks as subcommands; imports only the chosen one, so that --help is quick."""
    commands = parser.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True)
    for name, (module, summary) in benchmarks.items():
        command = commands.add_parser(
            name, help=summary, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
        )
        if name == chosen:
            benchmark = importlib.import_module(module)
            command.description = benchmark.HELP
            command.set_defaults(benchmark=benchmark.run, out=None)
            benchmark.add_flags(command)


def run(args: argparse.Namespace) -> int:
    """Runs the chosen benchmark; returns the exit code (2 for a mistake of the user's)."""
    if (warning := machine.busy()) is not None:
        say(f"note: {warning}")
    try:
        check_folder("--out", args.out)  # before anything is measured
        return args.benchmark(args)
    except (ValueError, UserError) as problem:
        say(f"error: {problem}")
        return 2
