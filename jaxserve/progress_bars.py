"""Bars that show the progress of loading or compiling, in a terminal and in a notebook."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn


@contextlib.contextmanager
def progress_bars(
    out: Console | None = None, otherwise: Callable[[str], None] | None = None
) -> Iterator[Callable[[str, int, int], None]]:
    """Yields a function of (step, done, total) that shows it.

    Args:
      out: where, by default standard error.
      otherwise: called with each new step where there can be no bars.
    """
    out = Console(stderr=True, highlight=False) if out is None else out
    has_bars = out.is_terminal or out.is_jupyter
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=out, disable=not has_bars) as bars:

        def show(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what)
                if otherwise is not None and not has_bars:
                    otherwise(what)
            bars.update(tasks[what], completed=done, total=total)

        yield show
