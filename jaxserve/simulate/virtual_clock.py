"""Runs the real scheduler on a virtual clock, with a cost model for the device. No jax."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from jaxserve.errors import InvalidRequest
from jaxserve.iteration import IterationPlan, IterationResult
from jaxserve.request import Request, TokenEvent
from jaxserve.scheduler.host_cache import BlockLoad, HostCopies
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.scheduler.state import StateEvent, check_fits
from jaxserve.simulate.outcome import GapCounts, Outcome, TableOutcome
from jaxserve.simulate.outputs import SimulatedOutputs
from jaxserve.simulate.steady_plans import SteadyPlan
from jaxserve.simulate.steady_scheduler import SteadyScheduler
from jaxserve.simulate.workload import DrawnPrompt, Workload

EOS = 1  # the token that ends a request before its limit
_NOTHING = IterationResult(tokens=np.zeros(0, np.int32), logprobs=np.zeros(0, np.float32))  # of a plan without chunks

# Seconds of an iteration in each stage.
StageSeconds = Callable[[IterationPlan], Sequence[float]]
# Called after an iteration is planned, with the plan and the time when it will land.
Watch = Callable[[IterationPlan, float], None]


class Arrival(NamedTuple):
    """A future request.

    Attributes:
      time: seconds after the start.
      prompt: its token ids.
      output: tokens that it will generate.
      max_tokens: limit that it requests, at least `output`.
      tenant: whom it counts for.
    """

    time: float
    prompt: np.ndarray | DrawnPrompt
    output: int
    max_tokens: int
    priority: int = 0
    tenant: str = ""


class HostTimes(NamedTuple):
    """Host time of an iteration, in seconds.

    Attributes:
      launch: from the decision to plan to the launch.
      complete: from the device's result to the callers' events.
      polls: whether arrivals are admitted at once, instead of after the iteration in progress (as in the engine).
    """

    launch: float = 0.0
    complete: float = 0.0
    polls: bool = False


class SimulatedDevice:
    """A pipeline of stages, each of which runs one iteration at a time in launch order.

    Attributes:
      busy: busy seconds of each stage.
    """

    def __init__(self, seconds: StageSeconds, n_stages: int) -> None:
        self._seconds = seconds
        self._free = [0.0] * n_stages
        self.busy = [0.0] * n_stages

    def launch(self, plan: IterationPlan, now: float) -> float:
        """The time at which an iteration launched now leaves the last stage."""
        free, busy = self._free, self.busy
        for stage, seconds in enumerate(self._seconds(plan)):
            if free[stage] > now:
                now = free[stage]
            free[stage] = now = now + seconds
            busy[stage] += seconds
        return now


class SimulatedCopies:
    """The copies of one replica from its host, one after another.

    Those to the host go the other way, and nobody waits for them.

    Args:
      seconds: of a block of each cache group.
    """

    def __init__(self, seconds: Sequence[float]) -> None:
        self._seconds = seconds
        self._loading: deque[tuple[float, BlockLoad]] = deque()
        self._free = 0.0  # when the link is

    @property
    def is_loading(self) -> bool:
        """Whether copies from the host have not landed."""
        return bool(self._loading)

    @property
    def next(self) -> float:
        """When the next copy lands."""
        return self._loading[0][0]

    def start(self, copies: HostCopies, now: float) -> None:
        """Begin copies."""
        self._free = max(self._free, now)
        for load in copies.loads:
            self._free += self._seconds[load.group]
            self._loading.append((self._free, load))

    def landed(self, now: float) -> Iterator[BlockLoad]:
        """Take the copies from the host that have landed."""
        while self._loading and self._loading[0][0] <= now:
            yield self._loading.popleft()[1]


class Arrivals(Sequence[Arrival]):
    """The jobs of a workload as arrivals, each made when it is asked for."""

    def __init__(self, workload: Workload, max_tokens: int | None, max_context: int | None) -> None:
        """Take the arguments of `arrivals`."""
        self._jobs, self._max_tokens, self._max_context = workload.jobs, max_tokens, max_context

    def __len__(self) -> int:
        return len(self._jobs)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        job = self._jobs[index]
        asked, length = job.max_tokens, len(job.prompt)
        if self._max_tokens is not None:
            most = self._max_tokens if self._max_context is None else min(self._max_tokens, self._max_context - length)
            asked = max(asked, most)
        return Arrival(job.arrival, job.prompt, job.max_tokens, asked, 0, job.tenant)


def arrivals(workload: Workload, *, max_tokens: int | None = None, max_context: int | None = None) -> Arrivals:
    """Converts the jobs of a workload to arrivals.

    Args:
      max_tokens: limit that every client requests, if it is more than the client uses and fits `max_context`.
    """
    return Arrivals(workload, max_tokens, max_context)


class _SimulatedRequest(NamedTuple):
    """A request that has not ended."""

    arrival: Arrival
    outcome: Outcome | TableOutcome
    uncached: int  # prompt tokens that were outstanding at its arrival

    @property
    def last(self) -> int:
        """Position of its last token."""
        return len(self.arrival.prompt) + self.arrival.output - 1


class SimulatedReplica:
    """Simulates `jaxserve.loop.EngineLoop` with a device that computes nothing but time.

    All tokens are 0, except EOS where a request ends before its limit.

    Attributes:
      prefill_tokens: uncached prompt tokens of the requests that have no token yet.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        device: SimulatedDevice,
        *,
        in_flight: int,
        host: HostTimes | None = None,
        watch: Watch | None = None,
        copy_seconds: Sequence[float] = (),
    ) -> None:
        """
        Args:
          copy_seconds: of a block of each cache group between a device and its host, if the pool has a host cache.
          scheduler: a new scheduler. If some request ends before its limit, its end-of-sequence token must be EOS.
            With a `SteadyScheduler` outcomes are told of most tokens late.
          in_flight: largest number of iterations in flight.
        """
        self.scheduler = scheduler
        self._events: dict[str, TokenEvent] = {}  # of live requests, made once
        scheduler.outputs_of = partial(SimulatedOutputs, self._events)
        if isinstance(scheduler, SteadyScheduler):
            scheduler.last_of = lambda name: self._alive[name].last
            scheduler.advanced = self._advanced
        self._device, self._in_flight, self._host, self._watch = device, in_flight, host or HostTimes(), watch
        self._now = 0.0
        self._launched: deque[tuple[IterationPlan, float]] = deque()
        self._copies = SimulatedCopies(copy_seconds)
        self.gaps: GapCounts | None = None  # of the table that the outcomes are kept in, if they are
        self.submitted: list[Request] = []  # that the loop has not admitted yet
        self._alive: dict[str, _SimulatedRequest] = {}
        self._outstanding = self.prefill_tokens = 0
        self._settled: deque[tuple[float, int]] = deque()  # (time, tokens) that are done after the last arrival
        self._early = False  # whether some request ends before its limit
        self._results: dict[int, IterationResult] = {}
        self._last: dict[int, int] = {}  # row -> position of its request's last token

    def submit(self, request: Request, arrival: Arrival, outcome: Outcome | TableOutcome, cached: int) -> None:
        """Submit a request at its arrival time; the loop admits it at its next step.

        Args:
          cached: tokens of its prompt that are in the prefix cache.
        """
        self._now = max(self._now, arrival.time)
        self._early = self._early or not request.sampling.ignore_eos
        uncached = len(request.prompt) - cached
        self.prefill_tokens += uncached
        self._outstanding = self.outstanding_tokens(arrival.time) + uncached + request.sampling.max_tokens
        self._alive[request.request_id] = _SimulatedRequest(arrival, outcome, uncached)
        self.submitted.append(request)

    @property
    def now(self) -> float:
        """How far it has come; without live requests, when the last one ended."""
        return self._now

    @property
    def is_idle(self) -> bool:
        """Whether it has no live request."""
        return not self._alive

    def outstanding_tokens(self, now: float) -> int:
        """Outstanding tokens of the live requests, as known at this time."""
        settled, tokens = self._settled, 0
        while settled and settled[0][0] <= now:
            tokens += settled.popleft()[1]
        self._outstanding -= tokens
        return self._outstanding

    def advance(self, until: float) -> None:
        """Run the loop's steps that begin before `until`. All arrivals up to it must be submitted."""
        launched, copies, in_flight, settled = self._launched, self._copies, self._in_flight, self._settled
        launch, watch, complete = self._device.launch, self._watch, self.scheduler.complete
        has_host = self.scheduler.pool.host is not None
        schedule = self._schedule if has_host else self.scheduler.schedule
        to_launch, to_complete, polls = self._host
        gaps, counting = self.gaps, self.scheduler if isinstance(self.scheduler, SteadyScheduler) else None
        now = self._now
        while now < until:
            if self.submitted:
                self._admit_submitted()
            if has_host:
                for load in copies.landed(now):
                    self.scheduler.fetches.landed(load, intact=True)
            while len(launched) < in_flight and (plan := schedule()) is not None:
                self._now = now = now + to_launch
                landing = launch(plan, now)
                launched.append((plan, landing))
                if watch is not None:
                    watch(plan, landing)
            if not launched:
                if not copies.is_loading:
                    return
                self._now = now = max(now, copies.next)
                continue
            plan, landing = launched[0]
            if polls and len(launched) < in_flight and now < until < landing:
                return
            launched.popleft()
            self._now = now = (landing if landing > now else now) + to_complete
            tokens = 0
            if counting is not None:
                assert isinstance(plan, SteadyPlan)
                counting.now, tokens = now, plan.steady
                if tokens and gaps is not None:
                    gaps.add(now - plan.group.landed[-1], tokens)
            if events := complete(plan, self._answer(plan) if plan.chunks else _NOTHING):
                tokens += self._deliver(events)
            settled.append((now, tokens))

    def _schedule(self) -> IterationPlan | None:
        """The next plan; copies from and to the host begin before it."""
        plan = self.scheduler.schedule()
        if (copies := self.scheduler.fetches.take_copies()) is not None:
            self._copies.start(copies, self._now)
        return plan

    def _admit_submitted(self) -> None:
        for request in self.submitted:
            try:
                check_fits(request, self.scheduler.max_context, self.scheduler.pool.request_slots)
                self.scheduler.submit(request)
            except InvalidRequest as refusal:
                alive = self._alive.pop(request.request_id)
                alive.outcome.ended(str(refusal))
                self.prefill_tokens -= alive.uncached
                self._settled.append((self._now, alive.uncached + request.sampling.max_tokens))
        self.submitted.clear()

    def _answer(self, plan: IterationPlan) -> IterationResult:
        """The result that the device will return."""
        count = len(plan.chunks)
        for admission in plan.admissions:
            self._last[admission.row] = self._alive[admission.request_id].last
        if self._early:
            tokens = [EOS * (start + length >= self._last[row]) for row, start, length, _ in plan.chunks]
            if any(tokens):
                return IterationResult(tokens=np.array(tokens, np.int32), logprobs=np.zeros(count, np.float32))
        if count not in self._results:
            zeros = np.zeros(count, np.int32)
            self._results[count] = IterationResult(tokens=zeros, logprobs=zeros.astype(np.float32))
        return self._results[count]

    def _advanced(self, name: str, times: array[float]) -> None:
        self._alive[name].outcome.advance(times)

    def _deliver(self, events: Iterable[StateEvent]) -> int:
        """Record the time of the events' tokens. Returns how many tokens are no longer outstanding."""
        settled, now, alive = 0, self._now, self._alive
        for _, event in events:
            _, outcome, uncached = alive[event.request_id]
            if generated := len(event.token_ids):
                if not outcome.tokens:
                    settled += uncached
                    self.prefill_tokens -= uncached
                outcome.add(now, generated)
                settled += generated
            if event.finish_reason is not None:
                settled += alive[event.request_id].arrival.max_tokens - outcome.tokens
                outcome.ended()
                del alive[event.request_id]
                self._events.pop(event.request_id, None)
        return settled
