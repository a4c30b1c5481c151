"""Tables of reports, values as text and values as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.table import Table

UNKNOWN, UNEXPECTED = "unknown", "unexpected in stage"


class Section(NamedTuple):
    """A table with a title and the lines below it; without rows only the lines are shown."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()

    def show(self, out: Console) -> None:
        """Print it; nothing if it is empty."""
        if self.rows or self.notes:
            out.print()
        if self.rows:
            out.print(f"[bold]{self.title}[/bold]")
            out.print(table(self.columns, self.rows))
        for note in self.notes:
            out.print(note, markup=False, style="red" if note.startswith(UNEXPECTED) else None)


_WORDS = (
    "parameter",
    "logical axes",
    "PartitionSpec",
    "after",
    "collective",
    "",
    "bar",
    "bound by",
    "rules",
    "policy",
    "buckets",
    "why",
    "why not first",
    "which",
)


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A table without lines, right-aligned but for words, which wrap where it is too wide."""
    made, rows = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False), list(rows)
    for at, column in enumerate(columns):
        if column in _WORDS:
            made.add_column(column, justify="left", overflow="fold")
        else:
            widest = max((len(word) for row in rows for word in row[at].split()), default=None)
            made.add_column(column, justify="right", overflow="fold", min_width=widest)
    for row in rows:
        made.add_row(*map(escape, row))
    return made


def number(value: float | None, form: str) -> str:
    """A number as text; None is unknown."""
    return UNKNOWN if value is None else format(value, form)


def size(nbytes: float) -> str:
    """Bytes as text, in the unit that fits."""
    for step, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(nbytes) >= step:
            return f"{nbytes / step:.2f} {unit}"
    return f"{nbytes:.0f} B"


def shape(sizes: Sequence[int]) -> str:
    """A shape as text, such as "15680 x 14336"."""
    return " x ".join(map(str, sizes)) or "scalar"


def as_json(value: Any) -> Any:
    """Dataclasses, named tuples and collections as dicts and lists."""
    if dataclasses.is_dataclass(value):
        return {field.name: as_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, tuple) and (fields := getattr(value, "_fields", None)):
        value = dict(zip(fields, value, strict=True))
    if isinstance(value, Mapping):
        return {key: as_json(each) for key, each in value.items()}
    if isinstance(value, frozenset):
        return sorted(value)
    return [as_json(each) for each in value] if isinstance(value, (tuple, list)) else value
