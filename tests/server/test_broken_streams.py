"""No stream just stops when a process of the server is killed."""

import asyncio
from pathlib import Path

import pytest

from tests.server import broken_streams
from tests.server.broken_streams import CASES, TOKENS, Ending, check


@pytest.mark.processes
@pytest.mark.parametrize("kills", [2 * len(CASES), pytest.param(20, marks=pytest.mark.weekly)])
def test_many_kills(kills: int, tmp_path: Path) -> None:
    assert asyncio.run(broken_streams.measure(kills, tmp_path)) == []


def test_what_counts_as_wrong() -> None:
    whole, cut = Ending("a", TOKENS), Ending("b", 7, "it died")
    refused, silent = Ending("c", 0, "it died"), Ending("d", 7)
    assert check("engine", [whole, cut, refused], []) == []
    assert check("engine, supervised", [whole, cut], [whole]) == []
    assert check("front", [silent], []) == ["d just stopped after 7 tokens"]
    assert check("engine, supervised", [refused], []) == ["c had no token: it died"]
    assert len(check("engine, supervised", [whole], [cut, silent])) == 2
