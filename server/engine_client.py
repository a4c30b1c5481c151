"""The server's interface of an engine, in this or another process, and event delivery."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from jaxserve.config import EngineConfig
    from jaxserve.request import Request, TokenEvent
    from jaxserve.scheduler.limits import Limits
    from jaxserve.scheduler.prefix_changes import PrefixChange
    from jaxserve.startup_report import StartupReport
    from jaxserve.stats import IterationRecord, Load
    from jaxserve.structured_output.compiler import GrammarCompiler
    from jaxserve.text.tokenizer import Tokenizer

    Sink = Callable[[list[TokenEvent]], None]


class EngineNotReady(RuntimeError):
    """The engine is still starting; its limits and its vocabulary are not known yet."""


class Vocabulary(Protocol):
    """What the server needs to know of a model."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...
    @property
    def bos_token_id(self) -> int | None: ...


class EngineClient(Protocol):
    """What the server uses of an engine: `jaxserve.engine.Engine` or `RemoteEngine`.

    `report`, `model_config`, `max_context`, `limits` and `grammars` raise EngineNotReady until the engine is ready for
    the first time; nothing else does. A recorder is called on an engine thread or on the event loop.

    Attributes:
      request_defaults: sampling parameters of requests that do not give their own; see `generation.defaults`.
      grammars: compiled ones; None without a tokenizer.
      problem: why no requests are served, as an error for callers; None while they are.
      takes_requests: whether a request submitted now will be served, if only once the engine is back.
    """

    @property
    def config(self) -> EngineConfig: ...
    @property
    def report(self) -> StartupReport: ...
    @property
    def model_config(self) -> Vocabulary: ...
    @property
    def max_context(self) -> int: ...
    @property
    def limits(self) -> Limits: ...
    @property
    def tokenizer(self) -> Tokenizer | None: ...
    @property
    def request_defaults(self) -> Mapping[str, Any]: ...
    @property
    def grammars(self) -> GrammarCompiler | None: ...
    @property
    def problem(self) -> str | None: ...
    @property
    def takes_requests(self) -> bool: ...

    def submit(self, request: Request, sink: Sink) -> None: ...
    def abort(self, request_id: str) -> None: ...
    def load(self) -> Load: ...
    def loads(self) -> list[Load]: ...
    def record(self, recorder: Callable[[IterationRecord], None]) -> None: ...
    def follow_prefixes(self, wake: Callable[[], None]) -> Callable[[], list[PrefixChange]]: ...


class EventDelivery:
    """Delivers events of an engine to the event loop on which the first sink is made.

    One wake-up of the loop serves all sinks. Events that come on the loop's own thread, such as those of an engine
    process, are delivered at once.
    """

    def __init__(self, engine: EngineClient) -> None:
        self.engine = engine
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: int | None = None
        self._waiting: deque[tuple[Sink, list[TokenEvent]]] = deque()
        self._is_scheduled = False

    def sink(self, receive: Sink) -> Sink:
        """A sink for the engine; `receive` is called on the loop."""
        if self._loop is None:
            self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        loop = self._loop

        def sink(events: list[TokenEvent]) -> None:
            if threading.get_ident() == self._thread:
                receive(events)
                return
            self._waiting.append((receive, events))
            if not self._is_scheduled:
                self._is_scheduled = True
                with contextlib.suppress(RuntimeError):  # the loop has been closed
                    loop.call_soon_threadsafe(self._deliver)

        return sink

    def _deliver(self) -> None:
        self._is_scheduled = False  # first, so that later events schedule another turn
        while self._waiting:
            receive, events = self._waiting.popleft()
            receive(events)
