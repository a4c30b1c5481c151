"""Where compiled programs are kept between starts, where nobody says otherwise. No jax."""

from __future__ import annotations

import os
from pathlib import Path

AUTO = "auto"


def default() -> Path:
    """A folder of the user's own, after the XDG base directory specification."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxserve" / "xla"


def of(setting: str | None) -> Path | None:
    """The folder that `EngineConfig.compilation_cache` means; None keeps nothing."""
    if setting is None:
        return None
    return default() if setting == AUTO else Path(setting)
