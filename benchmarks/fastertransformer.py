"""FasterTransformer behind a request-level scheduler (OSDI'22, section 6), the baseline.

An idle engine forms a batch of the waiting requests. Its first iteration treats every prompt as if it were the
shortest; longer ones then advance a token an iteration, like answers. No request leaves before all have finished.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxserve.plan.cost import Roofline
from jaxserve.simulate.outcome import Outcome
from jaxserve.simulate.virtual_clock import Arrival


def iterations(batch: Sequence[Arrival]) -> int:
    """The number of iterations of a batch."""
    shortest = min(len(each.prompt) for each in batch)
    return max(len(each.prompt) - shortest + each.output for each in batch)


def batch_seconds(batch: Sequence[Arrival], roofline: Roofline) -> float:
    """Seconds of a batch; it is one micro-batch, so no two stages work at the same time."""
    count, shortest = len(batch), min(len(each.prompt) for each in batch)
    lengths = range(shortest + 1, shortest + iterations(batch))
    works = [[(0, shortest)] * count, *([(length - 1, 1)] * count for length in lengths)]
    return sum(stage.total for chunks in works for stage in roofline(chunks))


def run(coming: Sequence[Arrival], roofline: Roofline, *, max_batch: int) -> list[Outcome]:
    """Serves every arrival (ascending in time), in batches of at most `max_batch`."""
    outcomes: list[Outcome] = []
    now = 0.0
    while len(outcomes) < len(coming):
        first = len(outcomes)
        now = max(now, coming[first].time)
        batch = [each for each in coming[first : first + max_batch] if each.time <= now]
        now += batch_seconds(batch, roofline)
        outcomes += (
            Outcome(arrival=each.time, prompt_tokens=len(each.prompt), token_times=[now] * each.output)
            for each in batch
        )
    return outcomes
