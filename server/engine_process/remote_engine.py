"""The EngineClient of the front process, for an engine that runs in its own process.

It belongs to one event loop. Any thread may call what only reads (`load`, `problem`).
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from jaxserve.config import EngineConfig
from jaxserve.errors import EngineStopped, WrongState
from jaxserve.request import FinishReason, Request, TokenEvent
from jaxserve.scheduler.limits import Limits
from jaxserve.scheduler.prefix_changes import CacheCleared, PrefixChange
from jaxserve.startup_report import StartupReport
from jaxserve.stats import IterationRecord, Load, total
from jaxserve.structured_output.compiler import GrammarCompiler
from server.engine_client import EngineNotReady
from server.engine_process import messages
from server.engine_process import messages_pb2 as pb
from server.engine_process.job import EngineInfo

if TYPE_CHECKING:
    from jaxserve.text.tokenizer import Tokenizer
    from server.engine_client import Sink

_log = logging.getLogger(__name__)

_STARTING = "the engine is starting"
_MOST_TRIES = 2  # engine processes that get the same request: one that crashes them must not crash all
_IDLE = Load(**{field.name: 0 for field in dataclasses.fields(Load)})


@dataclass(slots=True, eq=False)
class _Submitted:
    """A request from its submission to its last event.

    Attributes:
      started: whether it has had an event; its caller may have seen a part of its answer.
      is_aborted: whether its caller has aborted it.
      tries: number of engine processes that it was sent to.
    """

    request: Request
    sink: Sink
    started: bool = False
    is_aborted: bool = False
    tries: int = 0


class RemoteEngine:
    """Sends requests to the current engine process, and its events to their sinks.

    It keeps the requests: if the engine process ends, those that have not started are sent to the next one.

    Args:
      config: of the engine.
      tokenizer: of the checkpoint.
      request_defaults: sampling parameters, of the checkpoint's generation_config.json.
    """

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Tokenizer | None,
        request_defaults: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.config, self.tokenizer, self.request_defaults = config, tokenizer, request_defaults
        self._info: EngineInfo | None = None
        self._grammars: GrammarCompiler | None = None
        self._problem: str | None = _STARTING
        self._returns = False
        self._send: Callable[[bytes], None] | None = None
        self._requests: dict[str, _Submitted] = {}  # by id, in the order of their submission
        self._recorders: list[Callable[[IterationRecord], None]] = []
        self._prefix_changes: list[PrefixChange] = []  # not taken yet
        self._wake: Callable[[], None] | None = None
        self._sent = 0  # requests sent to this engine process
        self._unseen: deque[Request] = deque()  # sent requests that its loads do not count yet
        self._profiles: deque[asyncio.Future[None]] = deque()  # questions that the engine process has not answered
        self._loads: tuple[Load, ...] = (_IDLE,)
        self._changes = 0  # number of changes to what `loads` is computed from
        self._counted: tuple[int, list[Load]] = (-1, [])  # `_changes` when the loads were computed, and the loads

    # The EngineClient

    @property
    def report(self) -> StartupReport:
        return self._known().report

    @property
    def model_config(self) -> EngineInfo:
        return self._known()

    @property
    def max_context(self) -> int:
        return self.limits.max_context

    @property
    def limits(self) -> Limits:
        """What `submit` does not check: the server has, when it read the request."""
        return self._known().limits

    @property
    def grammars(self) -> GrammarCompiler | None:
        """Compiled in this process too, so that wrong grammars never reach the engine process."""
        info = self._known()
        if self._grammars is None and self.tokenizer is not None:
            self._grammars = GrammarCompiler(self.tokenizer, info.vocab_size, info.eos_token_ids)
        return self._grammars

    @property
    def problem(self) -> str | None:
        return self._problem

    @property
    def takes_requests(self) -> bool:
        return self._info is not None and (self._problem is None or self._returns)

    def submit(self, request: Request, sink: Sink) -> None:
        """See `jaxserve.engine.Engine.submit`. A request waits while there is no engine process.

        The caller has checked the request (`limits`) and that the queue is not full (`server.admission`), and chosen
        an unused id.
        """
        if not self.takes_requests:
            raise EngineStopped(self._problem)
        assert request.request_id not in self._requests
        submitted = self._requests[request.request_id] = _Submitted(request, sink)
        if self._send is not None:
            self._send_request(submitted)
        self._changes += 1

    def abort(self, request_id: str) -> None:
        """See `jaxserve.engine.Engine.abort`."""
        submitted = self._requests.get(request_id)
        if submitted is None:
            return
        submitted.is_aborted = True
        if self._send is not None:
            self._send(messages.to_engine(abort=request_id))
        else:
            self._deliver([TokenEvent(request_id, finish_reason=FinishReason.ABORTED)])

    def load(self) -> Load:
        return total(self.loads())

    def loads(self) -> list[Load]:
        """The last loads of the engine process, with the requests that it had not counted yet."""
        # Computed once after each change, because every call reads it, refused ones too. Any thread may do it.
        changes, (counted, loads) = self._changes, self._counted
        if counted != changes:
            loads = self._count()
            self._counted = changes, loads
        return loads

    def _count(self) -> list[Load]:
        first, *others = self._loads
        # Copied in one step, because the event loop may change it meanwhile.
        submitted = list(self._requests.values())
        unseen = list(self._unseen) if self._send is not None else [each.request for each in submitted]
        if unseen:
            tokens = sum(len(request.prompt) for request in unseen)
            first = dataclasses.replace(
                first,
                waiting=first.waiting + len(unseen),
                waiting_tokens=first.waiting_tokens + tokens,
                prefill_tokens=first.prefill_tokens + tokens,
                outstanding_tokens=first.outstanding_tokens
                + tokens
                + sum(request.sampling.max_tokens for request in unseen),
            )
        return [first, *others]

    def record(self, recorder: Callable[[IterationRecord], None]) -> None:
        self._recorders.append(recorder)

    def follow_prefixes(self, wake: Callable[[], None]) -> Callable[[], list[PrefixChange]]:
        """See `jaxserve.engine.Engine.follow_prefixes`. The engine's job must ask for the changes."""
        self._wake = wake
        return self._take_prefix_changes

    def _take_prefix_changes(self) -> list[PrefixChange]:
        taken, self._prefix_changes = self._prefix_changes, []
        return taken

    async def profile(self, running: bool) -> None:
        """Starts or stops a profile on all hosts. Raises WrongState, RuntimeError."""
        if self._send is None:
            raise EngineNotReady(self._problem)
        answer = asyncio.get_running_loop().create_future()
        self._profiles.append(answer)
        self._send(messages.to_engine(profile=running))
        await answer

    # Called by the supervisor

    def connect(self, info: EngineInfo, send: Callable[[bytes], None]) -> None:
        """An engine process is ready. Sends it the waiting requests, in order."""
        self._info, self._send, self._problem, self._returns = info, send, None, False
        self._loads = (dataclasses.replace(_IDLE, slots_total=info.report.slots * info.report.replicas),)
        self._sent = 0
        self._unseen.clear()
        for submitted in self._requests.values():
            self._send_request(submitted)
        self._changes += 1

    def take(self, message: pb.Iterations) -> None:
        """The engine process reports iterations. Raises BadFrame."""
        report = messages.decode_iterations(message)
        while len(self._unseen) > max(0, self._sent - report.received):
            self._unseen.popleft()
        self._loads = report.loads or self._loads
        self._changes += 1
        for record in report.records:
            for recorder in self._recorders:
                recorder(record)
        self._deliver(report.events)

    def take_changes(self, changes: Iterable[PrefixChange]) -> None:
        """The engine process reports what has changed in its prefix caches."""
        if self._wake is not None:
            self._prefix_changes += changes
            self._wake()

    def take_profiled(self, message: pb.Profiled) -> None:
        """The engine process answers `profile`."""
        kind = WrongState if message.is_state else RuntimeError
        self._answer_profile(kind(message.problem) if message.problem else None)

    def _answer_profile(self, problem: Exception | None) -> None:
        answer = self._profiles.popleft()
        if answer.done():  # its caller has left
            return
        if problem is None:
            answer.set_result(None)
        else:
            answer.set_exception(problem)

    def disconnect(self, problem: str, *, returns: bool) -> None:
        """The engine process is gone.

        Args:
          problem: the error of requests that had started.
          returns: whether another will start; requests that had not started wait for it.
        """
        self._send, self._problem, self._returns = None, problem, returns
        self._unseen.clear()
        while self._profiles:
            self._answer_profile(EngineStopped(problem))
        self.take_changes([CacheCleared()])
        slots = self._info.report.slots * self._info.report.replicas if self._info is not None else 0
        self._loads = (dataclasses.replace(_IDLE, slots_total=slots),)
        self._deliver(
            TokenEvent(name, finish_reason=FinishReason.ABORTED, error=problem)
            for name, each in list(self._requests.items())
            if not returns or each.started or each.is_aborted or each.tries >= _MOST_TRIES
        )
        self._changes += 1

    def _known(self) -> EngineInfo:
        if self._info is None:
            raise EngineNotReady(self._problem)
        return self._info

    def _send_request(self, submitted: _Submitted) -> None:
        assert self._send is not None
        submitted.tries += 1
        self._sent += 1
        self._unseen.append(submitted.request)
        self._send(messages.to_engine(submit=messages.encode_request(submitted.request)))

    def _deliver(self, events: Iterable[TokenEvent]) -> None:
        by_sink: dict[Sink, list[TokenEvent]] = {}
        for event in events:
            submitted = self._requests.get(event.request_id)
            if submitted is None:
                continue
            submitted.started = True
            by_sink.setdefault(submitted.sink, []).append(event)
            if event.finish_reason is not None:
                del self._requests[event.request_id]
                self._changes += 1
        for sink, theirs in by_sink.items():
            try:
                sink(theirs)
            except Exception:
                _log.exception("a sink of events failed; other requests continue")
