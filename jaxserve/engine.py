"""The engine: requests go in, an iteration at a time is planned, launched and completed, events come out.

One thread owns the loop and never awaits; callers on other threads leave their calls in a mailbox and get whole
iterations back (one call of a sink with all of its requests' events), never single tokens.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

from jaxserve import batch, startup, streaming
from jaxserve.completion import Completion, Delta
from jaxserve.config import EngineConfig
from jaxserve.iteration import IterationPlan
from jaxserve.models.schema import ModelConfig
from jaxserve.observe import IterationRecord, Load, compilations
from jaxserve.request import FinishReason, InvalidRequest, QueueFull, Request, TokenEvent
from jaxserve.request_state import check_fits
from jaxserve.stage import Progress
from jaxserve.streaming import Sink
from jaxserve.timeline import Timeline
from jaxserve.tokenizer import Tokenizer

_log = logging.getLogger(__name__)


class EngineStopped(RuntimeError):
    """The engine has been stopped, or has failed, and takes no more requests."""


class _Timed(NamedTuple):
    """Host times of a plan on its way through the device."""

    waiting: int
    schedule_s: float
    pack_s: float
    launch_s: float


class Engine:
    """A model, compiled and ready, and the loop that serves requests with it.

    Make one with `from_checkpoint` or `from_params`; `start` it (or use it in a `with` block) to have its thread run
    the loop, or call `step` yourself.
    """

    def __init__(self, config: EngineConfig, started: startup.Started, tokenizer: Tokenizer | None) -> None:
        self.config = config
        self.report = started.report
        self.tokenizer = tokenizer
        self.model_config: ModelConfig = started.pipeline.model.config
        self.max_context = started.report.max_context
        self._scheduler = started.scheduler
        self._pipeline = started.pipeline
        self._timed: deque[_Timed] = deque()
        self._recorders: list[Callable[[IterationRecord], None]] = []
        self._sinks: dict[str, Sink] = {}
        self._mail: deque[Callable[[], None]] = deque()
        self._mailed_requests = self._mailed_tokens = 0
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._failure: BaseException | None = None
        self._iterations = self._prompt_tokens = self._generated_tokens = self._cached_tokens = 0
        self._host_seconds = self._bucket_seconds = self._padding_seconds = 0.0
        self._bucket_cost = {cost.size: cost.milliseconds / 1000 for cost in self.report.buckets}
        self._compiled_after_ready = 0

    @classmethod
    def from_checkpoint(
        cls, path: str | Path, config: EngineConfig | None = None, *, progress: Progress = startup.silent
    ) -> Self:
        """Loads a checkpoint directory (Hugging Face, or written by `jaxserve convert`) and compiles everything.

        Raises:
          CheckpointError: the checkpoint cannot be served; the message names file and tensor.
          ValueError: a setting does not fit the model or the device.
        """
        config = config or EngineConfig()
        started, tokenizer = startup.from_checkpoint(path, config, progress)
        return cls(config, started, tokenizer)

    @classmethod
    def from_params(
        cls,
        model_config: ModelConfig,
        params: Any,
        config: EngineConfig | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        progress: Progress = startup.silent,
    ) -> Self:
        """An engine on weights that are already in memory (the tree that `models.build(model_config).init` returns).

        Raises:
          ValueError: a setting does not fit the model or the device, or the tree is not the model's.
        """
        config = config or EngineConfig()
        return cls(config, startup.from_params(model_config, params, config, progress), tokenizer)

    # The loop

    def step(self) -> bool:
        """One turn: takes the mail, launches as far ahead as it may, completes the oldest iteration.

        Returns:
          Whether there was anything to do.
        """
        compiled = compilations()
        self._take_mail()
        while self._pipeline.has_room and (plan := self._plan()) is not None:
            self._launch(plan)
        if not self._pipeline.in_flight:
            self._publish(self._scheduler.take_held())
            return False
        started = time.perf_counter()
        plan, result = self._pipeline.wait()
        landed = time.perf_counter()
        events = self._scheduler.complete(plan, result)
        self._publish(events)
        self._record(plan, landed - started, time.perf_counter() - landed)
        self._compiled_after_ready += compilations() - compiled
        return True

    def _plan(self) -> IterationPlan | None:
        self._schedule_started = time.perf_counter()
        return self._scheduler.schedule()

    def _launch(self, plan: IterationPlan) -> None:
        scheduled = time.perf_counter()
        packed = batch.pack(plan, self._pipeline.shape.layout(plan.bucket), self._scheduler.pool.n_blocks)
        ready = time.perf_counter()
        self._pipeline.launch(plan, packed)
        self._cached_tokens += self.report.block_size * sum(len(a.blocks) for a in plan.admissions)
        self._timed.append(
            _Timed(
                self._scheduler.num_waiting,
                scheduled - self._schedule_started,
                ready - scheduled,
                time.perf_counter() - ready,
            )
        )

    def _publish(self, events: Iterable[TokenEvent]) -> None:
        by_sink: dict[Sink, list[TokenEvent]] = {}
        for event in events:
            sink = self._sinks.get(event.request_id)
            if sink is None:
                continue
            by_sink.setdefault(sink, []).append(event)
            self._generated_tokens += len(event.token_ids)
            if event.finish_reason is not None:
                del self._sinks[event.request_id]
        for sink, theirs in by_sink.items():
            try:
                sink(theirs)
            except Exception:
                _log.exception("a caller's sink failed; the other callers are served on")

    def _record(self, plan: IterationPlan, wait_s: float, complete_s: float) -> None:
        timed = self._timed.popleft()
        decodes = sum(1 for chunk in plan.chunks if chunk.length == 1 and chunk.samples)
        self._iterations += 1
        self._prompt_tokens += plan.num_tokens - decodes
        cost = self._bucket_cost[plan.bucket]
        self._host_seconds += timed.schedule_s + timed.pack_s + timed.launch_s + complete_s
        self._bucket_seconds += cost
        self._padding_seconds += cost * (plan.bucket - plan.num_tokens) / plan.bucket
        if self._recorders:
            record = IterationRecord(
                sequence=plan.sequence,
                bucket=plan.bucket,
                num_tokens=plan.num_tokens,
                decodes=decodes,
                prompt_tokens=plan.num_tokens - decodes,
                waiting=timed.waiting,
                schedule_s=timed.schedule_s,
                pack_s=timed.pack_s,
                launch_s=timed.launch_s,
                wait_s=wait_s,
                complete_s=complete_s,
                finished_at=time.monotonic(),
            )
            for recorder in self._recorders:
                recorder(record)

    def _take_mail(self) -> None:
        with self._changed:
            while self._mail:
                self._mail.popleft()()
            self._mailed_requests = self._mailed_tokens = 0

    def _run(self) -> None:
        try:
            while not self._stopping:
                if not self.step():
                    with self._changed:
                        self._changed.wait_for(lambda: self._mail or self._stopping)
        except BaseException as failure:
            _log.exception("the engine failed; every request is ended")
            self._failure = failure
            self._end_all(FinishReason.ERROR, f"the engine failed: {failure}")
        else:
            self._end_all(FinishReason.ABORTED, "the engine was stopped")

    def _end_all(self, reason: FinishReason, error: str) -> None:
        with self._changed:
            self._stopping = True
            while self._mail:
                self._mail.popleft()()
        self._publish([TokenEvent(request_id, finish_reason=reason, error=error) for request_id in list(self._sinks)])

    # What callers use, from any thread

    def start(self) -> None:
        """Starts the engine's thread, unless it runs already."""
        with self._changed:
            if self._thread is None and not self._stopping:
                self._thread = threading.Thread(target=self._run, name="jaxserve-engine", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """Ends every request (FinishReason.ABORTED) and the thread. The engine cannot be started again."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread is None:
            self._end_all(FinishReason.ABORTED, "the engine was stopped")
        elif self._thread is not threading.current_thread():
            self._thread.join()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def is_healthy(self) -> bool:
        """Whether requests are being served: the thread runs and has not failed."""
        return self._failure is None and not self._stopping and self._thread is not None and self._thread.is_alive()

    def submit(self, request: Request, sink: Sink) -> None:
        """Hands a request in. Its events come to `sink`, called on the engine's thread once an iteration with all of
        the events for requests that share the sink; the last event of a request has a finish_reason.

        Raises:
          InvalidRequest: it can never be served; the message names the field.
          QueueFull: too many requests or tokens wait already.
          EngineStopped: the engine was stopped or has failed.
        """
        self.check(request)
        with self._changed:
            if self._stopping:
                raise EngineStopped(
                    "the engine takes no more requests" if self._failure is None else "the engine has failed"
                )
            if request.request_id in self._sinks:
                raise InvalidRequest("request_id", f"is {request.request_id!r}, which names a request that is alive")
            requests = self._scheduler.num_waiting + self._mailed_requests
            tokens = self._scheduler.waiting_tokens + self._mailed_tokens
            if requests + 1 > self.config.max_queued_requests:
                raise QueueFull(f"{requests} requests are waiting, as many as may (max_queued_requests)")
            if tokens + len(request.prompt) > self.config.max_queued_tokens and requests:
                most, new = self.config.max_queued_tokens, len(request.prompt)
                raise QueueFull(f"{tokens} tokens are waiting; {new} more are over max_queued_tokens ({most})")
            self._mailed_requests += 1
            self._mailed_tokens += len(request.prompt)
            self._sinks[request.request_id] = sink
            self._post(partial(self._admit, request))

    def _admit(self, request: Request) -> None:
        try:
            self._scheduler.submit(request)
        except ValueError as refusal:
            self._publish([TokenEvent(request.request_id, finish_reason=FinishReason.ERROR, error=str(refusal))])

    def check(self, request: Request) -> None:
        """Raises InvalidRequest, naming the field, for a request that this engine can never serve."""
        vocab_size = self.model_config.vocab_size
        check_fits(request, self.max_context, self.report.slots)
        for field, tokens in (
            ("prompt_token_ids", request.prompt),
            ("stop_token_ids", request.sampling.stop_token_ids),
            ("logit_bias", [token for token, _ in request.sampling.logit_bias]),
        ):
            if tokens and (min(tokens) < 0 or max(tokens) >= vocab_size):
                wrong = next(token for token in tokens if not 0 <= token < vocab_size)
                raise InvalidRequest(field, f"has token id {wrong}; the vocabulary has ids 0 to {vocab_size - 1}")
        if request.sampling.prompt_logprobs is not None and not self.config.scoring:
            raise InvalidRequest("prompt_logprobs", "is not served: the engine was started without prompt scoring")
        if request.sampling.stop and self.tokenizer is None:
            raise InvalidRequest("stop", "needs a tokenizer, and this checkpoint has none; use stop_token_ids")

    def abort(self, request_id: str) -> None:
        """Ends a request within one iteration and gives its slots back; its last event says ABORTED. A request that
        is not alive is left alone."""
        with self._changed:
            if request_id in self._sinks:
                self._post(partial(self._abort, request_id))

    def _abort(self, request_id: str) -> None:
        event = self._scheduler.abort(request_id)
        if event is not None:
            self._publish([event])

    def update_params(self, params: Any) -> None:
        """Replaces the weights by others of the same shapes and forgets cached prefixes. Blocks until it is done.

        Raises:
          ValueError: the tree or a shape differs.
          RuntimeError: requests are alive; their answers would belong to neither set of weights.
        """
        model, dtype = self._pipeline.model, self._pipeline.shape.attention.dtype
        startup.check_tree(model.unpadded.shapes(dtype), params, int8=self.config.quantize == "int8")
        done = threading.Event()
        refused: list[str] = []

        def swap() -> None:
            if self._sinks or self._pipeline.in_flight:
                refused.append(f"{len(self._sinks)} requests are alive; wait for them or abort them first")
            else:
                self._pipeline.replace_params(params)
                self._scheduler.flush_prefix_cache()
            done.set()

        with self._changed:
            self._post(swap)
        if self._thread is None:
            self._take_mail()
        done.wait()
        if refused:
            raise RuntimeError(refused[0])

    def _post(self, call: Callable[[], None]) -> None:
        self._mail.append(call)
        self._changed.notify_all()

    def load(self) -> Load:
        """How busy the engine is. Cheap."""
        scheduler, pool = self._scheduler, self._scheduler.pool
        return Load(
            running=scheduler.num_running,
            waiting=scheduler.num_waiting + self._mailed_requests,
            waiting_tokens=scheduler.waiting_tokens + self._mailed_tokens,
            slots_used=pool.slots_used,
            slots_cached=pool.num_cached * pool.block_size,
            slots_total=pool.n_slots,
            iterations=self._iterations,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            cached_tokens=self._cached_tokens,
            preemptions=scheduler.preemptions,
            host_seconds=self._host_seconds,
            bucket_seconds=self._bucket_seconds,
            padding_seconds=self._padding_seconds,
            compiled_after_ready=self._compiled_after_ready,
        )

    def record(self, recorder: Callable[[IterationRecord], None]) -> None:
        """Has `recorder` called on the engine's thread after every iteration."""
        self._recorders.append(recorder)

    def timeline(self) -> Timeline:
        """What each stage does, watched in a `with` block, and a trace of it afterwards."""
        return Timeline(self._pipeline)

    def generate(self, prompts: Sequence[str | Sequence[int]], **sampling: Any) -> list[Completion]:
        """Generates for every prompt (text or token ids) and waits for all of them.

        Args:
          sampling: fields of SamplingParams, the same for every prompt; a seed is drawn for each where none is given.

        Raises:
          InvalidRequest: before anything is generated, naming the field.
        """
        return streaming.generate(self, prompts, sampling)

    def stream(self, prompt: str | Sequence[int], **sampling: Any) -> AsyncIterator[Delta]:
        """Generates for one prompt, an item an iteration. Leaving the loop early ends the request."""
        return streaming.stream(self, prompt, sampling)
