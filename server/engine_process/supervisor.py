"""Supervises the engine process of a front: starts it, and restarts it with `--supervise`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from jaxserve.multihost.config import place
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
      engine: gets connected to each of them.
      job: what each of them does.
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
        self._is_worker = job.cluster is not None and job.cluster.host != 0
        self._process: EngineProcess | None = None  # the current or last one
        self._killing: asyncio.Task[None] | None = None
        self._silence: asyncio.TimerHandle | None = None  # gives up a process that does not report in time
        self._closed = asyncio.Event()

    async def run(self) -> None:
        """Returns after `close`.

        Raises:
          UserError: the engine cannot be started with these settings.
          EngineGone: it has ended and is not restarted.
        """
        in_a_row = 0
        while not self._closed.is_set():
            self._process = process = EngineProcess(self._command, self._take)
            code = await self._live(process)
            if self._closed.is_set():
                return
            # A restarted process may be refused because of the last one, such as by a host that is about to end.
            if process.refusal is not None and not (self.ready.is_set() or in_a_row):
                self._engine.disconnect("the engine cannot be started", returns=False)
                raise UserError(process.refusal)
            if code == exit_codes.ENDED and self._is_worker:
                return  # host 0 has ended the hosts
            cause = self._cause(process, code)
            _log_end(process, code, cause)
            if self._restarts is None:
                self._engine.disconnect(cause, returns=False)
                if self._job.cluster is not None:
                    await asyncio.sleep(_TELLING_SECONDS)  # then this host ends as the others do
                elif self.ready.is_set():
                    await self._closed.wait()  # serve health checks until the operator ends this process
                raise EngineGone(cause, code)
            served_since = process.started if self._is_worker else process.ready_since  # a worker is not reported ready
            is_steady = served_since is not None and time.monotonic() - served_since >= self._restarts.steady_seconds
            in_a_row = 1 if is_steady else in_a_row + 1
            if in_a_row > self._restarts.most:
                self._engine.disconnect(cause, returns=False)
                raise EngineGone(f"{cause}, {in_a_row} times in a row", code)
            self._engine.disconnect(f"{cause}; it is being restarted", returns=True)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closed.wait(), self._restarts.delay(in_a_row))

    def give_up(self, problem: str) -> None:
        """Kills an engine process that hangs; it is restarted if there is a RestartPolicy."""
        if self._process is not None and self._process.wedged is None:
            self._process.wedged = problem
            self._killing = asyncio.create_task(self._process.kill_wedged())

    def signal(self, number: int) -> None:
        """Sends a signal to the engine process, if it is ready."""
        if self._process is not None and self._process.ready_since is not None:
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
        if process.ready_since is None or process.wedged is not None:
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

    async def _live(self, process: EngineProcess) -> int:
        """Runs an engine process from its start to its end. Returns its exit code."""
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
        process = self._process
        assert process is not None
        match name:
            case "iterations" if process.ready_since is not None:
                self._engine.take(message.iterations)
            case "prefix_changes" if process.ready_since is not None:
                self._engine.take_changes(messages.decode_changes(message.prefix_changes))
            case "profiled" if process.ready_since is not None:
                self._engine.take_profiled(message.profiled)
            case "progress" if process.ready_since is None:
                progress = message.progress
                if not self.ready.is_set():
                    self._progress(progress.what, progress.done, progress.total)
            case "ready" if process.ready_since is None:
                info = messages.from_json(EngineInfo, message.ready)
                process.ready_since = time.monotonic()
                if self.ready.is_set():
                    _log.warning("the engine is ready again, after %.1f s", process.ready_since - process.started)
                self._engine.connect(info, process.send)
                self.ready.set()
            case "refused":
                process.refusal = message.refused
            case "failed":
                process.failure = failure = message.failed
                if self._job.cluster is not None:  # the process ends later, once it has notified the other hosts
                    again = self._restarts is not None
                    text = f"{failure}; it is being restarted" if again else failure
                    self._engine.disconnect(text, returns=again)
            case "alive_seconds":  # the process reports again within this time
                if self._silence is not None:
                    self._silence.cancel()
                seconds = message.alive_seconds
                cause = f"the engine process did not report for {seconds:g} s"
                self._silence = asyncio.get_running_loop().call_later(seconds, self.give_up, cause)
            case _:
                raise BadFrame(f"{name} from the engine process at the wrong time")

    def _cause(self, process: EngineProcess, code: int) -> str:
        """Why the process ended, as an error for callers."""
        cause = f"the engine process {exit_codes.describe(code)}"
        if process.failure is not None:
            return f"{process.failure}: {cause}"
        if process.wedged is not None:
            cause = f"{process.wedged} and was killed"
        elif process.misread is not None:
            cause = "the engine process sent something that is not a message and was killed"
        cluster, load = self._job.cluster, self._engine.load()
        if cluster is None:
            return cause
        symptom = Symptom(kind=SymptomKind.DISCONNECTED, hosts=(cluster.host,), cause=cause)
        replicas = place(self._job.config, cluster.hosts)
        if len(replicas) > 1:  # whose iterations have numbers of their own
            its = tuple(index for index, stages in enumerate(replicas) if cluster.host in stages)
            symptom = replace(symptom, replicas=its)
        else:
            sequence = load.iterations if load.running else None
            symptom = replace(symptom, stages=replicas[0][cluster.host], sequence=sequence)
        return str(symptom)  # the same text as if the host had reported it


def _log_end(process: EngineProcess, code: int, cause: str) -> None:
    lines = "\n  ".join(process.last_lines) or "nothing"
    why = process.misread or process.refusal
    _log.error(
        "%s%s; process %d %s; its last output:\n  %s",
        cause,
        f" ({why})" if why is not None else "",
        process.pid,
        exit_codes.describe(code),
        lines,
    )
