"""Runs the real scheduler on a virtual clock, with a cost model for the device. No jax."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from jaxserve.errors import InvalidRequest
from jaxserve.iteration import IterationPlan, IterationResult
from jaxserve.request import Request, TokenEvent
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduler import routing
from jaxserve.scheduler.routing import OutstandingTokens
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.scheduler.state import allocation_of, check_fits
from jaxserve.simulate.outcome import Outcome
from jaxserve.simulate.workload import Workload

EOS = 1  # the simulated device's token where a request ends before its limit

# Seconds of an iteration in each stage.
StageSeconds = Callable[[IterationPlan], Sequence[float]]
# Called after an iteration is planned, with the plan and the time when it will land.
Watch = Callable[[IterationPlan, float], None]


class Arrival(NamedTuple):
    """A future request.

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


class HostTimes(NamedTuple):
    """Host time of an iteration, in seconds.

    Attributes:
      launch: from the decision to plan to the launch.
      complete: from the device's result to the callers' events.
      polls: take in arrivals at once, rather than after the iteration in progress (as the engine does).
    """

    launch: float = 0.0
    complete: float = 0.0
    polls: bool = False


class SimulatedDevice:
    """A device with stages in a row, each of which runs one iteration at a time in launch order.

    Attributes:
      busy: busy seconds of each stage.
    """

    def __init__(self, seconds: StageSeconds, n_stages: int) -> None:
        self._seconds = seconds
        self._free = [0.0] * n_stages
        self.busy = [0.0] * n_stages

    def launch(self, plan: IterationPlan, now: float) -> float:
        """The time at which an iteration launched now leaves the last stage."""
        for stage, seconds in enumerate(self._seconds(plan)):
            now = max(now, self._free[stage]) + seconds
            self._free[stage] = now
            self.busy[stage] += seconds
        return now


def arrivals(workload: Workload, *, max_tokens: int | None = None, max_context: int | None = None) -> list[Arrival]:
    """The jobs of a workload as arrivals.

    Args:
      max_tokens: tokens that every client asks for, if that is more than it will use and fits `max_context`.
    """
    made = []
    for job in workload.jobs:
        asked = job.max_tokens
        if max_tokens is not None:
            room = max_tokens if max_context is None else min(max_tokens, max_context - len(job.prompt))
            asked = max(asked, room)
        made.append(Arrival(job.arrival, job.prompt, job.max_tokens, asked))
    return made


def serve(coming: Sequence[Arrival], replicas: Sequence[SimulatedReplica]) -> list[Outcome]:
    """Serve every arrival (ascending in time) as the engine would, and return token times.

    Each arrival goes to the replica that the engine would choose: the one with the fewest outstanding tokens, less
    cached prefixes.

    Returns:
      An outcome for each arrival; if it was refused, with the error.
    """
    early = any(each.max_tokens > each.output for each in coming)
    sampling: dict[int, SamplingParams] = {}
    outcomes: list[Outcome] = []
    for index, arrival in enumerate(coming):
        for replica in replicas:
            replica.advance(arrival.time)
        outcomes.append(outcome := Outcome(arrival=arrival.time, prompt_tokens=len(arrival.prompt)))
        limit = sampling.get(arrival.max_tokens)
        if limit is None:
            limit = SamplingParams(max_tokens=arrival.max_tokens, temperature=0.0, ignore_eos=not early)
            sampling[arrival.max_tokens] = limit
        # Without a prefix cache the token values do not matter.
        looked_at = replicas[0].scheduler.pool.prefix_cache
        request = Request(
            request_id=str(index),
            prompt=tuple(arrival.prompt.tolist()) if looked_at else (0,) * len(arrival.prompt),
            sampling=limit,
            priority=arrival.priority,
            arrival=arrival.time,
        )
        if len(replicas) == 1:
            replicas[0].submit(request, arrival, outcome, 0)
            continue
        allocation = allocation_of(request)
        cached = [replica.scheduler.pool.cached_tokens(allocation) for replica in replicas]
        chosen = routing.choose([replica.owed(arrival.time) for replica in replicas], cached)
        replicas[chosen].submit(request, arrival, outcome, cached[chosen])
    for replica in replicas:
        replica.advance(math.inf)
        assert not replica.scheduler.has_work
    return outcomes


class _Alive(NamedTuple):
    """A live request."""

    arrival: Arrival
    outcome: Outcome
    owed: OutstandingTokens


class SimulatedReplica:
    """Works like `jaxserve.loop.EngineLoop`, with a device that only has durations.

    All tokens are 0, except EOS where a request ends before its limit.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        device: SimulatedDevice,
        *,
        in_flight: int,
        host: HostTimes | None = None,
        watch: Watch | None = None,
    ) -> None:
        """
        Args:
          scheduler: a new one. If some request ends before its limit, its end-of-sequence token must be EOS.
          in_flight: most iterations launched ahead of the results.
        """
        self.scheduler = scheduler
        self._device, self._in_flight, self._host, self._watch = device, in_flight, host or HostTimes(), watch
        self._now = 0.0
        self._flying: deque[tuple[IterationPlan, IterationResult, float]] = deque()
        self._mail: list[Request] = []
        self._alive: dict[str, _Alive] = {}
        self._owed = 0
        self._paid: deque[tuple[float, int]] = deque()  # (time, tokens) of work that ends after the last arrival
        self._early = False  # whether some request ends before its limit
        self._results: dict[int, IterationResult] = {}
        self._last: dict[int, int] = {}  # row -> position of its request's last token

    def submit(self, request: Request, arrival: Arrival, outcome: Outcome, cached: int) -> None:
        """Submit a request at its arrival time; the loop takes it in at its next step.

        Args:
          cached: tokens of its prompt that are known to be in the prefix cache.
        """
        self._now = max(self._now, arrival.time)
        self._early = self._early or not request.sampling.ignore_eos
        owed = OutstandingTokens(len(request.prompt) - cached, request.sampling.max_tokens)
        self._owed = self.owed(arrival.time) + owed.tokens
        self._alive[request.request_id] = _Alive(arrival, outcome, owed)
        self._mail.append(request)

    def owed(self, now: float) -> int:
        """Outstanding tokens of the live requests, as known at this time."""
        while self._paid and self._paid[0][0] <= now:
            self._owed -= self._paid.popleft()[1]
        return self._owed

    def advance(self, until: float) -> None:
        """Run the loop's steps that begin before `until`. All arrivals up to it must be submitted."""
        while self._now < until:
            self._take_mail()
            while len(self._flying) < self._in_flight and (plan := self.scheduler.schedule()) is not None:
                self._now += self._host.launch
                landing = self._device.launch(plan, self._now)
                self._flying.append((plan, self._answer(plan), landing))
                if self._watch is not None:
                    self._watch(plan, landing)
            if not self._flying:
                return
            landing = self._flying[0][2]
            if self._host.polls and len(self._flying) < self._in_flight and self._now < until < landing:
                return
            plan, result, _ = self._flying.popleft()
            self._now = max(self._now, landing) + self._host.complete
            self._deliver(self.scheduler.complete(plan, result))

    def _take_mail(self) -> None:
        for request in self._mail:
            try:
                check_fits(request, self.scheduler.max_context, self.scheduler.pool.n_slots)
                self.scheduler.submit(request)
            except InvalidRequest as refusal:
                alive = self._alive.pop(request.request_id)
                alive.outcome.error = str(refusal)
                self._paid.append((self._now, alive.owed.tokens))
        self._mail.clear()

    def _answer(self, plan: IterationPlan) -> IterationResult:
        """The result that the device will return."""
        count = len(plan.chunks)
        if self._early:
            for admission in plan.admissions:
                arrival = self._alive[admission.request_id].arrival
                self._last[admission.row] = len(arrival.prompt) + arrival.output - 1
            tokens = [EOS * (start + length >= self._last[row]) for row, start, length, _ in plan.chunks]
            if any(tokens):
                return IterationResult(tokens=np.array(tokens, np.int32), logprobs=np.zeros(count, np.float32))
        if count not in self._results:
            zeros = np.zeros(count, np.int32)
            self._results[count] = IterationResult(tokens=zeros, logprobs=zeros.astype(np.float32))
        return self._results[count]

    def _deliver(self, events: Iterable[TokenEvent]) -> None:
        """Record the time of the events' tokens."""
        paid = 0
        for event in events:
            alive = self._alive[event.request_id]
            if generated := len(event.token_ids):
                alive.outcome.token_times.extend([self._now] * generated)
                paid += alive.owed.generated(generated)
            if event.finish_reason is not None:
                paid += alive.owed.tokens
                del self._alive[event.request_id]
        self._paid.append((self._now, paid))
