"""Packages that are not installed are stood in for."""

from __future__ import annotations

import importlib
import sys

from benchmarks.device import absent


def test_what_is_absent_can_be_imported_and_named(monkeypatch):
    monkeypatch.setattr(sys, "meta_path", sys.meta_path[:])
    assert absent.stand_in(["json", "nowhere_to_be_found"]) == ["nowhere_to_be_found"]
    inner = importlib.import_module("nowhere_to_be_found.inner")
    try:
        assert inner.Thing[int, " a"] is inner.Thing
        inner.Thing(1, named=2)
    finally:
        for name in ("nowhere_to_be_found", "nowhere_to_be_found.inner"):
            sys.modules.pop(name, None)


def test_what_is_there_is_left_alone(monkeypatch):
    before = sys.meta_path[:]
    monkeypatch.setattr(sys, "meta_path", before)
    assert absent.stand_in(["json", "math"]) == []
    assert sys.meta_path == before
