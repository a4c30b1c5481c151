"""The default sharding of each model family: one module a family, named like it, with a `SPEC`."""

from __future__ import annotations

import importlib
import pkgutil

from sharding.spec import ShardingSpec


def default(family: str) -> ShardingSpec:
    """The default of a family. Raises ValueError naming the families that have one."""
    known = sorted(module.name for module in pkgutil.iter_modules(__path__))
    if family not in known:
        raise ValueError(f"model family {family!r} has no sharding; there are {', '.join(known)}")
    return importlib.import_module(f"{__name__}.{family}").SPEC
