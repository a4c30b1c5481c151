"""Checkpoints with random weights of known shapes, kept in the user's cache folder."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from jaxserve import weights
from server.commands.bench import flags, shapes


def checkpoint(shape: str, folder: Path) -> Path:
    """A Hugging Face directory with random float32 weights under `folder`; written once."""
    path = folder / f"{shape}-seed{shapes.SEED}"
    if not (path / "config.json").exists():
        config, params = shapes.random_params(shape, "float32")
        # The directory is renamed when it is complete, so that an interrupted run leaves none.
        partial = folder / f".{path.name}.{os.getpid()}"
        partial.mkdir(parents=True, exist_ok=True)
        weights.write_hf(partial, config, params)
        partial.rename(path)
    return path


def cached(shape: str) -> Path:
    """The checkpoint of a shape in the user's cache folder."""
    return checkpoint(shape, cache_folder() / "checkpoints")


def from_flags(args: argparse.Namespace) -> Path:
    """The checkpoint directory that --model or --shape names."""
    chosen = flags.model(args)
    return chosen if isinstance(chosen, Path) else cached(chosen)


def cache_folder() -> Path:
    """The user's folder in which benchmarks keep checkpoints and peers' environments."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxserve"
