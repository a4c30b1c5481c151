"""The engine process: it takes requests from a socket and writes whole iterations back.

    python -m server.engine_process.main DESCRIPTOR

The front starts it and keeps the other end of the socket. It ends with its front, also while it loads or compiles: when
the socket closes, and on Linux also by a signal of the kernel, in case all its threads hang. It ignores SIGINT and
SIGTERM, which a terminal or a service manager sends to both processes, because the front drains first.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import logging
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxserve.errors import EngineStopped, InvalidRequest, QueueFull, WrongState
from jaxserve.multihost.failure import HostFailed
from jaxserve.multihost.process_watchdog import end_process
from jaxserve.profiler import Profiler
from jaxserve.request import FinishReason, Request, TokenEvent
from server import heap
from server.commands import hosts
from server.commands.console import UserError, user_errors
from server.commands.engine_start import make_engine
from server.engine_process import exit_codes, messages
from server.engine_process import messages_pb2 as pb
from server.engine_process.frames import BadFrame, Splitter
from server.engine_process.job import EngineInfo, EngineJob
from server.engine_process.outbox import Outbox, ending, send

if TYPE_CHECKING:
    from jaxserve.engine import Engine

_log = logging.getLogger(__name__)

_READ_BYTES = 2**16
_COMPILERS = 4  # threads that compile grammars
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl(2)

Progress = Callable[[str, int, int], None]
MakeEngine = Callable[[EngineJob, Progress], Any]


def main(make: MakeEngine | None = None) -> int:
    """Serves the front at the other end of the socket whose descriptor is the last argument.

    Args:
      make: makes the engine of a job, not started yet.

    Returns:
      The exit code (`exit_codes`).
    """
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    with socket.socket(fileno=int(sys.argv[-1])) as channel:
        channel.set_inheritable(False)
        _follow_front(channel)
        try:
            return _serve(channel, make or _make)
        except BadFrame as problem:
            _log.error("the front sent something that is not a message: %s", problem)
            end_process(exit_codes.BAD_FRAME)


def _follow_front(channel: socket.socket) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
    threading.Thread(target=_end_with_front, args=(channel,), name="jaxserve-front", daemon=True).start()
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # shows where the threads of a hanging engine are


def _end_with_front(channel: socket.socket) -> None:
    poll = select.poll()
    poll.register(channel, 0)  # only its end is reported
    poll.poll()
    end_process(exit_codes.FRONT_GONE)


def _make(job: EngineJob, progress: Progress) -> Engine:
    return make_engine(Path(job.model), job.config, progress, job.cluster)


def _serve(channel: socket.socket, make: MakeEngine) -> int:
    received = _messages(channel)
    name, message = next(received)
    if name != "start":
        raise BadFrame(f"{name} before start")
    job = messages.from_json(EngineJob, message.start)
    logging.getLogger().setLevel(job.log_level.upper())
    try:
        engine = _started(channel, job, make)
    except UserError as problem:
        send(channel, messages.to_front(refused=str(problem)))
        return exit_codes.USER_ERROR
    with contextlib.ExitStack() as stack:
        profiler = None if job.profile is None else Profiler(job.profile, tell=engine.tell_profile)
        if profiler is not None:
            stack.callback(profiler.close)
        outbox = Outbox(
            channel,
            engine,
            failing_seconds=hosts.FAILING_SECONDS if job.cluster is not None else 0.0,
            # Not woken for them: it writes after every iteration anyway.
            changes=engine.follow_prefixes(lambda: None) if job.kv_events else None,
        )
        stack.callback(outbox.close)
        stack.enter_context(engine)
        stack.callback(outbox.let_engine_end)
        info = EngineInfo(
            report=engine.report,
            limits=engine.limits,
            eos_token_ids=tuple(engine.model_config.eos_token_ids),
            bos_token_id=engine.model_config.bos_token_id,
        )
        heap.settle()
        send(channel, messages.to_front(ready=messages.to_json(EngineInfo, info)))
        outbox.start()
        inbox = _Inbox(engine, outbox, profiler)
        for name, message in received:
            match name:
                case "submit":
                    inbox.submit(messages.decode_request(message.submit))
                case "abort":
                    inbox.abort(message.abort)
                case "profile" if profiler is not None:
                    inbox.profile(message.profile)
                case "stop":
                    break
                case _:
                    raise BadFrame(f"{name} from the front")
    return exit_codes.ENDED


def _started(channel: socket.socket, job: EngineJob, make: MakeEngine) -> Any:
    """The engine of a job. Does not return on a host that follows another. Raises UserError."""

    def progress(what: str, done: int, total: int) -> None:
        send(channel, messages.to_front(progress=pb.Progress(what=what, done=done, total=total)))

    def alive(seconds: float) -> None:
        send(channel, messages.to_front(alive_seconds=seconds))

    if job.cluster is not None and job.cluster.host:
        hosts.follow(Path(job.model), job.config, job.cluster, job.profile, alive=alive)
    with user_errors():
        try:
            return make(job, progress)
        except HostFailed as failure:
            send(channel, messages.to_front(failed=str(failure)))
            hosts.end_failed(failure)


def _messages(channel: socket.socket) -> Iterator[tuple[str, pb.FromFront]]:
    """Yields the front's messages; ends the process when the front is gone. Raises BadFrame."""
    splitter = Splitter()
    while True:
        try:
            data = channel.recv(_READ_BYTES)
        except OSError:
            data = b""
        if not data:
            end_process(exit_codes.FRONT_GONE)
        for body in splitter.feed(data):
            yield messages.parse(pb.FromFront, body)


class _Inbox:
    """Passes requests and aborts on to the engine; grammars and profiles delay none."""

    def __init__(self, engine: Any, outbox: Outbox, profiler: Profiler | None) -> None:
        self._engine, self._outbox, self._profiler = engine, outbox, profiler
        self._profiling = ThreadPoolExecutor(1, thread_name_prefix="jaxserve-profile")
        self._compiling: dict[str, bool] = {}  # id of a request whose grammar is being compiled -> not aborted
        self._compilers = ThreadPoolExecutor(_COMPILERS, thread_name_prefix="jaxserve-submit")
        self._lock = threading.Lock()

    def submit(self, request: Request) -> None:
        if request.sampling.grammar is None:
            self._submit(request)
        else:
            self._compiling[request.request_id] = True
            self._compilers.submit(self._compile, request)
        self._outbox.received += 1

    def abort(self, request_id: str) -> None:
        with self._lock:
            if request_id in self._compiling:
                self._compiling[request_id] = False
                return
        self._engine.abort(request_id)

    def profile(self, running: bool) -> None:
        self._profiling.submit(self._profile, running)

    def _profile(self, running: bool) -> None:
        assert self._profiler is not None
        problem, is_state = "", False
        try:
            self._profiler.set(running)
        except Exception as raised:
            problem, is_state = str(raised), isinstance(raised, WrongState)
        self._outbox.send(messages.to_front(profiled=pb.Profiled(problem=problem, is_state=is_state)))

    def _compile(self, request: Request) -> None:
        with contextlib.suppress(InvalidRequest, QueueFull):  # `_submit` raises and reports them again
            self._engine.check(request)
        with self._lock:
            if self._compiling.pop(request.request_id):
                self._submit(request)
            else:
                self._outbox.put([TokenEvent(request.request_id, finish_reason=FinishReason.ABORTED)])

    def _submit(self, request: Request) -> None:
        try:
            self._engine.submit_checked(request, self._outbox.put)
        except (InvalidRequest, QueueFull) as problem:  # of its grammar: the front checked the rest
            self._outbox.put([ending(request.request_id, str(problem), getattr(problem, "field", None))])
        except EngineStopped:
            pass  # the outbox is about to report the failure


if __name__ == "__main__":
    sys.exit(main())
