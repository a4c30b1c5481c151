"""The layouts of docs/sharding.md, as they run on eight virtual devices."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import __main__ as command
from benchmarks import layouts

PAGE = (Path(__file__).parents[2] / "docs" / "sharding.md").read_text(encoding="utf-8")


@pytest.mark.bench
@pytest.mark.parametrize("layout", layouts.LAYOUTS)
def test_layouts_answer_as_one_device_and_hold_what_is_planned(layout: str, capsys) -> None:
    assert command.main(["layouts", "--only", layout, "--steps", "2"]) == 0
    told = capsys.readouterr().out
    assert f"{layout} " in told
    assert " equal " in told


def test_every_layout_of_the_page_is_measured() -> None:
    told = PAGE.partition("### The layouts as they run")[2].partition("\n## ")[0]
    assert [layout for layout in layouts.LAYOUTS if f"| {layout} |" not in told] == []
    for name in set(layouts.LAYOUTS) - {"default"}:
        assert f"# {name}\n[" in PAGE


def test_what_differs_is_no_success() -> None:
    good = layouts.Measured(
        name="default",
        same=(8, 8),
        logprob=1e-6,
        held=1000,
        predicted=1001,
        temporaries=(10, None),
        collectives=Counter({"all-reduce": 9}),
        foreseen=Counter({"all-reduce": 9}),
        sent=5,
        milliseconds=1.0,
    )
    assert good.holds
    assert replace(good, foreseen=None).holds
    for changed in ({"same": (7, 8)}, {"held": 1010}, {"foreseen": Counter({"all-reduce": 8})}):
        assert not replace(good, **changed).holds
    (row,) = layouts.table([replace(good, same=(7, 8), foreseen=None)]).rows
    assert (row[1], row[6], row[8]) == ("7 of 8", "unknown", "unknown")
