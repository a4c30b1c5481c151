"""What the compilers made of things: held to ceilings, and told as a table when the tests are over.

The ceilings are in ceilings.toml. `make test-aot ARGS=--write-ceilings` makes the figures of that run the ceilings.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.aot import bundles

CEILINGS = Path(__file__).with_name("ceilings.toml")
SLACK = 1.02  # another order of instructions is no growth
_TABLES = pytest.StashKey[dict[str, list[tuple[str, ...]]]]()
_FIGURES = pytest.StashKey[dict[str, dict[str, float]]]()
_CODE = pytest.StashKey[Path]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write-ceilings", action="store_true", help="make this run's figures of compiled code the ceilings"
    )


@pytest.fixture
def tell(request: pytest.FixtureRequest) -> Callable[..., None]:
    """tell(title, **cells) adds a line to the table of that title."""
    tables = request.config.stash.setdefault(_TABLES, {})

    def add(title: str, **cells: object) -> None:
        lines = tables.setdefault(title, [tuple(cells)])
        lines.append(tuple(map(str, cells.values())))

    return add


@pytest.fixture
def hold(request: pytest.FixtureRequest) -> Callable[[str, dict[str, float]], None]:
    """hold(what, figures) fails if a figure is above its ceiling, or has none."""
    writes, found = request.config.getoption("--write-ceilings", False), request.config.stash.setdefault(_FIGURES, {})
    ceilings = tomllib.loads(CEILINGS.read_text())

    def check(what: str, figures: dict[str, float]) -> None:
        found[what] = figures
        if not writes:
            assert grown(what, figures, ceilings.get(what, {})) == []

    return check


def grown(what: str, figures: dict[str, float], ceilings: dict[str, float]) -> list[str]:
    """A line for each figure above its ceiling, or without one."""
    lines = []
    for name, now in figures.items():
        most = ceilings.get(name)
        if most is None:
            lines.append(f"{what}: {name} has no ceiling; it is {now:g}")
        elif now > SLACK * most:
            lines.append(f"{what}: {name} grew from {most:g} to {now:g}")
    return lines


@pytest.fixture
def code(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the final code of TPU kernels that this test compiles; the compiler takes one folder a process."""
    stash = request.config.stash
    if _CODE not in stash:
        stash[_CODE] = tmp_path_factory.mktemp("code")
        bundles.dump_to(stash[_CODE])
    for path in stash[_CODE].iterdir():
        path.unlink()
    return stash[_CODE]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for title, lines in config.stash.get(_TABLES, {}).items():
        terminalreporter.section(title)
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        for line in lines:
            terminalreporter.line("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)))
    if config.getoption("--write-ceilings", False) and (figures := config.stash.get(_FIGURES, {})):
        CEILINGS.write_text(written(tomllib.loads(CEILINGS.read_text()) | figures))


def written(ceilings: dict[str, dict[str, float]]) -> str:
    """The ceilings as TOML."""
    lines = ["# Written by `make test-aot ARGS=--write-ceilings`."]
    for what, figures in sorted(ceilings.items()):
        lines += ["", f'["{what}"]', *(f'"{name}" = {value}' for name, value in figures.items())]
    return "\n".join(lines) + "\n"
