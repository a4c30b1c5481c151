"""Garbage collection in a process that serves."""

from __future__ import annotations

import gc


def settle() -> None:
    """Takes what exists now out of later garbage collections: it lives as long as the process.

    Each of those stops all threads: a full one for about 50 ms in a front and 200 ms in an engine process, without the
    objects of their start for one or two.
    """
    gc.collect()
    gc.freeze()
