"""`jaxserve plan --watch`: plans again when the file of rules is saved; prints changes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from server.commands import console

if TYPE_CHECKING:
    from jaxserve.planning.result import PlanResult

_SECONDS = 0.1  # between two looks at the file


def watch(path: Path, ask: Callable[[], PlanResult], html: Path | None = None) -> None:
    """Plan, and plan again after each save, until Ctrl-C.

    Args:
      path: the file of rules.
      ask: plans with the file as it is now. Its ValueErrors are printed, and end nothing.
      html: where the page of the newest plan goes.
    """
    from jaxserve.planning import comparison

    out, last = console.tables(), None
    with contextlib.suppress(KeyboardInterrupt):
        for _ in _saves(path):
            started = time.perf_counter()
            try:
                result = ask()
            except ValueError as problem:
                console.say(f"error: {problem}")
                continue
            if html is not None:
                result.save(html)
            if last is None:
                result.show(out)
            else:
                comparison.section(last.compared_with(result).differences, ("before", "now")).show(out)
            last = result
            console.say(f"planned in {time.perf_counter() - started:.2f} s; waiting for the next save of {path}")


def _saves(path: Path) -> Iterator[None]:
    """Yields at once and after each change of a file; waits while there is none."""
    known = None
    while True:
        with contextlib.suppress(FileNotFoundError):  # an editor may put a new file in its place
            found = path.stat()
            if (state := (found.st_mtime_ns, found.st_size, found.st_ino)) != known:
                known = state
                yield
        pause()


def pause() -> None:
    """Wait between two looks at the file."""
    time.sleep(_SECONDS)
