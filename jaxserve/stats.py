"""What can be seen of a running engine: how busy it is, and what each iteration carried and cost. No jax."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jaxserve.iteration import IterationPlan


class IterationRecord(NamedTuple):
    """What one iteration of a replica carried and what its host work cost (seconds); for benchmarks and live views.

    Attributes:
      plan: what it carried.
      waiting: requests that waited for a row when it was planned.
      decodes: requests that it gave their next token, or several.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How busy a replica is, or an engine, at a glance; from `iterations` on, counted since it started.

    Attributes:
      outstanding_tokens: that the live requests may still have computed: prompts that are not cached, and what they may
        generate.
      drafted_tokens / accepted_tokens: tokens drafted by speculation, and those of them that were chosen.
      host_seconds: the host's work for the iterations (schedule, pack, launch, complete).
      bucket_seconds: the device's work for them, by the buckets' measured costs.
      padding_seconds: the part of that spent on padding.
      due_seconds: what the oldest iteration under way was measured to take; 0 while none is.
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
    due_seconds: float = 0.0


_FIGURES = tuple(field.name for field in dataclasses.fields(Load))


def total(loads: Sequence[Load]) -> Load:
    """The loads of several replicas as one; of one, itself. Every call that comes asks for it."""
    if len(loads) == 1:
        return loads[0]
    return Load(**{name: sum(getattr(load, name) for load in loads) for name in _FIGURES})
