"""Statistics of a running engine: its load, and what each iteration carried and cost.

No jax.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jaxserve.iteration import IterationPlan
from jaxserve.scheduler.buckets import BucketCost


class IterationRecord(NamedTuple):
    """What one iteration carried and its host seconds, for benchmarks and live views.

    Attributes:
      plan: what it carried.
      waiting: requests that waited for a row when it was planned.
      decodes: requests that it gave their next token, or several.
      launch_s: time to enqueue it; without its sampling if that waited for grammar masks.
      wait_s: time the host spent blocked on the device.
      finished_at: monotonic seconds.
    """

    replica: int
    plan: IterationPlan
    decodes: int
    prompt_tokens: int
    waiting: int
    schedule_s: float
    pack_s: float
    launch_s: float
    wait_s: float
    complete_s: float
    finished_at: float

    @property
    def bucket(self) -> int:
        """Tokens that the compiled program carried, padding included."""
        return self.plan.bucket

    @property
    def num_tokens(self) -> int:
        """Tokens computed, padding left out."""
        return self.plan.num_tokens


Recorder = Callable[[IterationRecord], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How busy a replica or an engine is; from `iterations` on, counted since it started.

    Attributes:
      outstanding_tokens: most tokens still to compute for live requests: prompts that are not cached, and answers.
      prefill_tokens: those of outstanding_tokens in prompts of requests without a token yet.
      drafted_tokens / accepted_tokens: tokens drafted by speculation, and those of them that were accepted.
      host_seconds: host time of the iterations (schedule, pack, launch, complete).
      bucket_seconds: device time of the iterations, as the sum of their buckets' measured costs.
      padding_seconds: the part of bucket_seconds that went into padding.
      expected_seconds: measured cost of the oldest iteration in flight; 0 if none is in flight.
      host_cache_bytes / host_cache_blocks: blocks in host memory.
      host_cache_stored / host_cache_loaded / host_cache_corrupt: blocks copied to the host, blocks copied back, and
        those of the latter that were not what had been stored.
      strangers: connections to the control channel of several hosts that were dropped.
    """

    running: int
    waiting: int
    waiting_tokens: int
    outstanding_tokens: int
    slots_used: int
    slots_cached: int
    slots_total: int
    iterations: int
    prompt_tokens: int
    generated_tokens: int
    cached_tokens: int
    preemptions: int
    drafted_tokens: int
    accepted_tokens: int
    host_seconds: float
    bucket_seconds: float
    padding_seconds: float
    compiled_after_ready: int
    expected_seconds: float = 0.0
    prefill_tokens: int = 0
    strangers: int = 0
    host_cache_bytes: int = 0
    host_cache_blocks: int = 0
    host_cache_stored: int = 0
    host_cache_loaded: int = 0
    host_cache_corrupt: int = 0


_FIGURES = tuple(field.name for field in dataclasses.fields(Load))


def total(loads: Sequence[Load]) -> Load:
    """The sum of the loads of several replicas. Admission asks for it at every request."""
    if len(loads) == 1:
        return loads[0]
    return Load(**{name: sum(getattr(load, name) for load in loads) for name in _FIGURES})


class _Launch(NamedTuple):
    """Host times of an iteration in flight, and the measured cost of its bucket."""

    cost_s: float
    waiting: int
    schedule_s: float
    pack_s: float
    launch_s: float


class IterationStats:
    """Counts the iterations of one loop, and tells recorders of each.

    Attributes:
      recorders: called after every iteration, on the loop's thread.
    """

    def __init__(self, replica: int, costs: Iterable[BucketCost]) -> None:
        """Args:
        costs: of the buckets, as measured.
        """
        self.recorders: list[Recorder] = []
        self.iterations = self.prompt_tokens = self.generated_tokens = self.cached_tokens = 0
        self.host_seconds = self.bucket_seconds = self.padding_seconds = 0.0
        self.compiled_after_ready = 0
        self._replica = replica
        self._cost_s = {cost.size: cost.milliseconds / 1000 for cost in costs}
        self._in_flight: deque[_Launch] = deque()

    @property
    def expected_seconds(self) -> float:
        """Measured cost of the oldest iteration in flight; 0 if none is in flight."""
        oldest = next(iter(self._in_flight.copy()), None)
        return 0.0 if oldest is None else oldest.cost_s

    def launched(self, plan: IterationPlan, *, waiting: int, schedule_s: float, pack_s: float, launch_s: float) -> None:
        """Note an iteration that was launched."""
        if plan.admissions:
            starts = {chunk.row: chunk.start for chunk in plan.chunks}
            self.cached_tokens += sum(starts[admission.row] for admission in plan.admissions)
        self._in_flight.append(_Launch(self._cost_s[plan.bucket], waiting, schedule_s, pack_s, launch_s))

    def completed(self, plan: IterationPlan, *, wait_s: float, complete_s: float) -> None:
        """Count the oldest iteration in flight, and tell the recorders."""
        launch = self._in_flight.popleft()
        num_tokens, decodes = plan.num_tokens, plan.num_decodes
        prompt_tokens = num_tokens - decodes - len(plan.drafts)
        self.iterations += 1
        self.prompt_tokens += prompt_tokens
        self.host_seconds += launch.schedule_s + launch.pack_s + launch.launch_s + complete_s
        self.bucket_seconds += launch.cost_s
        self.padding_seconds += launch.cost_s * (plan.bucket - num_tokens) / plan.bucket
        if not self.recorders:
            return
        record = IterationRecord(
            replica=self._replica,
            plan=plan,
            decodes=decodes,
            prompt_tokens=prompt_tokens,
            waiting=launch.waiting,
            schedule_s=launch.schedule_s,
            pack_s=launch.pack_s,
            launch_s=launch.launch_s,
            wait_s=wait_s,
            complete_s=complete_s,
            finished_at=time.monotonic(),
        )
        for recorder in self.recorders:
            recorder(record)
