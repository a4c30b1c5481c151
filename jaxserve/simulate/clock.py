"""The real Scheduler on a virtual clock: the engine's loop with a cost model where the device would be. No jax."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from jaxserve.bench.load import Workload
from jaxserve.bench.report import Outcome
from jaxserve.iteration import IterationPlan, IterationResult
from jaxserve.request import InvalidRequest, Request, SamplingParams, TokenEvent
from jaxserve.scheduler import Scheduler

EOS = 1  # what the simulated device answers where a request ends before its limit

# Seconds that an iteration takes in each stage.
StageSeconds = Callable[[IterationPlan], Sequence[float]]
# Called after an iteration was planned: the plan, and when it will have landed.
Watch = Callable[[IterationPlan, float], None]


class Arrival(NamedTuple):
    """A request to come.

    Attributes:
      time: seconds after the start.
      prompt: int32[P] token ids.
      output: tokens it will generate.
      max_tokens: tokens it asks for, at least `output`.
    """

    time: float
    prompt: np.ndarray
    output: int
    max_tokens: int
    priority: int = 0


class Host(NamedTuple):
    """What the host adds to an iteration, in seconds.

    Attributes:
      launch: from the decision to plan to the launch.
      complete: from the answer to the callers' events.
      polls: takes in who arrives at once, rather than when it has waited for an iteration (as the engine does).
    """

    launch: float = 0.0
    complete: float = 0.0
    polls: bool = False


class Device:
    """Stages in a row. Each works on one iteration at a time, in the order of launches.

    Attributes:
      busy: seconds that each stage has worked.
    """

    def __init__(self, seconds: StageSeconds, n_stages: int) -> None:
        self._seconds = seconds
        self._free = [0.0] * n_stages
        self.busy = [0.0] * n_stages

    def launch(self, plan: IterationPlan, now: float) -> float:
        """When an iteration that is launched now leaves the last stage."""
        for stage, seconds in enumerate(self._seconds(plan)):
            now = max(now, self._free[stage]) + seconds
            self._free[stage] = now
            self.busy[stage] += seconds
        return now


def arrivals(workload: Workload, *, max_tokens: int | None = None, max_context: int | None = None) -> list[Arrival]:
    """A workload's jobs.

    Args:
      max_tokens: what every client asks for, where that is more than what it will use and fits `max_context`.
    """
    made = []
    for job in workload.jobs:
        asked = job.max_tokens
        if max_tokens is not None:
            room = max_tokens if max_context is None else min(max_tokens, max_context - len(job.prompt))
            asked = max(asked, room)
        made.append(Arrival(job.arrival, job.prompt, job.max_tokens, asked))
    return made


def run(
    coming: Sequence[Arrival],
    scheduler: Scheduler,
    device: Device,
    *,
    in_flight: int,
    host: Host | None = None,
    watch: Watch | None = None,
) -> list[Outcome]:
    """Serves every arrival (ascending in time) as `Engine.step` would, and says when each got its tokens.

    The scheduler must be new, and if some request ends before its limit, have EOS as its end of sequence.

    Args:
      in_flight: iterations launched ahead of the answers at most.

    Returns:
      An outcome for each arrival, with the error of one that was refused.
    """
    host = host or Host()
    clients = _Clients(coming, scheduler)
    flying: deque[tuple[IterationPlan, IterationResult, float]] = deque()
    now = 0.0
    while True:
        clients.submit(now)
        while len(flying) < in_flight and (plan := scheduler.schedule()) is not None:
            now += host.launch
            landing = device.launch(plan, now)
            flying.append((plan, clients.answer(plan), landing))
            if watch is not None:
                watch(plan, landing)
        if not flying:
            if clients.next_time is None:
                break
            now = max(now, clients.next_time)
            continue
        landing = flying[0][2]
        if host.polls and len(flying) < in_flight and now < (clients.next_time or 0.0) < landing:
            now = clients.next_time or 0.0
            continue
        plan, result, _ = flying.popleft()
        now = max(now, landing) + host.complete
        clients.deliver(scheduler.complete(plan, result), now)
    assert not scheduler.has_work
    return clients.outcomes


class _Clients:
    """Who asks and what they got. Tokens are 0, and EOS where a request ends before its limit."""

    def __init__(self, coming: Sequence[Arrival], scheduler: Scheduler) -> None:
        self._coming = coming
        self._scheduler = scheduler
        self._submitted = 0
        self.outcomes: list[Outcome] = []
        self._results: dict[int, IterationResult] = {}
        self._early = any(each.max_tokens > each.output for each in coming)
        self._last: dict[int, int] = {}  # row -> position of its request's last token
        self._sampling: dict[int, SamplingParams] = {}
        self.next_time = coming[0].time if coming else None

    def submit(self, now: float) -> None:
        """Hands in whoever has come by now."""
        while self.next_time is not None and self.next_time <= now:
            arrival, name = self._coming[self._submitted], str(self._submitted)
            count = len(arrival.prompt)
            self._submitted += 1
            self.outcomes.append(outcome := Outcome(arrival=arrival.time, prompt_tokens=count))
            sampling = self._sampling.get(arrival.max_tokens)
            if sampling is None:
                sampling = SamplingParams(max_tokens=arrival.max_tokens, temperature=0.0, ignore_eos=not self._early)
                self._sampling[arrival.max_tokens] = sampling
            # Without a prefix cache nobody looks at the tokens.
            prompt = tuple(arrival.prompt.tolist()) if self._scheduler.pool.prefix_cache else (0,) * count
            try:
                self._scheduler.submit(
                    Request(
                        request_id=name,
                        prompt=prompt,
                        sampling=sampling,
                        priority=arrival.priority,
                        arrival=arrival.time,
                    )
                )
            except InvalidRequest as refusal:
                outcome.error = str(refusal)
            more = self._submitted < len(self._coming)
            self.next_time = self._coming[self._submitted].time if more else None

    def answer(self, plan: IterationPlan) -> IterationResult:
        """What the device will say."""
        count = len(plan.chunks)
        if self._early:
            for admission in plan.admissions:
                arrival = self._coming[int(admission.request_id)]
                self._last[admission.row] = len(arrival.prompt) + arrival.output - 1
            tokens = [EOS * (start + length >= self._last[row]) for row, start, length, _ in plan.chunks]
            if any(tokens):
                return IterationResult(tokens=np.array(tokens, np.int32), logprobs=np.zeros(count, np.float32))
        if count not in self._results:
            zeros = np.zeros(count, np.int32)
            self._results[count] = IterationResult(tokens=zeros, logprobs=zeros.astype(np.float32))
        return self._results[count]

    def deliver(self, events: Iterable[TokenEvent], now: float) -> None:
        """Notes that the events' tokens have come."""
        for event in events:
            if event.token_ids:
                self.outcomes[int(event.request_id)].token_times.append(now)
