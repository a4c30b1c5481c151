"""The steps of a server: open the ports, start the engine, serve, drain, stop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import jaxserve
from jaxserve.text.chat_template import ChatTemplate
from jaxserve.text.tokenizer import Tokenizer
from server import heap
from server.commands import hosts
from server.commands.console import progress_bars, say, say_defaults, say_tools, show, user_errors
from server.engine_process import exit_codes
from server.engine_process.job import EngineJob
from server.engine_process.remote_engine import RemoteEngine
from server.engine_process.supervisor import ENGINE_COMMAND, EngineGone, Supervisor
from server.kv_events_zmq import ZmqPublisher
from server.request_log import RequestLog
from server.serve_settings import ServeSettings
from server.tracing import Tracing

if TYPE_CHECKING:
    from jaxserve.engine import Engine
    from jaxserve.multihost.config import ClusterConfig
    from jaxserve.profiler import Profiler
    from server.engine_client import EngineClient


_SWITCH_SECONDS = 0.001  # after which a thread that parses a long body lets the event loop run


class Greet(Protocol):
    """Announces a ready server: settings, gRPC port, HTTP port or None, has a tokenizer."""

    def __call__(self, chosen: ServeSettings, port: int, http_port: int | None, /, *, has_tokenizer: bool) -> None: ...


class ServerLifecycle:
    """The steps of serving that do not depend on where the engine runs.

    Args:
      settings: of `jaxserve serve`.
      greet: called once the server is ready.
      on_wedged / wedged_seconds: see ServerApp.

    Attributes:
      stopping: set by the first SIGTERM or SIGINT.
      signal: that signal.
    """

    def __init__(
        self,
        settings: ServeSettings,
        greet: Greet,
        engine: EngineClient,
        on_wedged: Callable[[str], None] | None = None,
        wedged_seconds: Callable[[], float] | None = None,
    ) -> None:
        from server.app import ServerApp  # takes a while, in which the engine process starts

        self.settings = settings
        self.stopping, self.signal = asyncio.Event(), 0
        self.app = ServerApp(
            engine,
            name=settings.name,
            aliases=settings.names[1:],
            version=jaxserve.__version__,
            tls=settings.tls,
            keys=settings.keys,
            stall_seconds=settings.stall_seconds,
            allowed_origins=settings.allowed_origins,
            on_wedged=on_wedged,
            wedged_seconds=wedged_seconds,
            kv_events=settings.kv_events is not None,
        )
        self._greet = greet
        self._ports: tuple[int, int | None] = (0, None)

    async def listen(self) -> None:
        """Installs signal handlers and opens the ports. Raises UserError if a port cannot be opened."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        with user_errors():
            self._ports = await self.app.start(self.settings.host, self.settings.port, self.settings.http_port)

    def _on_signal(self, number: int) -> None:
        if self.stopping.is_set():
            os._exit(128 + number)  # a second signal does not wait for the running iteration
        self.signal = number
        self.stopping.set()

    def greet(self) -> None:
        """Tells that the server is ready."""
        heap.settle()
        tokenizer = self.app.handler.engine.tokenizer
        say_defaults(self.app.handler.engine.request_defaults)
        say_tools(None if tokenizer is None else tokenizer.chat_template)
        self._greet(self.settings, *self._ports, has_tokenizer=tokenizer is not None)

    async def drain(self) -> None:
        """Stops accepting calls and waits up to `--drain-seconds` for active ones to finish."""
        seconds, calls = self.settings.drain_seconds, self.app.handler.calls
        if calls.num_requests:
            say(f"draining {calls.num_requests} requests, at most {seconds:g} s (again to end at once)")
        left = await self.app.drain(seconds)
        say(f"stopped; {left} requests were cut short" if left else "stopped")

    @contextlib.contextmanager
    def observing(self) -> Iterator[None]:
        """Runs the request log, traces, metrics port and KV events of the settings."""
        chosen, handler = self.settings, self.app.handler
        with contextlib.ExitStack() as stack:
            with user_errors():
                observers: list[RequestLog | Tracing] = []
                if chosen.request_log is not None:
                    tokenizer = handler.engine.tokenizer
                    observers.append(RequestLog(chosen.request_log, tokenizer=tokenizer, prompts=chosen.log_prompts))
                if chosen.traces:
                    observers.append(Tracing(model=chosen.name))
                for observer in observers:
                    handler.observers.append(observer)
                    stack.callback(observer.close)
                if chosen.metrics_port is not None:
                    stack.callback(self.app.metrics.serve(chosen.host, chosen.metrics_port))
                if handler.kv_events is not None and chosen.kv_events != "grpc":
                    publisher = ZmqPublisher(
                        handler.kv_events,
                        str(chosen.kv_events),
                        replay=chosen.kv_events_replay,
                        topic=chosen.kv_events_topic,
                    )
                    stack.callback(publisher.close)
            yield


async def serve_in_process(settings: ServeSettings, greet: Greet, engine: Engine, profiler: Profiler | None) -> None:
    """Serves a started engine of this process until a signal."""
    with user_errors():
        _use_template(settings, engine.tokenizer)
    lifecycle = ServerLifecycle(settings, greet, engine)
    if profiler is not None:
        lifecycle.app.handler.profile = partial(asyncio.to_thread, profiler.set)
    with lifecycle.observing():
        await lifecycle.listen()
        lifecycle.greet()
        await lifecycle.stopping.wait()
        await lifecycle.drain()


async def serve_engine_process(settings: ServeSettings, greet: Greet) -> int:
    """Serves an engine that runs in its own process until a signal.

    The ports open at once; health reports NOT_SERVING until the engine is ready.

    Returns:
      The exit code: 0 after a drain, 130 after a Ctrl-C before the engine was ready, 69 if the engine process ended
      first (with several hosts, that process's code).

    Raises:
      UserError: the settings or the checkpoint do not allow the engine to start.
    """
    from jaxserve.generation import defaults

    sys.setswitchinterval(_SWITCH_SECONDS)
    with user_errors():
        recommended = defaults.read(settings.model, settings.engine)
        tokenizer = Tokenizer.from_directory(settings.model)
        _use_template(settings, tokenizer)
        engine = RemoteEngine(settings.engine, tokenizer, recommended)
    with contextlib.ExitStack() as stack, contextlib.ExitStack() as start:
        supervisor = Supervisor(
            engine,
            engine_job(settings),
            restarts=settings.restarts,
            command=ENGINE_COMMAND,
            progress=start.enter_context(progress_bars()),
        )
        running = asyncio.create_task(supervisor.run())
        await asyncio.sleep(0)  # starts the engine process
        try:
            lifecycle = _lifecycle(settings, greet, engine, supervisor)
            if settings.profile is not None:
                lifecycle.app.handler.profile = engine.profile
            stack.enter_context(lifecycle.observing())
            await lifecycle.listen()
            if settings.cluster is not None:  # the engine process writes its flight record
                asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, supervisor.signal, signal.SIGUSR2)
            await _wait_for_first(running, supervisor.ready, lifecycle.stopping)
            start.close()
            if supervisor.ready.is_set():
                await lifecycle.app.check_health()
                show(engine.report, model=settings.name)
                lifecycle.greet()
                await _wait_for_first(running, lifecycle.stopping)
            await (lifecycle.drain() if lifecycle.stopping.is_set() else lifecycle.app.stop())
        finally:
            await supervisor.close()
        try:
            await running
        except EngineGone as problem:
            say(f"error: {problem}")
            return problem.exit_code
        if lifecycle.signal == signal.SIGINT and not supervisor.ready.is_set():
            return 128 + signal.SIGINT
    return exit_codes.ENDED


def _use_template(settings: ServeSettings, tokenizer: Tokenizer | None) -> None:
    """Replaces a checkpoint's chat template and call form by the settings'. Raises ValueError."""
    if settings.chat_template is not None:
        if tokenizer is None:
            raise ValueError("--chat-template needs a tokenizer, and this checkpoint has none")
        tokenizer.chat_template = ChatTemplate.from_directory(settings.model, Path(settings.chat_template))
    if settings.tool_parser is not None:
        if tokenizer is None or tokenizer.chat_template is None:
            raise ValueError("--tool-parser needs a chat template, and this checkpoint has none")
        tokenizer.chat_template.tool_form = settings.tool_parser


def engine_job(settings: ServeSettings) -> EngineJob:
    profile = None if settings.profile is None else str(settings.profile)
    return EngineJob.of(
        str(settings.model),
        settings.engine,
        profile,
        settings.cluster,
        log_level=settings.log_level,
        kv_events=settings.kv_events is not None,
    )


def _lifecycle(settings: ServeSettings, greet: Greet, engine: RemoteEngine, supervisor: Supervisor) -> ServerLifecycle:
    """Serves an engine process that the supervisor can kill when it hangs."""
    cluster = settings.cluster
    if cluster is None:
        on_wedged = supervisor.give_up if settings.restarts is not None else None
        return ServerLifecycle(settings, greet, engine, on_wedged)
    # The other hosts end when this one is late, so this engine never recovers alone.
    return ServerLifecycle(settings, greet, engine, supervisor.give_up, wedged_seconds(cluster, engine))


def wedged_seconds(cluster: ClusterConfig | None, engine: RemoteEngine) -> Callable[[], float] | None:
    """How long host 0 of several may complete no iteration; None on one host."""

    def deadline() -> float:
        assert cluster is not None
        slowest = max(cost.milliseconds for cost in engine.report.buckets) / 1000
        return cluster.deadline(slowest) + hosts.OWN_SECONDS

    return None if cluster is None else deadline


async def _wait_for_first(running: asyncio.Task[None], *events: asyncio.Event) -> None:
    """Returns once the task has ended or one of the events is set."""
    waiting = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait([running, *waiting], return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waiting:
            task.cancel()
