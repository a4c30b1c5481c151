"""The flags that several benchmarks share, and what they say."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxserve.config import EngineConfig

SHAPE = "bloom-560m"


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmarks:
    """The benchmarks' place on the command line.

    Attributes:
      commands: argparse's subcommands of `jaxserve bench`.
      add_engine_flags: adds the engine's flags, which are the same in every command, to a parser.
    """

    commands: Any
    add_engine_flags: Callable[[argparse.ArgumentParser], None]

    def add(
        self,
        name: str,
        summary: str,
        text: str,
        benchmark: Callable[[argparse.Namespace], int],
        *,
        has_results: bool = True,
    ) -> argparse.ArgumentParser:
        """A benchmark, with the flags that those with results have.

        Args:
          summary / text: its help, in a line and in full.
          benchmark: runs it; returns the exit code.
          has_results: whether it writes files, which a quick run makes as well.
        """
        parser = self.commands.add_parser(
            name,
            help=summary,
            description=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        parser.set_defaults(benchmark=benchmark, out=None)
        if has_results:
            parser.add_argument(
                "--out",
                type=Path,
                default=Path("bench-results"),
                metavar="DIR",
                help="where JSON and plots are written (default: %(default)s)",
            )
            parser.add_argument(
                "--quick", action="store_true", help="a tiny model and workload, to see that everything runs"
            )
        return parser


def add_model_flags(parser: argparse.ArgumentParser, default: str = SHAPE) -> None:
    """Which model: a checkpoint, or random weights."""
    group = parser.add_argument_group("model").add_mutually_exclusive_group()
    group.add_argument("--model", type=Path, metavar="DIR", help="a checkpoint directory")
    group.add_argument("--shape", metavar="NAME", help=f"random weights of a known shape (default: {default})")


def add_workload_flags(parser: argparse.ArgumentParser) -> None:
    """What is served, and whether by two schedulers."""
    group = add_sizes(parser)
    group.add_argument(
        "--compare-schedulers", action="store_true", help="serve it twice, by iteration and by request-level batching"
    )


def add_sizes(parser: argparse.ArgumentParser) -> Any:
    """How many requests of which lengths; returns the group, for more of the kind."""
    group = parser.add_argument_group("workload")
    group.add_argument("--requests", type=positive, metavar="N", help="(default: 200; of a trace: all)")
    group.add_argument("--prompt", default="32:256", metavar="LOW:HIGH", help="prompt tokens (default: %(default)s)")
    group.add_argument(
        "--output", default="1:128", metavar="LOW:HIGH", help="tokens to generate (default: %(default)s)"
    )
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of the workload (default: %(default)s)")
    return group


def add_timeline_flag(parser: argparse.ArgumentParser) -> None:
    """Where the timeline is written."""
    parser.add_argument(
        "--timeline", type=Path, metavar="FILE", help="write when each stage ran which iteration, for ui.perfetto.dev"
    )


def add_step_flags(parser: argparse.ArgumentParser) -> None:
    """How often steps are timed, and in which dtypes."""
    group = parser.add_argument_group("steps")
    group.add_argument("--steps", type=positive, default=20, metavar="N", help="of each case (default: %(default)s)")
    group.add_argument(
        "--dtypes", default="float32,bfloat16", metavar="A,B", help="compute dtypes (default: %(default)s)"
    )


def uniform(args: argparse.Namespace, vocab_size: int) -> Any:
    """The workload that the flags describe, all at once."""
    from jaxserve.simulate import workload as load

    return load.uniform(
        requests=args.requests or (12 if args.quick else 200),
        prompt=load.Range.parse("4:16" if args.quick else args.prompt),
        output=load.Range.parse("1:8" if args.quick else args.output),
        vocab_size=vocab_size,
        seed=args.seed,
    )


def vocab_size(model: Path | str) -> int:
    """A checkpoint's, or a shape's."""
    from server.commands.bench import shapes

    return shapes.config_of(model).vocab_size


def model(args: argparse.Namespace) -> Path | str:
    """A checkpoint directory as a path, or a shape by its name."""
    if args.model is not None:
        return args.model
    return args.shape or ("tiny" if args.quick else SHAPE)


def checkpoint(args: argparse.Namespace) -> Path:
    """A checkpoint directory, of a shape one with random weights: whoever reads it again finds its programs cached."""
    from server.commands.bench import shapes

    chosen = model(args)
    return chosen if isinstance(chosen, Path) else shapes.checkpoint(chosen, shapes.cache_folder() / "checkpoints")


def schedulers(args: argparse.Namespace, config: EngineConfig) -> list[Any]:
    """By what the workload is served, in turn."""
    return ["iteration", "request"] if args.compare_schedulers else [config.scheduler]


def dtypes(args: argparse.Namespace) -> list[Any]:
    """The dtypes named; ValueError for one that is not measured."""
    dtypes = args.dtypes.split(",")
    for dtype in dtypes:
        if dtype not in ("float32", "bfloat16"):
            raise ValueError(f"{dtype!r} is no dtype to measure; there are float32 and bfloat16")
    return dtypes


def console() -> Any:
    """Where tables are printed."""
    from rich.console import Console

    # Where standard output is no terminal it has no width: a log should hold whole tables.
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=160)


def positive(text: str) -> int:
    """A flag's whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


def shares(text: str) -> list[float]:
    """A flag's list of numbers above 0."""
    try:
        shares = [float(part) for part in text.split(",")]
    except ValueError:
        shares = []
    if not shares or not all(0 < share < math.inf for share in shares):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers above 0 such as 0.5,0.9")
    return shares


def integers(text: str) -> list[int]:
    """A flag's list of whole numbers."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of whole numbers such as 8,256") from None
