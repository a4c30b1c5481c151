"""The default sharding of each model family: one module per family, with a `SPEC`."""

from __future__ import annotations

import importlib
import pkgutil

from sharding.spec import ShardingSpec


def default(family: str) -> ShardingSpec:
    """The default spec of a family. Raises ValueError, with the known families, if it has none."""
    known = sorted(module.name for module in pkgutil.iter_modules(__path__))
    if family not in known:
        raise ValueError(f"model family {family!r} has no sharding; there are {', '.join(known)}")
    return importlib.import_module(f"{__name__}.{family}").SPEC
