"""Supervises the engine process of a front: starts it, and restarts it with `--supervise`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxserve.multihost.config import ClusterConfig, stages_of
from jaxserve.multihost.failure import Symptom, SymptomKind
from server.commands.console import UserError
from server.engine_process import exit_codes, messages
from server.engine_process import messages_pb2 as pb
from server.engine_process.frames import BadFrame
from server.engine_process.job import EngineInfo, EngineJob
from server.engine_process.process import EngineProcess
from server.engine_process.remote_engine import RemoteEngine

_log = logging.getLogger(__name__)

ENGINE_COMMAND = (sys.executable, "-m", "server.engine_process.main")

_TELLING_SECONDS = 0.5  # for callers to get their errors
_STOP_SECONDS = 10.0  # for an engine process to finish its iteration and end


class EngineGone(Exception):
    """The engine process has ended and is not restarted.

    Attributes:
      code: exit code of the last process, if there was one.
    """

    def __init__(self, problem: str, code: int | None = None) -> None:
        super().__init__(problem)
        self.code = code

    @property
    def exit_code(self) -> int:
        """The exit code for the front process."""
        return self.code if self.code in exit_codes.OF_HOSTS else exit_codes.ENGINE_GONE


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """How often an engine process is restarted.

    Attributes:
      most: restarts in a row.
      steady_seconds: a process that has served for so long starts a new row.
      first_delay / longest_delay: seconds before the first restart in a row; each waits twice as long as the last.
    """

    most: int = 5
    steady_seconds: float = 60.0
    first_delay: float = 0.5
    longest_delay: float = 30.0

    def delay(self, in_a_row: int) -> float:
        """Seconds to wait before restart number `in_a_row`, from 1."""
        return min(self.first_delay * 2 ** (in_a_row - 1), self.longest_delay)


class Supervisor:
    """Runs the engine processes of a front, one after the other.

    Args:
      engine: is connected to each of them.
      job: what each is to do.
      restarts: None never restarts.
      command: starts a process; the descriptor of its socket is added.
      progress: called with the progress of the first start (what, done, total).

    Attributes:
      ready: set once the first process is ready.
    """

    def __init__(
        self,
        engine: RemoteEngine,
        job: EngineJob,
        *,
        restarts: RestartPolicy | None,
        command: Sequence[str] = ENGINE_COMMAND,
        progress: Callable[[str, int, int], None] = lambda *_: None,
    ) -> None:
        self.ready = asyncio.Event()
        self._engine, self._job, self._restarts = engine, job, restarts
        self._command, self._progress = command, progress
        self._process: EngineProcess | None = None  # that runs, or ran last
        self._started = 0.0  # monotonic seconds; likewise
        self._ready_since: float | None = None
        self._refusal: str | None = None  # why it cannot start
        self._failure: str | None = None  # the engine's own report of its failure
        self._wedged: str | None = None  # why it is being killed
        self._killing: asyncio.Task[None] | None = None
        self._silence: asyncio.TimerHandle | None = None  # gives up a process that stops reporting that it is alive
        self._closed = asyncio.Event()

    async def run(self) -> None:
        """Returns after `close`.

        Raises:
          UserError: the engine cannot be started with these settings.
          EngineGone: it has ended and is not restarted.
        """
        in_a_row = 0
        while not self._closed.is_set():
            code = await self._live()
            if self._closed.is_set():
                return
            # A restarted process may meet what the last one left, such as a host that is about to end.
            if self._refusal is not None and not (self.ready.is_set() or in_a_row):
                self._engine.disconnect("the engine cannot be started", returns=False)
                raise UserError(self._refusal)
            if code == exit_codes.ENDED and self._job.cluster is not None and self._job.cluster.host:
                return  # host 0 has ended the hosts
            cause = self._cause(code)
            self._log_end(code, cause)
            if self._restarts is None:
                self._engine.disconnect(cause, returns=False)
                if self._job.cluster is not None:
                    await asyncio.sleep(_TELLING_SECONDS)  # then this host ends as the others do
                elif self.ready.is_set():
                    await self._closed.wait()  # as with a failed engine in this process, the operator decides
                raise EngineGone(cause, code)
            in_a_row = 1 if self._served_seconds() >= self._restarts.steady_seconds else in_a_row + 1
            if in_a_row > self._restarts.most:
                self._engine.disconnect(cause, returns=False)
                raise EngineGone(f"{cause}, {in_a_row} times in a row", code)
            self._engine.disconnect(f"{cause}; it is being restarted", returns=True)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closed.wait(), self._restarts.delay(in_a_row))

    def give_up(self, problem: str) -> None:
        """Kills an engine process that hangs; it is restarted if there is a RestartPolicy."""
        if self._wedged is None and self._process is not None:
            self._wedged = problem
            self._killing = asyncio.create_task(self._process.kill_wedged())

    def signal(self, number: int) -> None:
        """Sends a signal to the engine process, if it is ready."""
        if self._process is not None and self._ready_since is not None:
            self._process.signal(number)

    def let_end(self) -> None:
        """From now on a process that ends is not restarted."""
        self._closed.set()

    async def close(self) -> None:
        """Ends the engine process and aborts its requests."""
        self._closed.set()
        process = self._process
        if process is None:  # `run` has not started yet
            return
        if self._ready_since is None or self._wedged is not None:
            process.kill()
        process.send(messages.to_engine(stop=pb.Empty()))
        try:
            await asyncio.wait_for(process.ended(), _STOP_SECONDS)
        except TimeoutError:
            process.kill()
            await process.ended()

    @property
    def pid(self) -> int | None:
        """The process id of the engine process; None before the first start."""
        return None if self._process is None else self._process.pid

    async def _live(self) -> int:
        """Runs one engine process from its start to its end. Returns its exit code."""
        self._refusal = self._failure = self._wedged = self._ready_since = None
        self._started = time.monotonic()
        self._process = process = EngineProcess(self._command, self._take)
        try:
            await process.start()
        except OSError as problem:
            raise EngineGone(f"no engine process can be started: {problem}") from problem
        if self._closed.is_set():
            process.kill()
        process.send(messages.to_engine(start=messages.to_json(EngineJob, self._job)))
        try:
            return await process.ended()
        finally:
            if self._silence is not None:
                self._silence.cancel()

    def _take(self, name: str, message: pb.FromEngine) -> None:
        match name:
            case "iterations" if self._ready_since is not None:
                self._engine.take(message.iterations)
            case "progress" if self._ready_since is None:
                progress = message.progress
                if not self.ready.is_set():
                    self._progress(progress.what, progress.done, progress.total)
            case "ready" if self._ready_since is None:
                info = messages.from_json(EngineInfo, message.ready)
                assert self._process is not None
                self._ready_since = time.monotonic()
                if self.ready.is_set():
                    _log.warning("the engine is ready again, after %.1f s", self._ready_since - self._started)
                self._engine.connect(info, self._process.send)
                self.ready.set()
            case "refused":
                self._refusal = message.refused
            case "failed":
                self._failure = failure = message.failed
                if self._job.cluster is not None:  # which ends late, after the other hosts have been notified
                    again = self._restarts is not None
                    text = f"{failure}; it is being restarted" if again else failure
                    self._engine.disconnect(text, returns=again)
            case "alive_seconds":
                self._hear(message.alive_seconds)
            case _:
                raise BadFrame(f"{name} from the engine process at the wrong time")

    def _hear(self, seconds: float) -> None:
        """The process is alive, and reports it again within so many seconds."""
        if self._silence is not None:
            self._silence.cancel()
        cause = f"the engine process did not report for {seconds:g} s"
        self._silence = asyncio.get_running_loop().call_later(seconds, self.give_up, cause)

    def _served_seconds(self) -> float:
        if self._job.cluster is not None and self._job.cluster.host:  # which does not report when it is ready
            return time.monotonic() - self._started
        return 0.0 if self._ready_since is None else time.monotonic() - self._ready_since

    def _cause(self, code: int) -> str:
        """Why the process ended, as an error for callers."""
        assert self._process is not None
        cause = f"the engine process {exit_codes.describe(code)}"
        if self._failure is not None:
            return f"{self._failure}: {cause}"
        if self._wedged is not None:
            cause = f"{self._wedged} and was killed"
        elif self._process.misread is not None:
            cause = "the engine process sent something that is not a message and was killed"
        return cause if self._job.cluster is None else str(self._problem(self._job.cluster, cause))

    def _problem(self, cluster: ClusterConfig, cause: str) -> Symptom:
        """The symptom of a host whose process ended without a report of its own."""
        load = self._engine.load()
        return Symptom(
            kind=SymptomKind.DISCONNECTED,
            hosts=(cluster.host,),
            stages=stages_of(self._job.config, cluster),
            sequence=load.iterations if load.running else None,
            cause=cause,
        )

    def _log_end(self, code: int, cause: str) -> None:
        """Logs the end of the process in full."""
        assert self._process is not None
        lines = "\n  ".join(self._process.last_lines) or "nothing"
        why = self._process.misread or self._refusal
        _log.error(
            "%s%s; process %d %s; its last output:\n  %s",
            cause,
            f" ({why})" if why is not None else "",
            self._process.pid,
            exit_codes.describe(code),
            lines,
        )
