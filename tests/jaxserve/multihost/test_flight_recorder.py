"""The ring: what is in it, and that the rows before it follow from what has left it."""

import json
import random
import threading

import numpy as np
import pytest

from jaxserve.iteration import Admission, Chunk, IterationPlan, IterationResult, TableChange
from jaxserve.multihost import control_pb2 as pb
from jaxserve.multihost import flight_recorder, flight_replay, wire
from jaxserve.sampling_params import SamplingParams
from tests.jaxserve.multihost.processes import WAIT_SECONDS

BLOCK = 4


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def plan(sequence: int, chunks: list[Chunk], **fields) -> pb.Plan:
    made = IterationPlan(
        sequence=sequence,
        bucket=16,
        chunks=tuple(chunks),
        sampler=None,
        scoring=False,
        admissions=fields.pop("admissions", ()),
        table_changes=fields.pop("table_changes", ()),
        **fields,
    )
    return wire.write_plan(pb.Plan(), made, 0)


def admission(row: int, tokens: tuple[int, ...], blocks: tuple[int, ...] = ()) -> Admission:
    return Admission(
        row=row,
        request_id=f"in row {row}",
        tokens=tokens,
        prompt_length=len(tokens),
        blocks=blocks,
        sampling=SamplingParams(temperature=0.0),
    )


def result(*tokens: int) -> IterationResult:
    return IterationResult(tokens=np.array(tokens, np.int32), logprobs=-np.arange(len(tokens), dtype=np.float32))


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def ring(tmp_path, clock) -> flight_recorder.FlightRecorder:
    about = pb.Recording(fingerprint="f", settings="{}", n_blocks=9, n_rows=3)
    return flight_recorder.FlightRecorder(about, BLOCK, seconds=10.0, folder=tmp_path / "records", clock=clock)


def test_what_is_old_becomes_the_rows_before(ring, clock) -> None:
    ring.launched(
        plan(
            0,
            [Chunk(1, 0, 5, 1)],
            admissions=(admission(1, (10, 11, 12, 13, 14)),),
            table_changes=(TableChange(1, 0, 7), TableChange(1, 1, 3)),
        )
    )
    ring.landed(result(20))
    clock.now = 6.0
    ring.launched(plan(1, [Chunk(1, 5, 1, 1)]))
    ring.landed(result(21))
    clock.now = 12.0
    ring.launched(plan(2, [Chunk(1, 6, 1, 1)]))
    found = ring.recording("asked for")
    assert [entry.plan.sequence for entry in found.entries] == [1, 2]
    assert [entry.landed for entry in found.entries] == [True, False]
    assert [entry.seconds for entry in found.entries] == [0.0, 6.0]
    assert list(found.entries[0].tokens) == [21]
    (row,) = found.rows
    assert (row.admission.row, row.computed) == (1, 5)
    assert list(row.admission.tokens) == [10, 11, 12, 13, 14, 20]
    assert list(row.admission.blocks) == [7, 3]


def test_a_row_that_was_taken_within_the_ring_needs_no_past(ring, clock) -> None:
    ring.launched(plan(0, [Chunk(0, 0, 1, 1)], admissions=(admission(0, (5,)),)))
    ring.landed(result(6))
    clock.now = 20.0
    ring.launched(plan(1, [Chunk(0, 0, 2, 1)], admissions=(admission(0, (8, 9)),)))
    ring.landed(result(7))
    found = ring.recording("")
    assert [entry.plan.sequence for entry in found.entries] == [1]
    assert not found.rows


def test_an_iteration_without_an_answer_never_leaves(ring, clock) -> None:
    ring.launched(plan(0, [Chunk(0, 0, 1, 1)], admissions=(admission(0, (5,)),)))
    clock.now = 1000.0
    ring.launched(plan(1, [Chunk(0, 1, 1, 1)]))
    assert [entry.plan.sequence for entry in ring.recording("").entries] == [0, 1]


def test_what_is_under_way_when_all_is_forgotten_still_lands(ring) -> None:
    ring.launched(plan(0, [Chunk(0, 0, 1, 1)], admissions=(admission(0, (5,)),)))
    ring.forget()
    ring.launched(plan(0, [Chunk(1, 0, 1, 1)], admissions=(admission(1, (6,)),)))
    ring.landed(result(70))
    assert [entry.landed for entry in ring.recording("").entries] == [False]
    ring.landed(result(71))
    (entry,) = ring.recording("").entries
    assert list(entry.tokens) == [71]


def test_of_drafts_a_row_keeps_what_was_chosen() -> None:
    rows = flight_recorder.RowRecords(BLOCK)
    rows.prepare(plan(0, [], admissions=(admission(2, (1, 2, 3)),)))
    message = plan(1, [Chunk(2, 2, 4, 4)], drafts=(50, 51, 52))
    rows.prepare(message)
    rows.finish(message, [50, 51, 99, 98])  # the third draft was wrong
    record = rows.rows[2]
    assert record.tokens == [1, 2, 3, 50, 51, 99]
    assert record.computed == 5
    again = plan(2, [Chunk(2, 5, 1, 1)])
    rows.prepare(again)
    rows.finish(again, [7])
    assert record.tokens == [1, 2, 3, 50, 51, 99, 7]


def test_rows_agree_with_a_history_kept_apart() -> None:
    """Chunks that do not sample and those that do, in any order, each take their own entries of the result."""
    rng, rows = random.Random(3), flight_recorder.RowRecords(BLOCK)
    known = {row: [rng.randrange(100) for _ in range(rng.randint(1, 9))] for row in range(5)}
    rows.prepare(plan(0, [], admissions=tuple(admission(row, tuple(tokens)) for row, tokens in known.items())))
    computed = dict.fromkeys(known, 0)
    for sequence in range(1, 60):
        chunks, chosen = [], []
        for row in rng.sample(sorted(known), rng.randint(1, 5)):
            length = rng.randint(1, len(known[row]) - computed[row])
            samples = int(computed[row] + length == len(known[row]))
            chunks.append(Chunk(row, computed[row], length, samples))
            chosen.append(rng.randrange(100))
            computed[row] += length
            if samples:
                known[row].append(chosen[-1])
        message = plan(sequence, chunks)
        rows.prepare(message)
        rows.finish(message, chosen)
    assert {row: record.tokens for row, record in rows.rows.items()} == known
    assert {row: record.computed for row, record in rows.rows.items()} == computed


def test_a_file_is_read_as_it_was_written(ring, tmp_path) -> None:
    ring.launched(plan(0, [Chunk(0, 0, 1, 1)], admissions=(admission(0, (5,)),)))
    ring.landed(result(6))
    path = ring.write("a test")
    assert path.parent == tmp_path / "records"
    assert flight_recorder.read(path) == ring.recording("a test")
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(ValueError, match="is not a flight record, or was cut short"):
        flight_recorder.read(path)


@pytest.mark.parametrize("version", [0, 1, flight_recorder.VERSION + 1])
def test_a_record_of_another_version_is_refused(version, tmp_path) -> None:
    path = tmp_path / "of another version"
    path.write_bytes(pb.Recording(version=version, reason="a test").SerializeToString())
    with pytest.raises(ValueError, match=f"version {version}; only version {flight_recorder.VERSION} can be read"):
        flight_recorder.read(path)


def test_a_record_with_settings_of_another_version_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(flight_replay.weights, "fingerprint", lambda path: "f")
    record = pb.Recording(fingerprint="f", settings=json.dumps({"buckets": [4], "warp": 9}))
    with pytest.raises(ValueError, match="another version of jaxserve; this one has no setting warp"):
        flight_replay.replay(record, "somewhere", cache=None, progress=lambda *_: None)


def test_a_signal_may_ask_for_a_record_while_another_is_made(ring, monkeypatch) -> None:
    ring.launched(plan(0, [Chunk(0, 0, 1, 1)], admissions=(admission(0, (5,)),)))
    made, entry = [], flight_recorder._RecordedIteration.entry

    def interrupted(kept, started):
        if not made:
            made.append(None)
            made[0] = ring.recording("a signal")
        return entry(kept, started)

    monkeypatch.setattr(flight_recorder._RecordedIteration, "entry", interrupted)
    thread = threading.Thread(target=lambda: made.append(ring.recording("asked for")), daemon=True)
    thread.start()
    thread.join(WAIT_SECONDS)
    assert [(each.reason, len(each.entries)) for each in made] == [("a signal", 1), ("asked for", 1)]
