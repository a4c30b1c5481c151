"""A fast version of the roofline in `plan.cost`, for millions of iterations."""

from __future__ import annotations

from collections.abc import Sequence

from jaxserve.iteration import IterationPlan
from jaxserve.plan.cost import Fit, Seconds, StageLoad, Work, stage_seconds, work
from jaxserve.scheduler.buckets import BucketCost
from sharding.devices import Topology

_CONTEXT = 128  # context of the decodes in a bucket's cost, as in the engine's measurement


class _Stage:
    """`stage_seconds` of one stage as a linear function of each count of the work."""

    def __init__(self, load: StageLoad, topology: Topology, dtype: str, fit: Fit) -> None:
        apart = Fit(efficiency=fit.efficiency, layer_seconds=fit.layer_seconds)
        nothing, *ones = (
            stage_seconds(load, topology, Work(*(int(i == j) for j in range(4))), dtype=dtype, fit=apart)
            for i in range(-1, 4)
        )
        slopes = [Seconds(*(a - b for a, b in zip(one, nothing, strict=True))) for one in ones]
        self.base = nothing.links + nothing.overhead
        self.tokens, self.rows = (slope.links for slope in slopes[:2])
        self.compute = tuple(slope.compute for slope in slopes)
        self.memory, self.memory_slots = nothing.memory, slopes[2].memory
        self._overlapped = fit.overlapped

    def seconds(self, work: Work) -> float:
        tokens, rows, slots, pairs = work
        by_token, by_row, _, by_pair = self.compute
        compute = by_token * tokens + by_row * rows + by_pair * pairs
        memory = self.memory + self.memory_slots * slots
        busy = max(compute, memory) if self._overlapped else compute + memory
        return busy + self.base + self.tokens * tokens + self.rows * rows


class Roofline:
    """The cost model of iterations on devices.

    Args:
      padded: whether an iteration costs as much as its bucket, rather than as its tokens.
    """

    def __init__(
        self, loads: Sequence[StageLoad], topology: Topology, *, dtype: str = "bfloat16", fit: Fit, padded: bool
    ) -> None:
        self._stages = [_Stage(load, topology, dtype, fit) for load in loads]
        self._padded = padded

    def __call__(self, plan: IterationPlan) -> list[float]:
        """Seconds in each stage."""
        tokens = slots = pairs = 0
        for _, start, length, _ in plan.chunks:
            tokens += length
            slots += start + length
            pairs += length * start + length * (length + 1) // 2
        return self.seconds(Work(plan.bucket if self._padded else tokens, len(plan.chunks), slots, pairs))

    def seconds(self, work: Work) -> list[float]:
        """Seconds in each stage."""
        return [stage.seconds(work) for stage in self._stages]

    def costs(self, sizes: Sequence[int], max_rows: int) -> list[BucketCost]:
        """The bucket costs that the engine would measure at start: time between iterations.

        As in the engine, at most `max_rows` rows decode and the rest of the bucket is a prompt.
        """
        costs = []
        for size in sizes:
            rows = min(size, max_rows)
            chunks = [(_CONTEXT, 1)] * (rows - 1) + [(0, size - rows + 1)]
            milliseconds = 1e3 * max(self.seconds(work(chunks)))
            costs.append(BucketCost(size=size, compile_seconds=0.0, milliseconds=milliseconds))
        return costs
