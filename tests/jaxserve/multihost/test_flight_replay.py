"""The replay of a record on a pipeline that notes which blocks are written."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from jaxserve.iteration import Admission, Chunk, IterationPlan, TableChange
from jaxserve.multihost import control_pb2 as pb
from jaxserve.multihost import flight_replay, wire
from jaxserve.runner.pipeline import Pipeline
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduler.cache_groups import CacheGroups
from jaxserve.startup import silent

BLOCK, BLOCKS, CONTEXT = 4, 9, 32
TOKENS = tuple(range(50, 70))


class Written:
    """A pipeline that keeps (block, position) of every key and value written; it samples token 7."""

    def __init__(self, window: int | None) -> None:
        groups = CacheGroups.of([window], block_size=BLOCK, max_context=CONTEXT, n_rows=2, most_tokens=8)
        self.shape = SimpleNamespace(groups=groups, layout=lambda bucket: None)
        self.stages = [SimpleNamespace(buckets=(8,))]
        self.tables: dict[int, list[int]] = {}
        self.kept: dict[int, int] = {}  # position whose keys a block holds last, divided by BLOCK

    def launch(self, plan: IterationPlan, _packed: object) -> None:
        for admission in plan.admissions:
            self.tables[admission.row] = [*admission.blocks, *[0] * (CONTEXT // BLOCK - len(admission.blocks))]
        for row, column, block in plan.table_changes:
            self.tables[row][column] = block
        for chunk in plan.chunks:
            for position in range(chunk.start, chunk.start + chunk.length):
                self.kept[self.tables[chunk.row][position // BLOCK]] = position // BLOCK
        self.points = plan.num_points

    def wait(self) -> tuple[None, SimpleNamespace]:
        return None, SimpleNamespace(tokens=np.full(self.points, 7), logprobs=np.zeros(self.points))


def admitted(row: int, blocks: tuple[int, ...]) -> Admission:
    given = {"tokens": TOKENS, "prompt_length": len(TOKENS), "sampling": SamplingParams(temperature=0.0)}
    return Admission(row=row, request_id=f"in row {row}", blocks=blocks, **given)


def replayed(pipeline: Written, monkeypatch: pytest.MonkeyPatch, rows: list[pb.Row], *plans: IterationPlan) -> None:
    monkeypatch.setattr(flight_replay, "pack", lambda plan, layout, n_blocks: None)
    entries = [
        pb.Entry(plan=wire.write_plan(pb.Plan(), plan, 0), landed=True, tokens=[7], logprobs=[0.0]) for plan in plans
    ]
    recording = pb.Recording(n_blocks=BLOCKS, n_rows=2, rows=rows, entries=entries)
    found = flight_replay._Replay(cast(Pipeline, pipeline), recording, None).run(silent)
    assert not found.differences
    assert found.iterations == len(plans)


def row_of(row: int, blocks: tuple[int, ...], computed: int) -> pb.Row:
    made = wire.write_plan(pb.Plan(), plan_of(admissions=(admitted(row, blocks),)), 0)
    return pb.Row(admission=made.admissions[0], computed=computed)


def plan_of(*chunks: Chunk, **given) -> IterationPlan:
    fields = {"bucket": 8, "admissions": (), "table_changes": (), "sampler": None, "scoring": False} | given
    return IterationPlan(sequence=0, chunks=chunks, **fields)


def test_rows_from_before_the_record_spare_freed_blocks(monkeypatch) -> None:
    """Row 0 gave blocks 3 and 4 back, and row 1 holds them."""
    pipeline = Written(8)
    rows = [row_of(1, (4, 3), 8), row_of(0, (3, 4, 6, 7, 8), 19)]
    replayed(pipeline, monkeypatch, rows, plan_of(Chunk(0, 19, 1, 1)))
    assert [pipeline.kept[block] for block in (4, 3)] == [0, 1]
    assert [pipeline.kept[block] for block in (6, 7, 8)] == [2, 3, 4]


def test_cached_prefixes_are_computed_into_spare_blocks(monkeypatch) -> None:
    """Block 0 stands in the place of those that the request does not hold."""
    pipeline = Written(8)
    hit = admitted(1, (0, 0, 6, 7))
    plan = plan_of(Chunk(1, 16, 4, 1), admissions=(hit,), table_changes=(TableChange(1, 4, 8),))
    replayed(pipeline, monkeypatch, [row_of(0, (0, 1), 8)], plan)
    assert [pipeline.kept[block] for block in (0, 1)] == [0, 1]
    assert [pipeline.kept[block] for block in (6, 7)] == [2, 3]


def test_without_a_window_there_are_no_spare_blocks(monkeypatch) -> None:
    pipeline = Written(window=None)
    replayed(pipeline, monkeypatch, [row_of(0, (3, 4, 6, 7, 8), 19)], plan_of(Chunk(0, 19, 1, 1)))
    assert pipeline.kept == {3: 0, 4: 1, 6: 2, 7: 3, 8: 4}
