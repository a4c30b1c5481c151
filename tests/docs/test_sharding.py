"""The plans that docs/sharding.md shows are what the command prints."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from server.commands import cli

PAGE = (Path(__file__).parents[2] / "docs" / "sharding.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILES = {
    text.splitlines()[0].removeprefix("# "): text
    for language, text in BLOCK.findall(PAGE)
    if language == "toml" and text.startswith("# ")
}
# What is compiled, searched or watched is not checked here, nor specs that the page only describes.
SHOWN = {
    command: text.splitlines()
    for _, block in BLOCK.findall(PAGE)
    if block.startswith("$ jaxserve plan ")
    for command, _, text in [block.removeprefix("$ jaxserve ").partition("\n")]
    if not re.search(r"--(compile|search|watch)|pad\.toml|--tensor 32", command)
}


def marked(command: str) -> object:
    """One runs every time, the others among the long tests."""
    return pytest.param(command, marks=() if "rows.toml" in command else pytest.mark.long, id=command.split()[-1])


@pytest.mark.parametrize("command", [marked(command) for command in SHOWN])
def test_plans_are_as_shown(command: str, capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in re.findall(r"\S+\.toml", command):
        (tmp_path / name).write_text(FILES[name])
    assert cli.main(command.split()) == 0
    printed = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    for line in SHOWN[command]:
        assert line == "..." or " ".join(line.split()) in printed


def test_the_page_shows_plans() -> None:
    assert len(SHOWN) >= 5
    assert "rows.toml" in FILES
