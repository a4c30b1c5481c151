"""The engine loop: plans, launches and completes the iterations of one model replica.

One thread owns the loop and never awaits. Other threads leave calls in its inbox. The loop hands each caller's sink
whole iterations: one call with the events of all its requests, never single tokens.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial
from typing import Any

from jaxserve.errors import EngineStopped, InvalidRequest
from jaxserve.inbox import Inbox
from jaxserve.iteration import IterationPlan
from jaxserve.request import FinishReason, Request, Sink, TokenEvent
from jaxserve.runner import batch
from jaxserve.runner.compilations import compilations
from jaxserve.runner.host_blocks import HostBlocks
from jaxserve.runner.pipeline import Pipeline
from jaxserve.scheduler.block_allocation import BlockAllocation
from jaxserve.scheduler.buckets import BucketCost
from jaxserve.scheduler.routing import OutstandingTokens
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.scheduler.state import Caller, RequestState, StateEvent
from jaxserve.stats import IterationStats, Load
from jaxserve.structured_output.matcher import CompiledGrammar

_log = logging.getLogger(__name__)


class EngineLoop:
    """One replica: a compiled model on its devices, its scheduler, and the thread for both."""

    def __init__(
        self,
        index: int,
        pipeline: Pipeline,
        scheduler: Scheduler,
        costs: Iterable[BucketCost],
        host: HostBlocks | None = None,
    ) -> None:
        """Args:
        index: its place among the engine's replicas.
        costs: of the buckets, as measured.
        host: the blocks in host memory, if the scheduler's pool has a host cache.
        """
        self.index = index
        self.pipeline = pipeline
        self.scheduler = scheduler
        self.stats = IterationStats(index, costs)
        self._host = host
        self._inbox = Inbox()
        self._live = scheduler.requests.live
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        # Callers count what they submit, the loop what it has taken in and done: neither waits for the other.
        self._submitted_requests = self._submitted_tokens = self._submitted_work = 0
        self._received_requests = self._received_tokens = self._done_work = 0
        self._submitted_prompts = self._done_prompts = 0  # uncached tokens
        pipeline.connect(scheduler)

    # The loop

    def step(self) -> bool:
        """One turn: drain the inbox, launch ahead, complete the oldest iteration, emit its events.

        Returns:
          Whether there was anything to do.
        """
        compiled = compilations()
        self._inbox.drain()
        self._land_loads()
        while self.pipeline.can_launch() and self._launch_next():
            pass
        if self.pipeline.in_flight:
            self._complete_oldest()
        elif not self._land_loads(wait=True):
            return False
        self.stats.compiled_after_ready += compilations() - compiled
        return True

    def _launch_next(self) -> bool:
        """Schedules, packs and launches an iteration; False if one in flight must complete first."""
        started = time.perf_counter()
        plan = self.scheduler.schedule()
        if self._host is not None and (copies := self.scheduler.fetches.take_copies()) is not None:
            self._host.start(copies)
        if plan is None:
            return False
        scheduled = time.perf_counter()
        packed = batch.pack(plan, self.pipeline.shape.layout(plan.bucket), self.scheduler.pool.n_blocks)
        packed_at = time.perf_counter()
        self.pipeline.launch(plan, packed)
        self._note_starts(plan)
        self.stats.launched(
            plan,
            waiting=self.scheduler.num_waiting,
            schedule_s=scheduled - started,
            pack_s=packed_at - scheduled,
            launch_s=time.perf_counter() - packed_at,
        )
        return True

    def _complete_oldest(self) -> None:
        started = time.perf_counter()
        plan, result = self.pipeline.wait()
        landed = time.perf_counter()
        self._emit(self.scheduler.complete(plan, result))
        self.stats.completed(plan, wait_s=landed - started, complete_s=time.perf_counter() - landed)

    def _land_loads(self, *, wait: bool = False) -> bool:
        """Tell the scheduler of blocks that have come back from the host; whether there were any.

        Args:
          wait: wait for the oldest, if some are on their way.
        """
        if self._host is None:
            return False
        landed = self._host.landed(wait=wait)
        for load, intact in landed:
            self.scheduler.fetches.landed(load, intact=intact)
        return bool(landed)

    def _note_starts(self, plan: IterationPlan) -> None:
        """Remember when requests first get a row."""
        for admission in plan.admissions:
            caller = self._live[admission.request_id].caller
            assert caller is not None
            if caller.outstanding.prompt and caller.started is None:
                caller.started = time.monotonic()

    def _emit(self, events: Iterable[StateEvent]) -> None:
        """Hand each sink its events."""
        by_sink: dict[Sink, list[TokenEvent]] = {}
        for state, event in events:
            caller = state.caller
            assert caller is not None
            if caller.started is not None:
                event, caller.started = event._replace(started=caller.started), None
            by_sink.setdefault(caller.sink, []).append(event)
            if event.token_ids or event.finish_reason is not None:
                self._done_prompts += caller.outstanding.prompt  # 0 after the first token
            if generated := len(event.token_ids):
                self.stats.generated_tokens += generated
                self._done_work += caller.outstanding.generated(generated)
            if event.finish_reason is not None:
                self._done_work += caller.outstanding.tokens
                self.pipeline.remove_grammar(event.request_id)
        for sink, theirs in by_sink.items():
            try:
                sink(theirs)
            except Exception:
                _log.exception("a caller's sink failed; the other callers are served on")

    def _run(self) -> None:
        try:
            while not self._inbox.is_closed:
                if not self.step():
                    self._inbox.wait()
        except BaseException as failure:
            _log.exception("replica %d failed; all of its requests end", self.index)
            self._failure = failure
            self._end_all(FinishReason.ERROR, f"the engine failed: {failure}")
        else:
            self._end_all(FinishReason.ABORTED, "the engine was stopped")

    def _end_all(self, reason: FinishReason, error: str) -> None:
        self._inbox.close()
        self._inbox.drain()
        ended = [(state, TokenEvent(name, finish_reason=reason, error=error)) for name, state in self._live.items()]
        self._live.clear()
        self._emit(ended)

    # Calls from other threads

    def submit(
        self,
        request: Request,
        sink: Sink,
        *,
        cached: int,
        allocation: BlockAllocation | None = None,
        grammar: CompiledGrammar | None = None,
    ) -> None:
        """Hand a request in (see `Engine.submit`).

        Args:
          cached: prompt tokens that the prefix cache is known to hold.
          allocation: a result of `state.allocation_of`, if the request's prompt was looked up.
          grammar: its grammar, if it has one.

        Raises:
          EngineStopped: the loop has ended.
        """
        outstanding = OutstandingTokens(len(request.prompt) - cached, request.sampling.max_tokens)
        caller = Caller(sink, outstanding)
        state = RequestState.of(request, self.scheduler.eos_token_ids, allocation, caller)
        with self._inbox.changed:  # the loop waits for it, so long prompts are not copied in here
            if self._inbox.is_closed:
                raise EngineStopped(
                    "the engine takes no more requests" if self._failure is None else "the engine has failed"
                )
            self.scheduler.requests.register(state)
            self._submitted_requests += 1
            self._submitted_tokens += len(request.prompt)
            self._submitted_prompts += outstanding.prompt
            self._submitted_work += outstanding.tokens
            self._inbox.post(partial(self._receive, state, grammar))

    def _receive(self, state: RequestState, grammar: CompiledGrammar | None) -> None:
        request = state.request
        self._received_requests += 1
        self._received_tokens += len(request.prompt)
        if grammar is not None:
            self.pipeline.add_grammar(request.request_id, request.sampling, grammar)
        try:
            self.scheduler.enqueue(state)
        except InvalidRequest as error:
            self._emit([(state, TokenEvent(request.request_id, finish_reason=FinishReason.ERROR, error=str(error)))])

    def abort(self, request_id: str) -> None:
        """End a request within one iteration, if it is live here."""
        if self.holds(request_id):
            self._inbox.post(lambda: self._emit(self.scheduler.abort(request_id)))

    def holds(self, request_id: str) -> bool:
        """Whether a request with this id is live here."""
        return request_id in self._live

    def replace_params(self, params: Any) -> None:
        """Take other weights of the same shapes and forget cached prefixes.

        Blocks until it is done. No request may be live.

        Raises:
          EngineStopped: the loop has ended.
        """

        def replace() -> None:
            while self.pipeline.in_flight:  # a request that ended early may have left some
                self._complete_oldest()
            self.pipeline.replace_params(params)
            self.scheduler.flush_prefix_cache()

        done: Future[None] = Future()
        with self._inbox.changed:
            if self._inbox.is_closed:
                raise EngineStopped("the engine takes no more weights")
            self._inbox.post(partial(_settle, done, replace))
        if self._thread is None:
            self._inbox.drain()
        done.result()

    def start(self) -> None:
        """Start the loop's thread, unless it runs already."""
        with self._inbox.changed:
            if self._thread is None and not self._inbox.is_closed:
                name = f"jaxserve-loop-{self.index}"
                self._thread = threading.Thread(target=self._run, name=name, daemon=True)
                self._thread.start()

    def ask_to_stop(self) -> None:
        """End every request (FinishReason.ABORTED) and the thread. Does not wait: see `join`."""
        self._inbox.close()

    def join(self) -> None:
        """Wait until the thread has ended."""
        if self._thread is None:
            self._end_all(FinishReason.ABORTED, "the engine was stopped")
        elif self._thread is not threading.current_thread():
            self._thread.join()

    # State

    @property
    def takes_requests(self) -> bool:
        """Whether it was neither stopped nor has failed."""
        return not self._inbox.is_closed

    @property
    def is_healthy(self) -> bool:
        """Whether requests are being served: the thread runs and has not failed."""
        if self._failure is not None or self.pipeline.problem is not None:
            return False
        return self.takes_requests and self._thread is not None and self._thread.is_alive()

    @property
    def num_live(self) -> int:
        """Requests that have not ended."""
        return len(self._live)

    @property
    def num_waiting(self) -> int:
        """Requests without a row, those in the inbox included."""
        return self.scheduler.num_waiting + self._submitted_requests - self._received_requests

    @property
    def waiting_tokens(self) -> int:
        """Tokens of the requests without a row."""
        return self.scheduler.waiting_tokens + self._submitted_tokens - self._received_tokens

    @property
    def outstanding_tokens(self) -> int:
        """Most tokens that live requests still need: uncached prompts, and what they may generate."""
        return self._submitted_work - self._done_work

    def load(self) -> Load:
        """How busy the replica is. Cheap."""
        scheduler, pool, stats = self.scheduler, self.scheduler.pool, self.stats
        return Load(
            running=scheduler.requests.num_running,
            waiting=self.num_waiting,
            waiting_tokens=self.waiting_tokens,
            outstanding_tokens=self.outstanding_tokens,
            prefill_tokens=self._submitted_prompts - self._done_prompts,
            slots_used=pool.slots_used,
            slots_cached=pool.slots_cached,
            slots_total=pool.n_slots,
            iterations=stats.iterations,
            prompt_tokens=stats.prompt_tokens,
            generated_tokens=stats.generated_tokens,
            cached_tokens=stats.cached_tokens,
            preemptions=scheduler.preemptions,
            drafted_tokens=scheduler.drafted_tokens,
            accepted_tokens=scheduler.accepted_tokens,
            host_seconds=stats.host_seconds,
            bucket_seconds=stats.bucket_seconds,
            padding_seconds=stats.padding_seconds,
            compiled_after_ready=stats.compiled_after_ready,
            expected_seconds=stats.expected_seconds,
            strangers=self.pipeline.strangers,
            **({} if pool.host is None else pool.host.figures()),
        )


def _settle(done: Future[None], call: Callable[[], None]) -> None:
    """Run a call, and settle a future with its outcome."""
    try:
        done.set_result(call())
    except Exception as problem:
        done.set_exception(problem)
