"""Measures an iteration's time in each bucket, on the compiled programs at start."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from jaxserve.iteration import Admission, Chunk, IterationPlan, SamplerVariant, TableChange, max_chunks
from jaxserve.runner.batch import pack
from jaxserve.runner.pipeline import Pipeline
from jaxserve.runner.programs import StageShape
from jaxserve.runner.stage import Progress
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduler.buckets import BucketCost

_CONTEXT = 128  # tokens before each decode
_LONG_CONTEXT = 512  # for the cost of a longer context
_PASSES, _RUNS = 3, 3  # over all buckets, and runs of each in a pass: outvotes a disturbance of a second
_LEAST_RUNS, _ENOUGH = 2, 0.5  # fewer runs where they take this many seconds together


class Measured(NamedTuple):
    """Measured times of iterations.

    Attributes:
      buckets: time of each bucket, full, with decodes at a medium context.
      slot_milliseconds: added milliseconds of an iteration per slot that it reads.
    """

    buckets: list[BucketCost]
    slot_milliseconds: float


def measure_buckets(pipeline: Pipeline, n_blocks: int, progress: Progress) -> Measured:
    """Run every bucket a few times, filled with decodes and a prompt, and return the medians.

    The time is that between consecutive iterations, each launched before the last one completes, as the engine does.
    Slow buckets run fewer times, since they take most of the start.
    """
    shape, buckets = pipeline.shape, pipeline.stages[0].buckets
    longest = min(shape.max_context, n_blocks // shape.groups.parts * shape.attention.block_size) - 1
    short, long = min(_CONTEXT, longest), min(_LONG_CONTEXT, longest)
    tables = _Tables(shape, n_blocks, long + 1)
    _spans(pipeline, tables, buckets[0], [Chunk(0, short, 1, True)], admissions=tables.admissions())
    full = [(bucket, _full(bucket, max_chunks(bucket, shape.max_rows), short, longest)) for bucket in buckets]
    bucket = min((size for size in buckets if size >= shape.max_rows), default=buckets[-1])
    rows = range(max_chunks(bucket, shape.max_rows))
    works = full + [(bucket, [Chunk(row, context, 1, True) for row in rows]) for context in (short, long)]
    spans: list[list[float]] = [[] for _ in works]
    for number in range(_PASSES):
        for index, (size, chunks) in enumerate(works):
            if sum(spans[index]) < _ENOUGH:
                spans[index] += _spans(pipeline, tables, size, chunks)
            progress("measuring buckets", number * len(works) + index + 1, _PASSES * len(works))
    *seconds, near, far = map(statistics.median, spans)
    costs = [
        BucketCost(
            size=size,
            compile_seconds=sum(stage.compile_seconds[size] for stage in pipeline.stages),
            milliseconds=1e3 * each,
            slots_read=sum(chunk.start for chunk in chunks),
        )
        for (size, chunks), each in zip(full, seconds, strict=True)
    ]
    slope = 1e3 * (far - near) / (len(rows) * (long - short)) if long > short else 0.0
    return Measured(costs, max(slope, 0.0))


def run_once(pipeline: Pipeline, n_blocks: int) -> None:
    """Run one iteration, of the smallest bucket."""
    tables = _Tables(pipeline.shape, n_blocks, 2)
    chunks = [Chunk(0, 1, 1, True)]
    _spans(pipeline, tables, pipeline.stages[0].buckets[0], chunks, admissions=tables.admissions())


def _full(bucket: int, rows: int, context: int, longest: int) -> list[Chunk]:
    """The chunks that fill a bucket: one prompt, and decodes in all other rows."""
    prompt = min(bucket - rows + 1, longest + 1)
    chunks = [Chunk(row, context, 1, True) for row in range(rows - 1)]
    return [*chunks, Chunk(rows - 1, 0, prompt, True) if prompt > 1 else Chunk(rows - 1, context, 1, True)]


def _spans(
    pipeline: Pipeline,
    tables: _Tables,
    bucket: int,
    chunks: Sequence[Chunk],
    *,
    admissions: tuple[Admission, ...] = (),
) -> list[float]:
    """Seconds of a few iterations of these chunks.

    An iteration with admissions runs once and is not timed.
    """
    plan = IterationPlan(
        sequence=0,
        bucket=bucket,
        admissions=admissions,
        chunks=tuple(chunks),
        table_changes=tuple(change for chunk in chunks if chunk.length > 1 for change in tables.changes(chunk)),
        sampler=SamplerVariant.PLAIN,
        scoring=False,
    )
    packed = pack(plan, pipeline.shape.layout(bucket), tables.n_blocks)
    if admissions:
        pipeline.launch(plan, packed)
        pipeline.wait()
        return []
    finished: list[float] = []
    wanted, runs = _RUNS, -len(pipeline.stages)  # as many fill the stages, and are not timed
    while runs < wanted:
        while pipeline.has_capacity and runs + pipeline.in_flight < wanted:
            pipeline.launch(plan, packed)
        pipeline.wait()
        finished.append(time.perf_counter())
        runs += 1
        if runs == 1:
            wanted = min(_RUNS, max(_LEAST_RUNS, math.ceil(_ENOUGH / (finished[-1] - finished[-2]))))
    return [end - start for start, end in pairwise(finished[-1 - runs :])]


class _Tables:
    """Block tables for measuring: distinct blocks for each row if the pool has enough.

    Rows that share blocks would read them from the CPU's cache. No request uses the blocks yet.
    """

    def __init__(self, shape: StageShape, n_blocks: int, tokens: int) -> None:
        """Args:
        tokens: tokens of each row.
        """
        self.n_blocks, self._groups = n_blocks, shape.groups
        self._rows, self._tokens, self._block_size = shape.max_rows, tokens, shape.attention.block_size
        self._each = -(-tokens // self._block_size)

    def _blocks(self, row: int, count: int) -> list[int]:
        """The first entries of a row's table, those of `count` blocks in every cache group."""
        first = row // self._groups.parts * self._each
        return list(self._groups.entries(row, range(first, first + count), self.n_blocks))

    def admissions(self) -> tuple[Admission, ...]:
        """An admission for every row."""
        return tuple(
            Admission(
                row=row,
                request_id="",
                tokens=(0,) * self._tokens,
                prompt_length=self._tokens,
                blocks=tuple(self._blocks(row, self._each)),
                sampling=SamplingParams(temperature=0.0, max_tokens=1),
            )
            for row in range(self._rows)
        )

    def changes(self, chunk: Chunk) -> list[TableChange]:
        """Block-table changes for a prompt."""
        count = -(-chunk.length // self._block_size)
        return [TableChange(chunk.row, column, block) for column, block in enumerate(self._blocks(chunk.row, count))]
