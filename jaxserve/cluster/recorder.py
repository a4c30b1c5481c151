"""The flight recorder: every iteration of the last minutes, and the rows as they were before the first of them.

Entries that grow old leave the ring and are applied to the rows, so what the ring holds always follows from them. Keys
and values are not kept: they follow from the rows' tokens and block tables.
"""

from __future__ import annotations

import datetime
import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from jaxserve.cluster import control_pb2 as pb
from jaxserve.iteration import IterationResult

VERSION = 1
_MOST_BYTES = 64 * 2**20  # of plans in the ring


@dataclass(slots=True, eq=False)
class RowRecord:
    """A row as iterations leave it.

    Attributes:
      admission: of the request that has it.
      tokens: known so far, drafted ones that were not accepted behind them.
      table: its block table.
      computed: positions whose keys and values are there.
    """

    admission: pb.Admission
    tokens: list[int] = field(default_factory=list)
    table: list[int] = field(default_factory=list)
    computed: int = 0


class Rows:
    """What every row holds, followed from plan to plan."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self.rows: dict[int, RowRecord] = {}

    def prepare(self, plan: pb.Plan) -> None:
        """What a plan changes before it runs."""
        for admission in plan.admissions:
            self.rows[admission.row] = RowRecord(
                admission, list(admission.tokens), list(admission.blocks), len(admission.blocks) * self._block_size
            )
        changes = plan.table_changes
        for row, column, block in zip(changes.row, changes.column, changes.block, strict=True):
            _put(self.rows[row].table, column, block)

    def finish(self, plan: pb.Plan, tokens: Iterable[int]) -> None:
        """What it has computed and chosen, an entry of `tokens` for each (`wire.entries`)."""
        chunks, chosen, drafts = plan.chunks, iter(tokens), iter(plan.drafts)
        for row, start, length, samples in zip(chunks.row, chunks.start, chunks.length, chunks.samples, strict=True):
            record = self.rows[row]
            theirs = list(itertools.islice(chosen, max(samples, 1)))
            if samples < 2:
                record.computed = start + length
                if samples:
                    _put(record.tokens, start + length, theirs[0])
                continue
            accepted = 0
            for draft, token in zip([next(drafts) for _ in range(samples - 1)], theirs, strict=False):
                if draft != token:
                    break
                accepted += 1
            record.computed = start + 1 + accepted
            for offset, token in enumerate(theirs[: accepted + 1]):
                _put(record.tokens, start + 1 + offset, token)


class FlightRecorder:
    """Keeps the iterations of the last `seconds`; any thread may have them written.

    Args:
      about: what a replay has to know of the engine: `Recording` without rows and entries.
      folder: where files go.
      clock: monotonic seconds.
    """

    def __init__(
        self,
        about: pb.Recording,
        block_size: int,
        *,
        seconds: float,
        folder: Path,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._about, self._seconds, self._folder, self._clock = about, seconds, folder, clock
        self._lock = threading.Lock()
        self._rows = Rows(block_size)
        self._ring: deque[tuple[pb.Entry, float, int]] = deque()
        self._waiting: deque[pb.Entry] = deque()  # of the ring, those without an answer
        self._bytes = 0

    def launched(self, plan: pb.Plan) -> None:
        """An iteration begins."""
        now, entry = self._clock(), pb.Entry(plan=plan)
        size = plan.ByteSize()
        with self._lock:
            self._ring.append((entry, now, size))
            self._waiting.append(entry)
            self._bytes += size
            while self._ring[0][0].landed and (now - self._ring[0][1] > self._seconds or self._bytes > _MOST_BYTES):
                old, _, theirs = self._ring.popleft()
                self._bytes -= theirs
                self._rows.prepare(old.plan)
                self._rows.finish(old.plan, old.tokens)

    def landed(self, result: IterationResult) -> None:
        """The oldest one that has not is answered."""
        with self._lock:
            entry = self._waiting.popleft()
            count = sum(max(samples, 1) for samples in entry.plan.chunks.samples) if len(result.tokens) else 0
            entry.tokens.extend(result.tokens[:count].tolist())
            entry.logprobs.extend(result.logprobs[:count].tolist())
            entry.landed = True

    def forget(self) -> None:
        """What follows begins anew; iterations that are under way still land."""
        with self._lock:
            self._ring.clear()
            self._rows.rows.clear()
            self._bytes = 0

    def recording(self, reason: str) -> pb.Recording:
        """What is kept now."""
        with self._lock:
            found = pb.Recording()
            found.CopyFrom(self._about)
            found.version, found.reason = VERSION, reason
            started = self._ring[0][1] if self._ring else 0.0
            taken: set[int] = set()  # rows that a request of the ring has taken
            used: set[int] = set()  # rows that are gone on with from before the ring
            for entry, at, _ in self._ring:
                taken.update(admission.row for admission in entry.plan.admissions)
                used.update(row for row in entry.plan.chunks.row if row not in taken)
                found.entries.add().CopyFrom(entry)
                found.entries[-1].seconds = at - started
            for row in sorted(used):
                found.rows.append(_as_row(self._rows.rows[row]))
            return found

    def write(self, reason: str) -> Path:
        """Writes a file and returns its path. Raises OSError."""
        data = self.recording(reason).SerializeToString()
        self._folder.mkdir(parents=True, exist_ok=True)
        now = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%S.%f")
        path = self._folder / f"jaxserve-{now}.flight"
        partial = path.with_suffix(f".{os.getpid()}.partial")
        partial.write_bytes(data)
        partial.rename(path)
        return path


def read(path: Path) -> pb.Recording:
    """What `FlightRecorder.write` wrote. Raises ValueError for a file that is none."""
    found = pb.Recording()
    try:
        found.ParseFromString(path.read_bytes())
    except OSError as problem:
        raise ValueError(f"{path} cannot be read: {problem.strerror}") from None
    except Exception:  # protobuf's DecodeError, whose place has moved between versions
        raise ValueError(f"{path} is no flight record, or was cut short") from None
    if found.version != VERSION:
        raise ValueError(f"{path} is a flight record of version {found.version}; {VERSION} is read here")
    return found


def _put(values: list[int], index: int, value: int) -> None:
    """Sets an entry, which may be one or more behind the end."""
    values.extend([0] * (index + 1 - len(values)))
    values[index] = value


def _as_row(record: RowRecord) -> pb.Row:
    admission = pb.Admission()
    admission.CopyFrom(record.admission)
    del admission.tokens[:]
    del admission.blocks[:]
    admission.tokens.extend(record.tokens)
    admission.blocks.extend(record.table)
    return pb.Row(admission=admission, computed=record.computed)
