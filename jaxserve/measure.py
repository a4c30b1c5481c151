"""What an iteration of each bucket costs, measured on the compiled programs before any request."""

from __future__ import annotations

import statistics
import time
from itertools import pairwise

from jaxserve.batch import pack
from jaxserve.buckets import BucketCost
from jaxserve.iteration import Chunk, IterationPlan, SamplerVariant, TableChange, max_chunks
from jaxserve.pipeline import Pipeline
from jaxserve.programs import StageShape
from jaxserve.stage import Progress

_CONTEXT = 128  # context of the decodes
_RUNS = 3


def bucket_costs(pipeline: Pipeline, n_blocks: int, progress: Progress) -> list[BucketCost]:
    """Runs every bucket a few times, at most rows decoding and the rest a prompt, and reports the medians.

    With several stages it is the time between iterations that follow each other through them.
    """
    stages, costs = pipeline.stages, []
    buckets = stages[0].buckets
    for done, bucket in enumerate(buckets, start=1):
        plan = _full_plan(pipeline.shape, bucket, n_blocks)
        packed = pack(plan, pipeline.shape.layout(bucket), n_blocks)
        finished = [time.perf_counter()]
        for _ in range(len(stages) + _RUNS):
            while pipeline.in_flight < len(stages):
                pipeline.launch(plan, packed)
            pipeline.wait()
            finished.append(time.perf_counter())
        while pipeline.in_flight:
            pipeline.wait()
        seconds = [end - start for start, end in pairwise(finished)]
        costs.append(
            BucketCost(
                size=bucket,
                compile_seconds=sum(stage.compile_seconds[bucket] for stage in stages),
                milliseconds=1e3 * statistics.median(seconds[-_RUNS:]),
            )
        )
        progress("measuring buckets", done, len(buckets))
    return costs


def _full_plan(shape: StageShape, bucket: int, n_blocks: int) -> IterationPlan:
    """A full bucket: decodes at a middling context in all rows but one, and a prompt chunk in that.

    Keys are written to slots of the pool that no request holds yet. Each row writes a block of its own where the pool
    has enough of them; what is read does not matter.
    """
    block_size, rows = shape.attention.block_size, max_chunks(bucket, shape.max_rows)
    context = min(_CONTEXT, shape.max_context - 1)
    prompt = min(bucket - rows + 1, shape.max_context, n_blocks * block_size)
    lengths = [1] * (rows - 1) + [prompt]
    chunks, changes, block = [], [], 0
    for row, length in enumerate(lengths):
        start = context if length == 1 else 0
        chunks.append(Chunk(row, start, length, True))
        for index in range(start // block_size, (start + length - 1) // block_size + 1):
            changes.append(TableChange(row, index, block % n_blocks))
            block += 1
    return IterationPlan(
        sequence=0,
        bucket=bucket,
        admissions=(),
        chunks=tuple(chunks),
        table_changes=tuple(changes),
        sampler=SamplerVariant.PLAIN,
        scoring=False,
    )
