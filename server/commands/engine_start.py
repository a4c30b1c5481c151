"""From the command line to an engine that is compiled and ready."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from jaxserve.multihost.failure import HostFailed
from server.commands import flags
from server.commands.console import Report, UserError, mending, show, starting

if TYPE_CHECKING:
    from jaxserve.config import EngineConfig
    from jaxserve.engine import Engine
    from jaxserve.multihost.config import ClusterConfig

# How much of a GPU jax sets aside: the rest is the driver's and the collectives'. jax's own choice is 0.75.
_GPU_MEMORY = "0.93"


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Which model to run and how; `load_engine` reads them."""
    parser.add_argument(
        "--model", type=Path, metavar="DIR", help="checkpoint directory (default: the built-in demo model)"
    )
    flags.add_engine_flags(parser)


def add_profile_flag(parser: argparse.ArgumentParser) -> None:
    """Where `profiling` writes to."""
    parser.add_argument("--profile", type=Path, metavar="DIR", help="write a jax profiler capture of the run here")


def model_directory(args: argparse.Namespace) -> Path:
    """The checkpoint to run. Raises UserError if there is no such directory."""
    if args.model is None:
        from jaxserve.demo import DEMO_MODEL

        return Path(DEMO_MODEL)
    if not args.model.is_dir():
        raise UserError(f"--model {args.model} is not a directory")
    return args.model


def load_engine(args: argparse.Namespace) -> Engine:
    """The engine that the flags describe, loaded and compiled. Raises UserError for what the user can correct."""
    path = model_directory(args)
    with mending():
        config = flags.engine_config(args)  # before jax is imported: a wrong flag is reported at once
    return start_engine(path, config)


def start_engine(path: Path, config: EngineConfig, cluster: ClusterConfig | None = None) -> Engine:
    """Loads and compiles an engine and reports the progress. Raises UserError for what the user can correct.

    Args:
      cluster: this host's place among several.
    """
    from server.commands import hosts

    with mending(), starting() as report:
        try:
            engine = make_engine(path, config, report, cluster)
        except HostFailed as failure:
            hosts.end_failed(failure)
    show(engine.report, model=path.name)
    return engine


def make_engine(path: Path, config: EngineConfig, progress: Report, cluster: ClusterConfig | None = None) -> Engine:
    """Loads and compiles."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", _GPU_MEMORY)
    if cluster is not None:
        from server.commands import hosts

        return hosts.lead(path, config, cluster, progress)
    from jaxserve.engine import Engine

    return Engine.from_checkpoint(path, config, progress=progress)


@contextlib.contextmanager
def profiling(folder: Path | str | None) -> Iterator[None]:
    """Captures what runs inside with jax's profiler where `--profile DIR` was given."""
    if folder is None:
        yield
        return
    import jax

    with jax.profiler.trace(str(folder)):
        yield
