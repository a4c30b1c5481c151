"""One engine process from its start to its end, as its front sees it."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import IO

from server.engine_process import messages
from server.engine_process import messages_pb2 as pb
from server.engine_process.frames import BadFrame, Splitter

_LAST_LINES = 20  # lines of its output kept for the log
_REAP_SECONDS = 2.0  # for a process that has closed its socket to end
_LAST_OUTPUT_SECONDS = 0.5  # for its last output to arrive
_POLL_SECONDS = 0.01
_TRACE_SECONDS = 0.3  # for a wedged process to write the stacks of its threads


@contextlib.contextmanager
def _blocked(*signals: signal.Signals) -> Iterator[None]:
    """Blocks signals on this thread, and in processes started meanwhile until those ignore them.

    A Ctrl-C at a terminal reaches the engine process too, even while it still imports.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class EngineProcess(asyncio.Protocol):
    """A child process at the other end of a socket.

    Args:
      command: of the process; the descriptor of its socket is added.
      take: called on the event loop with the name of every message's field, and the message; raises BadFrame.

    Attributes:
      started / ready_since: monotonic seconds; None until it is ready.
      refusal: why it cannot start.
      failure: the engine's own report of its failure.
      wedged: why it is being killed.
      misread: what was wrong with one of its messages.
      last_lines: of its output, which is also copied to standard error.
    """

    def __init__(self, command: Sequence[str], take: Callable[[str, pb.FromEngine], None]) -> None:
        self.started = time.monotonic()
        self.ready_since: float | None = None
        self.refusal: str | None = None
        self.failure: str | None = None
        self.wedged: str | None = None
        self.misread: str | None = None
        self.last_lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._command, self._take = command, take
        self._splitter = Splitter()
        self._lost = asyncio.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._transport: asyncio.Transport | None = None
        self._pump: threading.Thread | None = None

    async def start(self) -> None:
        """Starts it. Raises OSError if it cannot be started."""
        ours, theirs = socket.socketpair()
        try:
            with theirs, _blocked(signal.SIGINT, signal.SIGTERM):
                self._process = subprocess.Popen(
                    [*self._command, str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                )
        except BaseException:
            ours.close()
            self._lost.set()
            raise
        assert self._process.stdout is not None
        self._pump = threading.Thread(target=self._forward, args=(self._process.stdout,), daemon=True)
        self._pump.start()
        self._transport, _ = await asyncio.get_running_loop().create_connection(lambda: self, sock=ours)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def send(self, data: bytes) -> None:
        """Sends a frame; it is lost if the process is gone."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def signal(self, number: int) -> None:
        if self._process is not None:
            self._process.send_signal(number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)

    async def kill_wedged(self) -> None:
        """Kills it, after it has had time to write the stacks of its threads."""
        self.signal(signal.SIGUSR1)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._lost.wait(), _TRACE_SECONDS)
        self.kill()

    async def ended(self) -> int:
        """Waits for its end. Returns the exit code, or minus the number of the signal that ended it."""
        await self._lost.wait()
        process = self._process
        if process is None:
            return 1  # it could not be started
        until = time.monotonic() + _REAP_SECONDS
        while process.poll() is None:
            if time.monotonic() > until:
                process.kill()
            await asyncio.sleep(_POLL_SECONDS)
        if self._pump is not None:  # the thread ends with the output, unless a grandchild keeps the pipe open
            await asyncio.to_thread(self._pump.join, _LAST_OUTPUT_SECONDS)
        return process.returncode

    def data_received(self, data: bytes) -> None:
        if self.misread is not None:
            return
        try:
            for body in self._splitter.feed(data):
                self._take(*messages.parse(pb.FromEngine, body))
        except BadFrame as problem:
            self.misread = str(problem)
            self.kill()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost.set()

    def _forward(self, output: IO[bytes]) -> None:
        with output:
            for line in output:
                text = line.decode(errors="replace")
                self.last_lines.append(text.rstrip("\n"))
                with contextlib.suppress(OSError, ValueError):  # standard error is closed
                    sys.stderr.write(text)
                    sys.stderr.flush()
