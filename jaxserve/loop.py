"""A replica: the whole model on devices of its own, and the loop that serves requests with it.

One thread owns the loop and never awaits; callers on other threads leave their calls in a mailbox and get whole
iterations back (one call of a sink with all of its requests' events), never single tokens.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from jaxserve.errors import EngineStopped
from jaxserve.generation.streaming import Sink
from jaxserve.iteration import IterationPlan
from jaxserve.request import FinishReason, Request, TokenEvent
from jaxserve.runner import batch
from jaxserve.runner.compilations import compilations
from jaxserve.runner.pipeline import Pipeline
from jaxserve.scheduler.buckets import BucketCost
from jaxserve.scheduler.routing import OutstandingTokens
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.stats import IterationRecord, Load
from jaxserve.structured_output.masks import GrammarMasks
from jaxserve.structured_output.matcher import Compiled

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Alive:
    """A request from its submission to its last event.

    Attributes:
      started: monotonic seconds at which it was first given a row, until that has been told.
    """

    sink: Sink
    owed: OutstandingTokens
    started: float | None = None


class _Timed(NamedTuple):
    """Host times of a plan on its way through the device, and what its bucket was measured to take there."""

    cost_s: float
    waiting: int
    schedule_s: float
    pack_s: float
    launch_s: float

    def longer(self, seconds: float) -> _Timed:
        """With so much more for the launch."""
        return self._replace(launch_s=self.launch_s + seconds)


class Replica:
    """A compiled model, and the loop that plans, launches and completes an iteration at a time."""

    def __init__(self, index: int, pipeline: Pipeline, scheduler: Scheduler, costs: Iterable[BucketCost]) -> None:
        """Args:
        index: its place among the engine's replicas.
        costs: of the buckets, as measured.
        """
        self.index = index
        self.pipeline = pipeline
        self.scheduler = scheduler
        self.recorders: list[Callable[[IterationRecord], None]] = []
        self._masks = GrammarMasks(alike=pipeline.spans_hosts)
        self._awaited: IterationPlan | None = None  # the newest plan, while the choice of its tokens waits for masks
        self._timed: deque[_Timed] = deque()
        self._alive: dict[str, _Alive] = {}
        self._owed_tokens = 0
        self._mail: deque[Callable[[], None]] = deque()
        self._mailed_requests = self._mailed_tokens = self._mailed_owed = 0
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._failure: BaseException | None = None
        self._iterations = self._prompt_tokens = self._generated_tokens = self._cached_tokens = 0
        self._host_seconds = self._bucket_seconds = self._padding_seconds = 0.0
        self._bucket_cost = {cost.size: cost.milliseconds / 1000 for cost in costs}
        self._compiled_after_ready = 0

    # The loop

    def step(self) -> bool:
        """One turn: takes the mail, launches as far ahead as it may, completes the oldest iteration.

        Returns:
          Whether there was anything to do.
        """
        compiled = compilations()
        self._take_mail()
        while self._answer() and self.pipeline.has_room and (plan := self._plan()) is not None:
            self._launch(plan)
        if not self.pipeline.in_flight:
            return False
        self._complete()
        self._compiled_after_ready += compilations() - compiled
        return True

    def _plan(self) -> IterationPlan | None:
        self._schedule_started = time.perf_counter()
        return self.scheduler.schedule()

    def _launch(self, plan: IterationPlan) -> None:
        scheduled = time.perf_counter()
        packed = batch.pack(plan, self.pipeline.shape.layout(plan.bucket), self.scheduler.pool.n_blocks)
        ready = time.perf_counter()
        if self._masks.launched(plan):
            self._awaited = plan
            self.pipeline.launch(plan, packed, answer=False)
        else:
            self.pipeline.launch(plan, packed)
        if plan.admissions:
            starts = {chunk.row: chunk.start for chunk in plan.chunks}
            self._cached_tokens += sum(starts[admission.row] for admission in plan.admissions)
        for admission in plan.admissions:
            alive = self._alive.get(admission.request_id)
            if alive is not None and alive.owed.prompt and alive.started is None:
                alive.started = time.monotonic()
        self._timed.append(
            _Timed(
                self._bucket_cost[plan.bucket],
                self.scheduler.num_waiting,
                scheduled - self._schedule_started,
                ready - scheduled,
                time.perf_counter() - ready,
            )
        )

    def _answer(self) -> bool:
        """Has the tokens of the newest plan chosen if that waits for masks; whether another plan may be launched."""
        plan = self._awaited
        if plan is None:
            return True
        if not self._masks.is_known:
            return False
        late = self._masks.wait(lambda missing: missing < len(self._alive) and self.pipeline.is_idle)
        started = time.perf_counter()
        if late:
            self.scheduler.withdraw(late)
        self.pipeline.answer(self._masks.fill(*self.pipeline.mask_shape(plan)))
        self._awaited = None
        self._timed[-1] = self._timed[-1].longer(time.perf_counter() - started)
        return True

    def _complete(self) -> None:
        if not self.pipeline.has_answers:
            self._answer()
        started = time.perf_counter()
        plan, result = self.pipeline.wait()
        landed = time.perf_counter()
        events = self.scheduler.complete(plan, self._masks.landed(plan, result))
        self._publish(events)
        self._record(plan, landed - started, time.perf_counter() - landed)

    def _publish(self, events: Iterable[TokenEvent]) -> None:
        by_sink: dict[Sink, list[TokenEvent]] = {}
        for event in events:
            alive = self._alive.get(event.request_id)
            if alive is None:
                continue
            if alive.started is not None:
                event, alive.started = event._replace(started=alive.started), None
            by_sink.setdefault(alive.sink, []).append(event)
            if generated := len(event.token_ids):
                self._generated_tokens += generated
                self._owed_tokens -= alive.owed.generated(generated)
            if event.finish_reason is not None:
                self._owed_tokens -= alive.owed.tokens
                del self._alive[event.request_id]
                if self._masks.end(event.request_id):
                    self.pipeline.release(event.request_id)
        for sink, theirs in by_sink.items():
            try:
                sink(theirs)
            except Exception:
                _log.exception("a caller's sink failed; the other callers are served on")

    def _record(self, plan: IterationPlan, wait_s: float, complete_s: float) -> None:
        timed = self._timed.popleft()
        num_tokens, decodes, drafted = plan.num_tokens, plan.num_decodes, len(plan.drafts)
        self._iterations += 1
        self._prompt_tokens += num_tokens - decodes - drafted
        cost = timed.cost_s
        self._host_seconds += timed.schedule_s + timed.pack_s + timed.launch_s + complete_s
        self._bucket_seconds += cost
        self._padding_seconds += cost * (plan.bucket - num_tokens) / plan.bucket
        if self.recorders:
            record = IterationRecord(
                replica=self.index,
                plan=plan,
                decodes=decodes,
                prompt_tokens=num_tokens - decodes - drafted,
                waiting=timed.waiting,
                schedule_s=timed.schedule_s,
                pack_s=timed.pack_s,
                launch_s=timed.launch_s,
                wait_s=wait_s,
                complete_s=complete_s,
                finished_at=time.monotonic(),
            )
            for recorder in self.recorders:
                recorder(record)

    def _take_mail(self) -> None:
        with self._changed:
            mail, self._mail = self._mail, deque()
        for call in mail:  # without the lock: a sink may submit
            call()

    def _run(self) -> None:
        try:
            while not self._stopping:
                if not self.step():
                    with self._changed:
                        self._changed.wait_for(lambda: self._mail or self._stopping)
        except BaseException as failure:
            _log.exception("replica %d failed; every request of it is ended", self.index)
            self._failure = failure
            self._end_all(FinishReason.ERROR, f"the engine failed: {failure}")
        else:
            self._end_all(FinishReason.ABORTED, "the engine was stopped")

    def _end_all(self, reason: FinishReason, error: str) -> None:
        with self._changed:
            self._stopping = True
        self._take_mail()
        self._publish([TokenEvent(request_id, finish_reason=reason, error=error) for request_id in list(self._alive)])

    # What is called from any thread

    def start(self) -> None:
        """Starts the loop's thread, unless it runs already."""
        with self._changed:
            if self._thread is None and not self._stopping:
                name = f"jaxserve-replica-{self.index}"
                self._thread = threading.Thread(target=self._run, name=name, daemon=True)
                self._thread.start()

    def ask_to_stop(self) -> None:
        """Has every request end (FinishReason.ABORTED) and the thread; `join` waits until they have."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def join(self) -> None:
        """Waits for what `ask_to_stop` asked for."""
        if self._thread is None:
            self._end_all(FinishReason.ABORTED, "the engine was stopped")
        elif self._thread is not threading.current_thread():
            self._thread.join()

    @property
    def takes_requests(self) -> bool:
        """Whether it was neither stopped nor has failed."""
        return not self._stopping

    @property
    def is_healthy(self) -> bool:
        """Whether requests are being served: the thread runs and has not failed."""
        if self._failure is not None or self.pipeline.problem is not None:
            return False
        return not self._stopping and self._thread is not None and self._thread.is_alive()

    @property
    def outstanding_tokens(self) -> int:
        """Tokens that the live requests may still have computed: prompts that are not in the prefix cache, and what
        they may generate."""
        return self._owed_tokens + self._mailed_owed

    def submit(self, request: Request, sink: Sink, *, cached: int, grammar: Compiled | None = None) -> None:
        """Hands a request in (see `Engine.submit`).

        Args:
          cached: tokens of its prompt that the prefix cache is known to hold.
          grammar: its own, where it has one.

        Raises:
          EngineStopped: the loop has ended.
        """
        with self._changed:
            if self._stopping:
                raise EngineStopped(
                    "the engine takes no more requests" if self._failure is None else "the engine has failed"
                )
            owed = OutstandingTokens(len(request.prompt) - cached, request.sampling.max_tokens)
            self._alive[request.request_id] = _Alive(sink, owed)
            self._mailed_requests += 1
            self._mailed_tokens += len(request.prompt)
            self._mailed_owed += owed.tokens
            self._post(partial(self._admit, request, owed.tokens, grammar))

    def _admit(self, request: Request, owed: int, grammar: Compiled | None) -> None:
        with self._changed:
            self._mailed_requests -= 1
            self._mailed_tokens -= len(request.prompt)
            self._mailed_owed -= owed
        self._owed_tokens += owed
        if grammar is not None:
            self._masks.begin(request.request_id, request.sampling, grammar)
            self.pipeline.hold(request)
        try:
            self.scheduler.submit(request)
        except ValueError as refusal:
            self._publish([TokenEvent(request.request_id, finish_reason=FinishReason.ERROR, error=str(refusal))])

    def holds(self, request_id: str) -> bool:
        """Whether a request of that name is alive here."""
        return request_id in self._alive

    def abort(self, request_id: str) -> None:
        """Ends a request within one iteration, if it is alive here."""
        with self._changed:
            if request_id in self._alive:
                self._post(partial(self._abort, request_id))

    def _abort(self, request_id: str) -> None:
        self._publish(self.scheduler.abort(request_id))

    @property
    def num_alive(self) -> int:
        """Requests that have not ended."""
        return len(self._alive)

    def replace_params(self, params: Any) -> None:
        """Takes other weights of the same shapes and forgets cached prefixes. Blocks until it is done; no request may
        be alive.

        Raises:
          EngineStopped: the loop has ended.
        """
        done: Future[None] = Future()

        def swap() -> None:
            while self.pipeline.in_flight:  # what a stop found late left under way
                self._complete()
            self.pipeline.replace_params(params)
            self.scheduler.flush_prefix_cache()

        def answer() -> None:
            try:
                done.set_result(swap())
            except Exception as problem:
                done.set_exception(problem)

        with self._changed:
            if self._stopping:
                raise EngineStopped("the engine takes no more weights")
            self._post(answer)
        if self._thread is None:
            self._take_mail()
        done.result()

    def _post(self, call: Callable[[], None]) -> None:
        self._mail.append(call)
        self._changed.notify_all()

    @property
    def num_waiting(self) -> int:
        """Requests without a row, those in the mail included."""
        return self.scheduler.num_waiting + self._mailed_requests

    @property
    def waiting_tokens(self) -> int:
        """Tokens of the requests without a row."""
        return self.scheduler.waiting_tokens + self._mailed_tokens

    def load(self) -> Load:
        """How busy the replica is. Cheap."""
        scheduler, pool = self.scheduler, self.scheduler.pool
        oldest = next(iter(self._timed.copy()), None)
        return Load(
            running=scheduler.num_running,
            waiting=self.num_waiting,
            waiting_tokens=self.waiting_tokens,
            outstanding_tokens=self.outstanding_tokens,
            slots_used=pool.slots_used,
            slots_cached=pool.slots_cached,
            slots_total=pool.n_slots,
            iterations=self._iterations,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            cached_tokens=self._cached_tokens,
            preemptions=scheduler.preemptions,
            drafted_tokens=scheduler.drafted_tokens,
            accepted_tokens=scheduler.accepted_tokens,
            host_seconds=self._host_seconds,
            bucket_seconds=self._bucket_seconds,
            padding_seconds=self._padding_seconds,
            compiled_after_ready=self._compiled_after_ready,
            due_seconds=0.0 if oldest is None else oldest.cost_s,
        )
