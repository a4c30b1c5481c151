"""The ceilings of compiled code, without a compiler: what grew is named, and what is written is read again."""

from __future__ import annotations

import tomllib

from tests.aot import conftest


def test_what_grew_is_named():
    ceilings = {"bundles a MiB": 1000.0, "spills": 0}
    assert conftest.grown("v5e", {"bundles a MiB": 1010, "spills": 0}, ceilings) == []
    assert conftest.grown("v5e", {"bundles a MiB": 1030, "spills": 1}, ceilings) == [
        "v5e: bundles a MiB grew from 1000 to 1030",
        "v5e: spills grew from 0 to 1",
    ]


def test_a_figure_without_a_ceiling_is_named():
    assert conftest.grown("v5e", {"copies": 2}, {}) == ["v5e: copies has no ceiling; it is 2"]


def test_what_is_written_is_read_again():
    ceilings = {
        "v5e:2x2, a step": {"operations a layer": 42.5, "KiB of temporaries": 1234567},
        "v4, kernel": {"spills": 0},
    }
    assert tomllib.loads(conftest.written(ceilings)) == ceilings
