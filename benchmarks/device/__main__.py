"""Times kernels, steps and peers on this device, in three commands of a few minutes each.

    python -m benchmarks.device kernels     ceilings, then attention kernels and products: each checked, then timed
    python -m benchmarks.device steps       whole steps of known shapes with random weights, and the choice of tokens
    python -m benchmarks.device peers       the same steps by other engines that are installed here
    python -m benchmarks.device report      tables and plots of what was recorded
    python -m benchmarks.device fit         the cost model's constants by the recorded steps, and the error of each step

Each appends a line of JSON to the file for every case as it ends, and goes on from there when it is run again. They
need a checkout, JAX, flax and numpy. `report` needs matplotlib for its plots.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from benchmarks.device import absent, models, records

COMMANDS = ("kernels", "steps", "peers", "report", "fit")
_MODULES = {"kernels": ("kernels", "products"), "steps": ("steps",), "peers": ("peers",)}  # whose cases they time


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code, 1 if cases are left."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.device", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument(
        "--records", type=Path, default=Path("device.jsonl"), metavar="FILE", help="(default: %(default)s)"
    )
    parser.add_argument("--small", action="store_true", help="tiny shapes, to see that everything runs")
    parser.add_argument(
        "--minutes",
        type=float,
        default=7.5,
        metavar="N",
        help="when to stop; run again to go on (default: %(default)s)",
    )
    parser.add_argument(
        "--case-seconds", type=float, default=150.0, metavar="N", help="most of one case (default: %(default)s)"
    )
    parser.add_argument("--retry", action="store_true", help="run cases again that failed")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where `report` writes (default: it prints)")
    parser.add_argument("--job", help=argparse.SUPPRESS)  # in the process that runs cases
    parser.add_argument("--done", type=json.loads, default=[], help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.command == "report":
        from benchmarks.device import report

        return report.write(records.read(args.records), args.out)
    if args.command == "fit":
        from benchmarks.device import fit

        print("\n".join(fit.table(records.read(args.records))))
        return 0
    if args.job is not None:
        absent.stand_in()
        modules = (importlib.import_module(f"benchmarks.device.{name}") for name in _MODULES[args.command])
        cases = chain.from_iterable(module.cases(args.job, small=args.small) for module in modules)
        records.run_cases(cases, set(args.done))
        return 0
    until = time.monotonic() + 60 * args.minutes
    if args.retry:
        records.drop_failures(args.records)
    for job in _jobs(args.command, small=args.small):
        worker = [sys.executable, "-m", "benchmarks.device", args.command, "--job", job, "--done"]
        if args.small:
            worker.insert(4, "--small")
        if not records.collect(
            job,
            worker,
            args.records,
            case_seconds=args.case_seconds,
            until=until,
            say=lambda told: print(told, flush=True),
        ):
            print(f"stopped in {job}; the same command goes on with {args.records}", file=sys.stderr)
            return 1
    return 0


def _jobs(command: str, *, small: bool) -> Sequence[str]:
    """The jobs of a command, each of which has a process of its own."""
    if command == "steps":
        return [*(model.shape for model in models.timed(small)), models.CHOICE]
    return ["kernels"] if command == "kernels" else ["transformers"]


if __name__ == "__main__":
    sys.exit(main())
