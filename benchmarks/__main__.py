"""`python -m benchmarks NAME` runs the benchmarks that need a checkout."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from server.commands.bench import cli
from server.commands.bench.cli import Benchmark

BENCHMARKS = {
    "faults": Benchmark("benchmarks.faults", "serve under faults and check every answer"),
    "fronts": Benchmark("benchmarks.fronts", "route from many fronts to simulated replicas"),
    "host": Benchmark("benchmarks.host", "time the host's work of an iteration"),
    "layouts": Benchmark("benchmarks.layouts", "run every documented layout on virtual devices"),
    "overlap": Benchmark("benchmarks.overlap", "tell which collectives run while devices multiply"),
    "overload": Benchmark("benchmarks.overload", "refuse calls of too much recorded traffic, simulated"),
    "paper": Benchmark("benchmarks.paper", "repeat a published evaluation with the simulator"),
    "peers": Benchmark("benchmarks.peers", "compare with transformers, CTranslate2 and llama.cpp"),
    "predictions": Benchmark("benchmarks.predictions", "compare plans of drawn specs with the compiler"),
    "refusals": Benchmark("benchmarks.refusals", "time calls that a full queue refuses"),
    "regression": Benchmark("benchmarks.regression", "find what has become slower"),
    "routing": Benchmark("benchmarks.routing", "find prompts in the prefix caches of many replicas"),
    "simulator": Benchmark("benchmarks.simulator_validation", "compare the simulator with an engine"),
    "sizes": Benchmark("benchmarks.sizes", "tell what an install takes on the disk, by package"),
    "soak": Benchmark("benchmarks.soak", "serve requests of every kind and look for leaks"),
    "starts": Benchmark("benchmarks.starts", "time starts with empty caches and full ones"),
    "templates": Benchmark("benchmarks.templates", "time the rendering of chats"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one benchmark; returns the exit code, 2 for a mistake of the user's."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__, allow_abbrev=False)
    cli.add_benchmarks(parser, BENCHMARKS, argv[0] if argv else None)
    try:
        return cli.run(parser.parse_args(argv))
    except KeyboardInterrupt:
        print("jaxserve: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
