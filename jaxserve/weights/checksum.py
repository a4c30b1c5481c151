"""A checksum of a checkpoint's weight files, computed on a thread while other work goes on.

Copies of a checkpoint may differ anywhere, but a start should not wait until all of a large one is read. So there is a
checksum after every piece, and copies can be compared as far as all have got.
"""

from __future__ import annotations

import contextlib
import threading
import zlib
from collections.abc import Sequence
from pathlib import Path

PIECE = 64 * 2**20  # bytes
_READ = 4 * 2**20  # bytes


class Checksum:
    """CRC-32 of files: it finds any changed byte, but not an attacker's choice of many.

    Args:
      files: in the order in which they are read.

    Attributes:
      total: bytes of all files.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self.total = sum(file.stat().st_size for file in files)
        self._files, self._after = files, [0]
        self._thread = threading.Thread(target=self._read, name="jaxserve-checksum", daemon=True)
        self._thread.start()

    def wait(self, seconds: float) -> int:
        """Wait for the end at most so long. Returns the number of pieces read so far."""
        self._thread.join(seconds)
        return len(self._after) - 1

    def after(self, pieces: int) -> int:
        """The checksum of the first pieces."""
        return self._after[pieces]

    def _read(self) -> None:
        value, left, buffer = 0, PIECE, memoryview(bytearray(_READ))
        with contextlib.suppress(OSError):  # who loads the file reports it
            for file in self._files:
                with open(file, "rb", buffering=0) as stream:
                    while size := stream.readinto(buffer[:left]):
                        value, left = zlib.crc32(buffer[:size], value), left - size
                        if not left:
                            self._after.append(value)
                            left = PIECE
            self._after.append(value)
