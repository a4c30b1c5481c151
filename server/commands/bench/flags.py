"""Flags that several benchmarks share, and what they describe."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from jaxserve.simulate import workload as traffic
from jaxserve.simulate.workload import Workload

SHAPE = "bloom-560m"


def add_output_flags(parser: argparse.ArgumentParser) -> None:
    """Adds --out and --quick."""
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("bench-results"),
        metavar="DIR",
        help="where JSON and plots are written (default: %(default)s)",
    )
    parser.add_argument("--quick", action="store_true", help="a tiny model and workload, to see that everything runs")


def add_model_flags(parser: argparse.ArgumentParser, default: str = SHAPE) -> None:
    """Adds --model and --shape, which `model` reads."""
    group = parser.add_argument_group("model").add_mutually_exclusive_group()
    group.add_argument("--model", type=Path, metavar="DIR", help="a checkpoint directory")
    group.add_argument("--shape", metavar="NAME", help=f"random weights of a known shape (default: {default})")


def add_workload_flags(parser: argparse.ArgumentParser) -> Any:
    """Adds a group of flags for numbers and lengths of requests, which `uniform` reads."""
    group = parser.add_argument_group("workload")
    group.add_argument("--requests", type=positive, metavar="N", help="(default: 200; of a trace: all)")
    group.add_argument("--prompt", default="32:256", metavar="LOW:HIGH", help="prompt tokens (default: %(default)s)")
    group.add_argument(
        "--output", default="1:128", metavar="LOW:HIGH", help="tokens to generate (default: %(default)s)"
    )
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of the workload (default: %(default)s)")
    return group


def add_step_flags(parser: argparse.ArgumentParser, steps: int = 20) -> None:
    """Adds the number of timed steps and their dtypes; `dtypes` reads the latter."""
    group = parser.add_argument_group("steps")
    group.add_argument("--steps", type=positive, default=steps, metavar="N", help="of each case (default: %(default)s)")
    group.add_argument(
        "--dtypes", default="float32,bfloat16", metavar="A,B", help="compute dtypes (default: %(default)s)"
    )


def uniform(args: argparse.Namespace, vocab_size: int) -> Workload:
    """The workload that the flags describe, all of it at time 0."""
    return traffic.uniform(
        requests=args.requests or (12 if args.quick else 200),
        prompt=traffic.Range.parse("4:16" if args.quick else args.prompt),
        output=traffic.Range.parse("1:8" if args.quick else args.output),
        vocab_size=vocab_size,
        seed=args.seed,
    )


def model(args: argparse.Namespace) -> Path | str:
    """A checkpoint directory as a path, or a shape by its name."""
    if args.model is not None:
        return args.model
    return args.shape or ("tiny" if args.quick else SHAPE)


def dtypes(args: argparse.Namespace) -> list[Any]:
    """The dtypes in the flag. Raises ValueError for one that cannot be measured."""
    dtypes = args.dtypes.split(",")
    for dtype in dtypes:
        if dtype not in ("float32", "bfloat16"):
            raise ValueError(f"{dtype!r} is no dtype to measure; there are float32 and bfloat16")
    return dtypes


def positive(text: str) -> int:
    """Parses a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)
