"""Checksums of weight files: they know every byte, and are there before the end."""

import threading
from pathlib import Path

import pytest

from jaxserve.weights import checksum
from jaxserve.weights.checksum import Checksum


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Two, of 1,000 and 500 bytes, read in pieces of 400."""
    monkeypatch.setattr(checksum, "PIECE", 400)
    monkeypatch.setattr(checksum, "_READ", 64)
    for name, size in (("a", 1000), ("b", 500)):
        (tmp_path / name).write_bytes(bytes(index % 251 for index in range(size)))
    return [tmp_path / "a", tmp_path / "b"]


@pytest.mark.parametrize(("file", "at", "pieces"), [(0, 0, 0), (0, 399, 0), (0, 400, 1), (0, 999, 2), (1, 499, 3)])
def test_a_changed_byte_changes_what_follows(files: list[Path], file: int, at: int, pieces: int) -> None:
    before = Checksum(files)
    assert (before.wait(60.0), before.total) == (4, 1500)
    content = bytearray(files[file].read_bytes())
    content[at] ^= 1
    files[file].write_bytes(content)
    after = Checksum(files)
    assert after.wait(60.0) == 4
    assert [before.after(i) == after.after(i) for i in range(5)] == [i <= pieces for i in range(5)]


def test_what_has_been_read_is_there_before_the_end(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Checksum(files)
    whole.wait(60.0)
    read, reached, go_on = checksum.zlib.crc32, threading.Event(), threading.Event()
    seen = 0

    def slow(data: memoryview, value: int) -> int:
        nonlocal seen
        if seen >= 800:
            reached.set()
            go_on.wait(60.0)
        seen += len(data)
        return read(data, value)

    monkeypatch.setattr(checksum.zlib, "crc32", slow)
    part = Checksum(files)
    assert reached.wait(60.0)
    assert part.wait(0.0) == 2
    assert [part.after(i) for i in range(3)] == [whole.after(i) for i in range(3)]
    go_on.set()
    assert part.wait(60.0) == 4
    assert part.after(4) == whole.after(4)
