"""The user's cache folder, and the default folder of compiled programs in it. No jax."""

from __future__ import annotations

import os
from pathlib import Path

AUTO = "auto"


def root() -> Path:
    """The user's cache folder, by the XDG base directory specification."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxserve"


def default() -> Path:
    """The default folder of compiled programs."""
    return root() / "xla"


def of(setting: str | None) -> Path | None:
    """The folder for a value of `EngineConfig.compilation_cache`; None disables the cache."""
    if setting is None:
        return None
    return default() if setting == AUTO else Path(setting)
