"""The engine as the front process has it: a stand-in for one that runs in a process of its own.

It is used on one event loop; what only reads (`load`, `problem`) may be called from any thread.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxserve.config import EngineConfig
from jaxserve.errors import EngineStopped, InvalidRequest
from jaxserve.request import FinishReason, Request, TokenEvent
from jaxserve.scheduler.limits import check_queue
from jaxserve.startup_report import StartupReport
from jaxserve.stats import IterationRecord, Load, total
from jaxserve.structured_output.matcher import Grammars
from server.engine_client import EngineNotReady
from server.engine_process import codec as plain
from server.engine_process import iterations
from server.engine_process.frames import FrameKind, json_frame
from server.engine_process.job import EngineInfo

if TYPE_CHECKING:
    from jaxserve.text.tokenizer import Tokenizer
    from server.engine_client import Sink

_log = logging.getLogger(__name__)

_STARTING = "the engine is starting"
_MOST_TRIES = 2  # engines that a request may be handed to: one that ends them all is not tried on every next one
_IDLE = Load(**{field.name: 0 for field in dataclasses.fields(Load)})


@dataclass(slots=True, eq=False)
class _Handed:
    """A request from its submission to its last event.

    Attributes:
      begun: whether it has had a row: what came of it may have gone out.
      left: whether its caller has given it up.
      tries: engine processes that it was handed to.
    """

    request: Request
    sink: Sink
    begun: bool = False
    left: bool = False
    tries: int = 0


class RemoteEngine:
    """Has the face of an engine (`server.engine_client.EngineClient`) for as many engine processes as come and go.

    Args:
      config: of the engine; what may wait is counted here.
      tokenizer: the checkpoint's.
    """

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer | None) -> None:
        self.config, self.tokenizer = config, tokenizer
        self._facts: EngineInfo | None = None
        self._grammars: Grammars | None = None
        self._problem: str | None = _STARTING
        self._returns = False
        self._send: Callable[[bytes], None] | None = None
        self._alive: dict[str, _Handed] = {}  # in the order of their submission
        self._recorders: list[Callable[[IterationRecord], None]] = []
        self._sent = 0  # requests handed to this engine process
        self._unseen: deque[Request] = deque()  # those of them that its loads do not count yet
        self._loads: tuple[Load, ...] = (_IDLE,)
        self._changes = 0  # of what `loads` is made from
        self._counted: tuple[int, list[Load]] = (-1, [])  # the loads after so many of them

    # What the door uses

    @property
    def report(self) -> StartupReport:
        return self._known().report

    @property
    def model_config(self) -> EngineInfo:
        return self._known()

    @property
    def max_context(self) -> int:
        return self._known().limits.max_context

    @property
    def grammars(self) -> Grammars | None:
        """Of this process: what cannot be compiled is refused before the engine process hears of it."""
        facts = self._known()
        if self._grammars is None and self.tokenizer is not None:
            self._grammars = Grammars(self.tokenizer, facts.vocab_size, facts.eos_token_ids)
        return self._grammars

    @property
    def is_healthy(self) -> bool:
        return self._problem is None

    @property
    def problem(self) -> str | None:
        return self._problem

    @property
    def takes_requests(self) -> bool:
        return self._facts is not None and (self._problem is None or self._returns)

    def check(self, request: Request) -> None:
        """As `jaxserve.engine.Engine.check`, but for its grammar: `grammars` is asked for that."""
        self._known().limits.check(request)

    def submit(self, request: Request, sink: Sink) -> None:
        """See `jaxserve.engine.Engine.submit`. While there is no engine process the request waits for one."""
        if not self.takes_requests:
            raise EngineStopped(self._problem)
        self.check(request)
        if request.request_id in self._alive:
            raise InvalidRequest("request_id", f"is {request.request_id!r}, which names a request that is alive")
        load = self.load()
        check_queue(self.config, request, waiting=load.waiting, waiting_tokens=load.waiting_tokens)
        handed = self._alive[request.request_id] = _Handed(request, sink)
        if self._send is not None:
            self._hand_over(handed)
        self._changes += 1

    def abort(self, request_id: str) -> None:
        """See `jaxserve.engine.Engine.abort`."""
        handed = self._alive.get(request_id)
        if handed is None:
            return
        handed.left = True
        if self._send is not None:
            self._send(json_frame(FrameKind.ABORT, request_id))
        else:
            self._deliver([TokenEvent(request_id, finish_reason=FinishReason.ABORTED)])

    def load(self) -> Load:
        return total(self.loads())

    def loads(self) -> list[Load]:
        """As the engine process told last, with what it has not counted yet."""
        # Asked for by every call, those that are refused too: counted once after a change, and by any thread.
        changes, (counted, loads) = self._changes, self._counted
        if counted != changes:
            loads = self._count()
            self._counted = changes, loads
        return loads

    def _count(self) -> list[Load]:
        first, *others = self._loads
        # Copied in one step: other threads read this.
        unseen = list(self._unseen) if self._send is not None else [each.request for each in list(self._alive.values())]
        if unseen:
            tokens = sum(len(request.prompt) for request in unseen)
            first = dataclasses.replace(
                first,
                waiting=first.waiting + len(unseen),
                waiting_tokens=first.waiting_tokens + tokens,
                outstanding_tokens=first.outstanding_tokens
                + tokens
                + sum(request.sampling.max_tokens for request in unseen),
            )
        return [first, *others]

    def record(self, recorder: Callable[[IterationRecord], None]) -> None:
        self._recorders.append(recorder)

    # What happens to the engine process

    def connect(self, facts: EngineInfo, send: Callable[[bytes], None]) -> None:
        """An engine process is ready: what waits is handed to it, in order."""
        self._facts, self._send, self._problem, self._returns = facts, send, None, False
        self._loads = (dataclasses.replace(_IDLE, slots_total=facts.report.slots * facts.report.replicas),)
        self._sent = 0
        self._unseen.clear()
        for handed in self._alive.values():
            self._hand_over(handed)
        self._changes += 1

    def take(self, body: bytes) -> None:
        """An engine process tells of iterations. Raises BadFrame."""
        told = iterations.decode(body)
        while len(self._unseen) > max(0, self._sent - told.received):
            self._unseen.popleft()
        self._loads = told.loads or self._loads
        self._changes += 1
        for record in told.records:
            for admission in record.plan.admissions:
                if (handed := self._alive.get(admission.request_id)) is not None:
                    handed.begun = True
            for recorder in self._recorders:
                recorder(record)
        self._deliver(told.events)

    def disconnect(self, problem: str, *, returns: bool) -> None:
        """The engine process is gone.

        Args:
          problem: that callers are told, whose requests had begun.
          returns: whether another will come; requests that had not begun wait for it then.
        """
        self._send, self._problem, self._returns = None, problem, returns
        self._unseen.clear()
        slots = self._facts.report.slots * self._facts.report.replicas if self._facts is not None else 0
        self._loads = (dataclasses.replace(_IDLE, slots_total=slots),)
        self._deliver(
            TokenEvent(name, finish_reason=FinishReason.ABORTED, error=problem)
            for name, handed in list(self._alive.items())
            if not returns or handed.begun or handed.left or handed.tries >= _MOST_TRIES
        )
        self._changes += 1

    def _known(self) -> EngineInfo:
        if self._facts is None:
            raise EngineNotReady(self._problem)
        return self._facts

    def _hand_over(self, handed: _Handed) -> None:
        assert self._send is not None
        handed.tries += 1
        self._sent += 1
        self._unseen.append(handed.request)
        self._send(json_frame(FrameKind.SUBMIT, plain.encode(Request, handed.request)))

    def _deliver(self, events: Iterable[TokenEvent]) -> None:
        by_sink: dict[Sink, list[TokenEvent]] = {}
        for event in events:
            handed = self._alive.get(event.request_id)
            if handed is None:
                continue
            handed.begun = True
            by_sink.setdefault(handed.sink, []).append(event)
            if event.finish_reason is not None:
                del self._alive[event.request_id]
                self._changes += 1
        for sink, theirs in by_sink.items():
            try:
                sink(theirs)
            except Exception:
                _log.exception("a caller's sink failed; the other callers are served on")
