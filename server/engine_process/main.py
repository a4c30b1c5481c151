"""The engine in a process of its own: it takes requests from a socket and writes whole iterations back.

    python -m server.engine_process.main DESCRIPTOR

The front starts it and keeps the other end of the socket. It ends with its front: when the socket closes, and on Linux
by a signal of the kernel's as well, should nothing in it be able to look. SIGINT and SIGTERM are the front's, which
drains first; a terminal and a service manager send them to both.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from jaxserve.errors import EngineStopped, InvalidRequest, QueueFull
from jaxserve.multihost.failure import HostFailed
from jaxserve.request import FinishReason, Request, TokenEvent
from jaxserve.stats import IterationRecord, Load
from server.commands import hosts
from server.commands.console import UserError, mending
from server.commands.engine_start import make_engine, profiling
from server.engine_process import codec as plain
from server.engine_process import exit_codes, iterations
from server.engine_process.frames import BadFrame, FrameKind, Splitter, TooLarge, frame, json_frame, parse_json
from server.engine_process.job import EngineInfo, EngineJob

if TYPE_CHECKING:
    from jaxserve.engine import Engine

_log = logging.getLogger(__name__)

_BEAT_SECONDS = 0.25  # at most, until the front hears of a load that has changed without an iteration
_MOST_HELD = 4096  # hand-overs that the front may be behind; then it is taken for gone
_MANY_HELD = 512  # from here on it is not told what iterations looked like
_READ_BYTES = 2**16
_COMPILERS = 4  # grammars that are waited for at a time
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl(2)

Progress = Callable[[str, int, int], None]


def main(make: Callable[[EngineJob, Progress], Any] | None = None) -> int:
    """Serves the front at the other end of the socket whose descriptor is the last argument.

    Args:
      make: makes the engine of a job, not started yet.

    Returns:
      The exit code (`exit_codes`).
    """
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    _follow_front()
    with socket.socket(fileno=int(sys.argv[-1])) as channel:
        channel.set_inheritable(False)
        try:
            return _serve(channel, make or _make)
        except BadFrame as problem:
            _log.error("the front sent what is no message: %s", problem)
            _end(exit_codes.BAD_FRAME)


def _follow_front() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # where a wedged engine stands


def _make(job: EngineJob, progress: Progress) -> Engine:
    return make_engine(Path(job.model), job.config, progress, job.cluster)


def _end(code: int) -> NoReturn:
    """Ends at once: what is under way has nobody to go to."""
    sys.stderr.flush()
    os._exit(code)


def _serve(channel: socket.socket, make: Callable[[EngineJob, Progress], Any]) -> int:
    messages = _messages(channel)
    kind, body = next(messages)
    if kind is not FrameKind.START:
        raise BadFrame(f"{kind.name} before START")
    job = _decoded(EngineJob, body)

    def progress(what: str, done: int, total: int) -> None:
        _send(channel, json_frame(FrameKind.PROGRESS, [what, done, total]))

    def alive(seconds: float) -> None:
        _send(channel, json_frame(FrameKind.ALIVE, seconds))

    try:
        if job.cluster is not None and job.cluster.host:
            # Nothing is left to be done: a slow interpreter's end would be taken for a process that hangs.
            _end(hosts.follow(Path(job.model), job.config, job.cluster, alive=alive))
        with mending():
            try:
                engine = make(job, progress)
            except HostFailed as failure:
                _send(channel, json_frame(FrameKind.FAILED, str(failure)))
                hosts.end_failed(failure)
    except UserError as problem:
        _send(channel, json_frame(FrameKind.REFUSED, str(problem)))
        return exit_codes.USER_ERROR
    with contextlib.ExitStack() as stack:
        stack.enter_context(profiling(job.profile))
        outbox = _Outbox(channel, engine, failing_seconds=hosts.FAILING_SECONDS if job.cluster is not None else 0.0)
        stack.callback(outbox.close)
        stack.enter_context(engine)
        stack.callback(outbox.let_engine_end)
        facts = EngineInfo(
            report=engine.report,
            limits=engine.limits,
            eos_token_ids=tuple(engine.model_config.eos_token_ids),
            bos_token_id=engine.model_config.bos_token_id,
        )
        _send(channel, json_frame(FrameKind.READY, plain.encode(EngineInfo, facts)))
        outbox.start()
        for kind, body in messages:
            match kind:
                case FrameKind.SUBMIT:
                    outbox.submit(_decoded(Request, body))
                case FrameKind.ABORT:
                    outbox.abort(_decoded(str, body))
                case FrameKind.STOP:
                    break
                case _:
                    raise BadFrame(f"{kind.name} from the front")
    return exit_codes.ENDED


def _decoded(kind: Any, body: bytes) -> Any:
    try:
        return plain.decode(kind, parse_json(body))
    except ValueError as problem:
        raise BadFrame(str(problem)) from problem


def _messages(channel: socket.socket) -> Iterator[tuple[FrameKind, bytes]]:
    """What the front says; ends the process when the front is gone. Raises BadFrame."""
    splitter = Splitter()
    while True:
        try:
            data = channel.recv(_READ_BYTES)
        except OSError:
            data = b""
        if not data:
            _end(exit_codes.FRONT_GONE)
        yield from splitter.feed(data)


def _send(channel: socket.socket, data: bytes) -> None:
    try:
        channel.sendall(data)
    except OSError:
        _end(exit_codes.FRONT_GONE)


class _Outbox:
    """What goes to the front. The engine's threads only append to it; a thread of its own waits for the socket, so that
    a front that is slow, or is stopped, never keeps an iteration waiting.

    Args:
      failing_seconds: for whoever else ends the process of an engine that has failed.
    """

    def __init__(self, channel: socket.socket, engine: Any, *, failing_seconds: float = 0.0) -> None:
        self._channel, self._engine, self._failing_seconds = channel, engine, failing_seconds
        self._held: queue.SimpleQueue[list[TokenEvent] | IterationRecord | None] = queue.SimpleQueue()
        self._received = 0
        # Requests whose grammars are being compiled, by name, and whether they are wanted still: nobody else waits.
        self._compiling: dict[str, bool] = {}
        self._compilers = ThreadPoolExecutor(_COMPILERS, thread_name_prefix="jaxserve-submit")
        self._ends = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="jaxserve-outbox", daemon=True)

    def start(self) -> None:
        self._engine.record(self._record)
        self._thread.start()

    def let_engine_end(self) -> None:
        """From now on an engine that has ended has not failed."""
        self._ends = True

    def close(self) -> None:
        """Returns when everything has been written."""
        self._held.put(None)
        if self._thread.ident is not None:
            self._thread.join()

    def submit(self, request: Request) -> None:
        if request.sampling.grammar is None:
            self._submit(request)
        else:
            self._compiling[request.request_id] = True
            self._compilers.submit(self._compile, request)
        self._received += 1

    def abort(self, name: str) -> None:
        with self._lock:
            if name in self._compiling:
                self._compiling[name] = False
                return
        self._engine.abort(name)

    def _compile(self, request: Request) -> None:
        with contextlib.suppress(InvalidRequest, QueueFull):  # which `_submit` meets again
            self._engine.check(request)
        with self._lock:
            if self._compiling.pop(request.request_id):
                self._submit(request)
            else:
                self._sink([TokenEvent(request.request_id, finish_reason=FinishReason.ABORTED)])

    def _submit(self, request: Request) -> None:
        try:
            self._engine.submit(request, self._sink)
        except (InvalidRequest, QueueFull) as refusal:  # the front has judged already; this is for the log there
            field = getattr(refusal, "field", None)
            self._sink([_ended(request.request_id, str(refusal), field)])
        except EngineStopped:
            pass  # the front is about to be told

    # On the engine's threads

    def _sink(self, events: list[TokenEvent]) -> None:
        if self._held.qsize() >= _MOST_HELD:
            _log.error("the front has read nothing for %d iterations", _MOST_HELD)
            _end(exit_codes.FRONT_GONE)
        self._held.put(events)

    def _record(self, record: IterationRecord) -> None:
        if self._held.qsize() < _MANY_HELD:
            self._held.put(record)

    # On its own

    def _run(self) -> None:
        try:
            self._write()
        except Exception:
            _log.exception("the engine's answers cannot be written")
            _end(exit_codes.ENGINE_FAILED)

    def _write(self) -> None:
        told: Any = None
        while True:
            items, ends = self._next()
            if self._engine.problem is not None and not self._ends:
                _send(self._channel, json_frame(FrameKind.FAILED, self._engine.problem))
                time.sleep(self._failing_seconds)
                _end(exit_codes.ENGINE_FAILED)
            received = self._received  # before the loads: what it counts is in them
            loads = self._engine.loads()
            if items or told != (received, loads):
                told = received, loads
                events = [event for item in items if isinstance(item, list) for event in item]
                self._tell(received, loads, events, [item for item in items if isinstance(item, IterationRecord)])
            if ends:
                return

    def _tell(
        self, received: int, loads: Sequence[Load], events: Sequence[TokenEvent], records: Sequence[IterationRecord]
    ) -> None:
        """In one message; in several where that is more than one may hold. A request whose event alone is more than
        that is ended."""
        try:
            data = frame(FrameKind.ITERATION, iterations.encode(received, loads, events, records))
        except TooLarge as problem:
            if len(events) + len(records) > 1:
                half, rest = len(events) // 2, (len(records) + 1) // 2
                self._tell(received, loads, events[:half], records[:rest])
                self._tell(received, loads, events[half:], records[rest:])
                return
            (event,) = events
            self._engine.abort(event.request_id)
            error = f"the answer to one iteration is {problem}; ask for fewer alternatives, or in several requests"
            self._tell(received, loads, [_ended(event.request_id, error)], [])
        else:
            _send(self._channel, data)

    def _next(self) -> tuple[list[list[TokenEvent] | IterationRecord], bool]:
        """(what has come, whether nothing more will)."""
        items: list[list[TokenEvent] | IterationRecord] = []
        with contextlib.suppress(queue.Empty):
            item = self._held.get(timeout=_BEAT_SECONDS)
            while item is not None:
                items.append(item)
                item = self._held.get_nowait()
            return items, True
        return items, False


def _ended(name: str, error: str, field: str | None = None) -> TokenEvent:
    return TokenEvent(name, finish_reason=FinishReason.ERROR, error=error, field=field)


if __name__ == "__main__":
    sys.exit(main())
