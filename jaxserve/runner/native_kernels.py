"""Compiles the native kernels of a CPU at the first start, and says so."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import jax

from pallas_kernels.cpu import build

STEP = "compiling the CPU kernels (C++; kept for later starts)"


@contextlib.contextmanager
def compiling(progress: Callable[[str, int, int], None]) -> Iterator[Callable[[], bool]]:
    """Compiles them while the block runs if there are none yet, up to a minute.

    Yields a function that tells whether they are compiled.
    """
    if jax.default_backend() != "cpu" or build.is_compiled():
        yield lambda: True
        return
    progress(STEP, 0, 1)
    with ThreadPoolExecutor(1) as thread:
        done = thread.submit(build.refusal)
        yield done.done
        done.result()
    progress(STEP, 1, 1)
