"""Starts an engine from command-line flags."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxserve.multihost.failure import HostFailed
from jaxserve.runner import cache_folder
from server.commands import buckets, flags, hub, interrupt
from server.commands.console import Progress, UserError, progress_bars, show, user_errors

if TYPE_CHECKING:
    from jaxserve.config import EngineConfig
    from jaxserve.engine import Engine
    from jaxserve.multihost.config import ClusterConfig

# The share of GPU memory that jax reserves; the driver and collectives need the rest. jax's default is 0.75.
_GPU_MEMORY = "0.93"


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags for the model and the engine; `load_engine` reads them."""
    flags.group(parser, "model").add_argument(
        "--model",
        type=Path,
        metavar="DIR|ORG/NAME|URL",
        help="checkpoint directory, the name of a checkpoint on the Hugging Face Hub, perhaps with @revision, or a "
        "folder in an object store, as gs://BUCKET/FOLDER (default: the built-in demo model)",
    )
    flags.add_engine_flags(parser)


def add_profile_flag(parser: Any) -> None:
    parser.add_argument("--profile", type=Path, metavar="DIR", help="write a jax profiler capture of the run here")


def model_directory(args: argparse.Namespace) -> Path:
    """The checkpoint's directory, downloaded if given by name. Raises UserError without one."""
    if args.model is None:
        from jaxserve.demo import DEMO_MODEL

        return Path(DEMO_MODEL)
    if not args.model.is_dir():
        if hub.is_name(str(args.model)) and not args.model.exists():
            args.model = hub.directory(str(args.model))
            return args.model
        if buckets.is_url(str(args.model)) and not args.model.exists():
            args.model = buckets.directory(str(args.model), cache_folder.root() / "checkpoints")
            return args.model
        raise UserError(f"--model {args.model} is not a directory")
    return args.model


def load_engine(args: argparse.Namespace) -> Engine:
    """Starts the engine that the flags describe. Raises UserError for a mistake of the user."""
    path = model_directory(args)
    with user_errors():
        config = flags.engine_config(args)  # before jax is imported, so that a wrong flag is reported at once
    return start_engine(path, config)


def start_engine(path: Path, config: EngineConfig, cluster: ClusterConfig | None = None) -> Engine:
    """Loads and compiles an engine, and shows the progress and the start-up report.

    Args:
      cluster: this host's place among several.

    Raises:
      UserError: a mistake of the user.
    """
    from server.commands import hosts

    with user_errors(), _ended_at_once(), progress_bars() as report:
        try:
            engine = make_engine(path, config, report, cluster)
        except HostFailed as failure:
            hosts.end_failed(failure)
    show(engine.report, model=hub.name_of(path))
    return engine


@contextlib.contextmanager
def _ended_at_once() -> Iterator[None]:
    """Lets Ctrl-C end the process while the block runs.

    An exception in jax's imports, or while its compiler is at work, may crash the process.
    """
    before = interrupt.end_at_once()
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def make_engine(path: Path, config: EngineConfig, progress: Progress, cluster: ClusterConfig | None = None) -> Engine:
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", _GPU_MEMORY)
    if cluster is not None:
        from server.commands import hosts

        return hosts.lead(path, config, cluster, progress)
    from jaxserve.engine import Engine

    return Engine.from_checkpoint(path, config, progress=progress)


@contextlib.contextmanager
def profiling(folder: Path | str | None) -> Iterator[None]:
    """Captures the block with jax's profiler, if a directory is given."""
    if folder is None:
        yield
        return
    import jax

    with jax.profiler.trace(str(folder)):
        yield
