"""Keeps the iterations of the last minutes, and the rows' state before them.

When an iteration is too old, it leaves the ring and is applied to the rows. So the rows are always in the state before
the first iteration of the ring. Keys and values are not kept: a replay computes them from tokens and block tables.
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

import numpy as np

from jaxserve.iteration import IterationResult
from jaxserve.multihost import control_pb2 as pb

# Of what a record's bytes mean. Version 1 named the truncated sampler for rows with typical_p, which leaves it out now.
VERSION = 2
_MOST_BYTES = 64 * 2**20  # of plans in the ring


@dataclass(slots=True, eq=False)
class RowRecord:
    """The state of a row after its iterations.

    Attributes:
      admission: the row's request.
      tokens: known tokens, followed by rejected drafts.
      table: the row's block table.
      computed: positions whose keys and values are in the pool.
    """

    admission: pb.Admission
    tokens: list[int] = field(default_factory=list)
    table: list[int] = field(default_factory=list)
    computed: int = 0


class RowRecords:
    """The state of every row, updated plan by plan.

    Args:
      groups: cache groups, whose entries alternate in block tables.
    """

    def __init__(self, block_size: int, groups: int = 1) -> None:
        self._block_size, self._groups = block_size, groups
        self.rows: dict[int, RowRecord] = {}

    def prepare(self, plan: pb.Plan) -> None:
        """Apply what a plan changes before it runs."""
        for admission in plan.admissions:
            computed = len(admission.blocks) // self._groups * self._block_size
            self.rows[admission.row] = RowRecord(admission, list(admission.tokens), list(admission.blocks), computed)
        changes = plan.table_changes
        for row, column, block in zip(changes.row, changes.column, changes.block, strict=True):
            _put(self.rows[row].table, column, block)

    def finish(self, plan: pb.Plan, tokens: Iterable[int]) -> None:
        """Apply what a plan computed and sampled.

        `tokens` are those of its result (`IterationPlan.num_points`).
        """
        chunks, chosen, drafts, rows = plan.chunks, iter(tokens), iter(plan.drafts), self.rows
        # Lists are faster to iterate than a message's own containers.
        columns = chunks.row[:], chunks.start[:], chunks.length[:], chunks.samples[:]
        for row, start, length, samples in zip(*columns, strict=True):
            record = rows[row]
            if samples < 2:
                token = next(chosen, 0)  # there are none after the last chunk that samples
                record.computed = end = start + length
                if samples:
                    _put(record.tokens, end, token)
                continue
            theirs = list(itertools.islice(chosen, samples))
            accepted = 0
            for draft, token in zip([next(drafts) for _ in range(samples - 1)], theirs, strict=False):
                if draft != token:
                    break
                accepted += 1
            record.computed = start + 1 + accepted
            for offset, token in enumerate(theirs[: accepted + 1]):
                _put(record.tokens, start + 1 + offset, token)


@dataclass(slots=True, eq=False)
class _RecordedIteration:
    """An iteration in the ring; `tokens` and `logprobs` are set once it has landed."""

    plan: pb.Plan
    launched: float
    size: int
    tokens: np.ndarray | None = None
    logprobs: np.ndarray | None = None

    def entry(self, started: float) -> pb.Entry:
        """The iteration as a message."""
        entry = pb.Entry(plan=self.plan, seconds=self.launched - started)
        if self.tokens is not None and self.logprobs is not None:
            entry.landed = True
            entry.tokens.extend(self.tokens.tolist())
            entry.logprobs.extend(self.logprobs.tolist())
        return entry


class FlightRecorder:
    """Keeps the iterations of the last `seconds`; any thread may write them to a file.

    Args:
      about: describes the engine to a replay: a `Recording` without rows and entries.
      groups: cache groups.
      folder: where files are written.
      clock: monotonic seconds.
    """

    def __init__(
        self,
        about: pb.Recording,
        block_size: int,
        *,
        seconds: float,
        folder: Path,
        groups: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._about, self._seconds, self._folder, self._clock = about, seconds, folder, clock
        # Reentrant: a signal handler may call `recording` while its thread holds the lock. It changes nothing.
        self._lock = threading.RLock()
        self._rows = RowRecords(block_size, groups)
        self._ring: deque[_RecordedIteration] = deque()
        self._waiting: deque[_RecordedIteration] = deque()  # iterations in the ring without a result
        self._bytes = 0

    def launched(self, plan: pb.Plan) -> None:
        """Record the start of an iteration. The plan is kept and must not change."""
        now = self._clock()
        kept = _RecordedIteration(plan, now, plan.ByteSize())
        with self._lock:
            self._ring.append(kept)
            self._waiting.append(kept)
            self._bytes += kept.size
            while (old := self._ring[0]).tokens is not None and (
                now - old.launched > self._seconds or self._bytes > _MOST_BYTES
            ):
                self._ring.popleft()
                self._bytes -= old.size
                self._rows.prepare(old.plan)
                self._rows.finish(old.plan, old.tokens.tolist())

    def landed(self, result: IterationResult) -> None:
        """Record the result of the oldest iteration without one."""
        with self._lock:
            kept = self._waiting.popleft()
            count = sum([samples or 1 for samples in kept.plan.chunks.samples]) if len(result.tokens) else 0
            # Copies: a result may be a view of a device buffer.
            kept.logprobs, kept.tokens = result.logprobs[:count].copy(), result.tokens[:count].copy()

    def forget(self) -> None:
        """Forget all iterations and rows. Results of iterations in flight may still come."""
        with self._lock:
            self._ring.clear()
            self._rows.rows.clear()
            self._bytes = 0

    def recording(self, reason: str) -> pb.Recording:
        """The contents of the recorder now."""
        with self._lock:
            found = pb.Recording()
            found.CopyFrom(self._about)
            found.version, found.reason = VERSION, reason
            started = self._ring[0].launched if self._ring else 0.0
            taken: set[int] = set()  # rows that requests in the ring have taken
            used: set[int] = set()  # rows that were in use before the ring
            for kept in self._ring:
                taken.update(admission.row for admission in kept.plan.admissions)
                used.update(row for row in kept.plan.chunks.row if row not in taken)
                found.entries.append(kept.entry(started))
            for row in sorted(used):
                found.rows.append(_as_row(self._rows.rows[row]))
            return found

    def write(self, reason: str) -> Path:
        """Write a file and return its path. Raises OSError."""
        data = self.recording(reason).SerializeToString()
        self._folder.mkdir(parents=True, exist_ok=True)
        now = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%S.%f")
        replica = f"-replica-{self._about.replica}" if self._about.HasField("replica") else ""
        path = self._folder / f"jaxserve-{now}{replica}.flight"
        partial = path.with_suffix(f".{os.getpid()}.partial")
        partial.write_bytes(data)
        partial.rename(path)
        return path


def read(path: Path) -> pb.Recording:
    """Read what `FlightRecorder.write` wrote. Raises ValueError for any other file."""
    found = pb.Recording()
    try:
        found.ParseFromString(path.read_bytes())
    except OSError as problem:
        raise ValueError(f"{path} cannot be read: {problem.strerror}") from None
    except Exception:  # DecodeError, which has moved between versions of protobuf
        raise ValueError(f"{path} is not a flight record, or was cut short") from None
    if found.version != VERSION:
        raise ValueError(f"{path} is a flight record of version {found.version}; only version {VERSION} can be read")
    return found


def _put(values: list[int], index: int, value: int) -> None:
    """Set an entry. Extends the list if it is too short."""
    if index == len(values):
        values.append(value)
        return
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
