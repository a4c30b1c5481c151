"""Counts the programs that jax compiled or found in its own cache, by thread."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import jax

# By thread: programs compiled, and programs found in jax's persistent cache.
_compilations: Counter[int] = Counter()
_loaded: Counter[int] = Counter()


def _count_compilation(event: str, duration_secs: float, **_: Any) -> None:
    del duration_secs
    if event == "/jax/core/compile/backend_compile_duration":
        _compilations[threading.get_ident()] += 1


def _count_loaded(event: str, **_: Any) -> None:
    if event == "/jax/compilation_cache/cache_hits":
        _loaded[threading.get_ident()] += 1


jax.monitoring.register_event_duration_secs_listener(_count_compilation)
jax.monitoring.register_event_listener(_count_loaded)


def compilations() -> int:
    """Number of programs that jax has compiled on the calling thread."""
    return _compilations[threading.get_ident()]


def loaded_by_jax() -> int:
    """Number of programs that jax found in its persistent cache, on the calling thread."""
    return _loaded[threading.get_ident()]
