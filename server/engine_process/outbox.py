"""The outbox of an engine process: sends events, iteration records and loads to the front."""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from jaxserve.multihost.process_watchdog import end_process
from jaxserve.request import FinishReason, TokenEvent
from jaxserve.scheduler.prefix_changes import PrefixChange
from jaxserve.stats import IterationRecord, Load
from server.engine_process import exit_codes, messages
from server.engine_process.frames import TooLarge

_log = logging.getLogger(__name__)

_BEAT_SECONDS = 0.25  # most time until the front gets a load that changed without an iteration
_MOST_HELD = 4096  # unsent items with which the front counts as gone
_MANY_HELD = 512  # unsent items from which no more iteration records are kept

_Item = list[TokenEvent] | IterationRecord | bytes  # bytes: a frame


def send(channel: socket.socket, data: bytes) -> None:
    """Sends bytes to the front; ends this process if the front is gone."""
    try:
        channel.sendall(data)
    except OSError:
        end_process(exit_codes.FRONT_GONE)


def ending(request_id: str, error: str, field: str | None = None) -> TokenEvent:
    """The last event of a request that failed."""
    return TokenEvent(request_id, finish_reason=FinishReason.ERROR, error=error, field=field)


class Outbox:
    """Collects what goes to the front.

    The engine's threads only append, and the outbox has its own thread that writes to the socket. So a slow or stopped
    front never delays an iteration.

    Args:
      engine: reports its problem and loads; aborts a request with too large an answer.
      failing_seconds: time for something else to end this process once its engine has failed.
      changes: returns what has changed in the prefix caches; None if the front does not want that.

    Attributes:
      received: requests read so far; counted by the reader of the front's messages.
    """

    def __init__(
        self,
        channel: socket.socket,
        engine: Any,
        *,
        failing_seconds: float = 0.0,
        changes: Callable[[], list[PrefixChange]] | None = None,
    ) -> None:
        self.received = 0
        self._channel, self._engine, self._failing_seconds = channel, engine, failing_seconds
        self._changes = changes
        self._held: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._is_ending = False
        self._thread = threading.Thread(target=self._run, name="jaxserve-outbox", daemon=True)

    def start(self) -> None:
        """Starts to write, and to record iterations."""
        self._engine.record(self._record)
        self._thread.start()

    def let_engine_end(self) -> None:
        """From now on, an engine that stops is not reported as failed."""
        self._is_ending = True

    def close(self) -> None:
        """Returns when everything has been written."""
        self._held.put(None)
        if self._thread.ident is not None:
            self._thread.join()

    def put(self, events: list[TokenEvent]) -> None:
        """Takes events; the sink of every request. Called from the engine's threads."""
        if self._held.qsize() >= _MOST_HELD:
            _log.error("the front has read nothing for %d iterations", _MOST_HELD)
            end_process(exit_codes.FRONT_GONE)
        self._held.put(events)

    def send(self, frame: bytes) -> None:
        """Takes a frame for the front."""
        self._held.put(frame)

    def _record(self, record: IterationRecord) -> None:
        if self._held.qsize() < _MANY_HELD:
            self._held.put(record)

    # The thread that writes

    def _run(self) -> None:
        try:
            self._write()
        except Exception:
            _log.exception("the engine's events cannot be written")
            end_process(exit_codes.ENGINE_FAILED)

    def _write(self) -> None:
        reported: Any = None
        while True:
            items, is_last = self._next()
            if self._engine.problem is not None and not self._is_ending:
                send(self._channel, messages.to_front(failed=self._engine.problem))
                time.sleep(self._failing_seconds)
                end_process(exit_codes.ENGINE_FAILED)
            if self._changes is not None and (changes := self._changes()):
                send(self._channel, messages.encode_changes(changes))
            for item in items:
                if isinstance(item, bytes):
                    send(self._channel, item)
            received = self.received  # read before the loads, which then include these requests
            loads = self._engine.loads()
            if items or reported != (received, loads):
                reported = received, loads
                events = [event for item in items if isinstance(item, list) for event in item]
                self._report(received, loads, events, [item for item in items if isinstance(item, IterationRecord)])
            if is_last:
                return

    def _report(
        self, received: int, loads: Sequence[Load], events: Sequence[TokenEvent], records: Sequence[IterationRecord]
    ) -> None:
        """Sends one message, or several smaller ones; ends a request with too large an event."""
        try:
            data = messages.encode_iterations(received, loads, events, records)
        except TooLarge as problem:
            if len(events) + len(records) > 1:
                half, rest = len(events) // 2, (len(records) + 1) // 2
                self._report(received, loads, events[:half], records[:rest])
                self._report(received, loads, events[half:], records[rest:])
                return
            (event,) = events
            self._engine.abort(event.request_id)
            error = f"the answer to one iteration is {problem}; ask for fewer alternatives, or in several requests"
            self._report(received, loads, [ending(event.request_id, error)], [])
        else:
            send(self._channel, data)

    def _next(self) -> tuple[list[_Item], bool]:
        """(all items so far, whether they are the last)."""
        items: list[_Item] = []
        with contextlib.suppress(queue.Empty):
            item = self._held.get(timeout=_BEAT_SECONDS)
            while item is not None:
                items.append(item)
                item = self._held.get_nowait()
            return items, True
        return items, False
