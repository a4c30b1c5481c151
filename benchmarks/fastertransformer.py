"""FasterTransformer behind a request-level scheduler (OSDI'22, section 6), the baseline.

An idle engine forms a batch of the waiting requests. Its first iteration treats every prompt as if it were the
shortest; longer ones then advance a token an iteration, like answers. No request leaves before all have finished.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxserve.planning.cost import Roofline
from jaxserve.simulate.outcome import Outcome
from jaxserve.simulate.virtual_clock import Arrival


def iterations(batch: Sequence[Arrival]) -> int:
    """The number of iterations of a batch."""
    shortest = min(len(each.prompt) for each in batch)
    return max(len(each.prompt) - shortest + each.output for each in batch)


class BatchSeconds:
    """Seconds of batches on a roofline, which is asked once for each iteration that batches share."""

    def __init__(self, roofline: Roofline) -> None:
        self._roofline = roofline
        self._prompts: dict[tuple[int, int], float] = {}  # (batch, length) -> seconds
        self._decodes: dict[int, list[float]] = {}  # batch -> seconds of decodes at all positions before each

    def __call__(self, batch: Sequence[Arrival]) -> float:
        """Seconds of a batch; it is one micro-batch, so no two stages work at the same time."""
        count, shortest = len(batch), min(len(each.prompt) for each in batch)
        if (count, shortest) not in self._prompts:
            self._prompts[count, shortest] = self._seconds(count, 0, shortest)
        before, end = self._decodes.setdefault(count, [0.0]), shortest + iterations(batch) - 1
        while len(before) <= end:
            before.append(before[-1] + self._seconds(count, len(before) - 1, 1))
        return self._prompts[count, shortest] + before[end] - before[shortest]

    def _seconds(self, count: int, start: int, length: int) -> float:
        return sum(stage.total for stage in self._roofline([(start, length)] * count))


def run(coming: Sequence[Arrival], seconds: BatchSeconds, *, max_batch: int) -> list[Outcome]:
    """Serves every arrival (ascending in time), in batches of at most `max_batch`."""
    outcomes: list[Outcome] = []
    now = 0.0
    while len(outcomes) < len(coming):
        first = len(outcomes)
        now = max(now, coming[first].time)
        batch = [each for each in coming[first : first + max_batch] if each.time <= now]
        now += seconds(batch)
        outcomes += (
            Outcome(arrival=each.time, prompt_tokens=len(each.prompt), token_times=[now] * each.output)
            for each in batch
        )
    return outcomes
