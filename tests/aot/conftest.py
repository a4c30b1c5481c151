"""What the compiler made of things, told as a table when the tests are over."""

from __future__ import annotations

from collections.abc import Callable

import pytest

_TABLES = pytest.StashKey[dict[str, list[tuple[str, ...]]]]()


@pytest.fixture
def tell(request: pytest.FixtureRequest) -> Callable[..., None]:
    """tell(title, **cells) adds a line to the table of that title."""
    tables = request.config.stash.setdefault(_TABLES, {})

    def add(title: str, **cells: object) -> None:
        lines = tables.setdefault(title, [tuple(cells)])
        lines.append(tuple(map(str, cells.values())))

    return add


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for title, lines in config.stash.get(_TABLES, {}).items():
        terminalreporter.section(title)
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        for line in lines:
            terminalreporter.line("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)))
