"""Life of a server: open the ports, start the engine (here or in its own process), drain, stop."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from server.commands import hosts
from server.commands.console import UserError, address, mending, say, show, starting
from server.engine_process import exit_codes
from server.engine_process.job import EngineJob
from server.engine_process.remote_engine import RemoteEngine
from server.engine_process.supervisor import ENGINE_COMMAND, EngineGone, RestartPolicy, Supervisor

if TYPE_CHECKING:
    from jaxserve.config import EngineConfig
    from jaxserve.engine import Engine
    from jaxserve.multihost.config import ClusterConfig
    from jaxserve.text.tokenizer import Tokenizer
    from server.app import ServerApp
    from server.engine_client import EngineClient


class ServerLifecycle:
    """The steps of serving that do not depend on where the engine runs.

    Args:
      args: flags of `jaxserve serve`, with `tls` and `keys` already loaded.
      name: served name of the model.
      greet: called with (host, model, port, HTTP port or None) once the server is ready.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        *,
        name: str,
        greet: Callable[[str, str, int, int | None], None],
    ) -> None:
        self.args, self.name = args, name
        self.stopping = asyncio.Event()
        self._greet = greet
        self._ports: tuple[int, int | None] = (0, None)

    def make_app(
        self,
        engine: EngineClient,
        on_wedged: Callable[[str], None] | None = None,
        wedged_seconds: Callable[[], float] | None = None,
    ) -> ServerApp:
        """A server of every protocol on an engine."""
        from server.app import ServerApp

        return ServerApp(
            engine,
            name=self.name,
            version=metadata.version("jaxserve"),
            tls=self.args.tls,
            keys=self.args.keys,
            stall_seconds=self.args.stall_seconds,
            on_wedged=on_wedged,
            wedged_seconds=wedged_seconds,
        )

    async def listen(self, app: ServerApp) -> None:
        """Opens the ports and installs signal handlers. Raises UserError if a port cannot be opened."""
        host, port, http_port = self.args.host, self.args.port, self.args.http_port
        try:
            self._ports = await app.start(host, port, http_port)
        except (RuntimeError, OSError) as problem:
            raise UserError(f"cannot listen on {address(host, port)} and {http_port}: {problem}") from None
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: int) -> None:
        if self.stopping.is_set():
            os._exit(128 + number)  # a second signal: do not even wait for the running iteration
        self.stopping.set()

    def greet(self) -> None:
        """Reports that the engine is ready."""
        self._greet(self.args.host, self.name, *self._ports)

    async def drain(self, app: ServerApp) -> None:
        """Stops accepting calls and waits up to `--drain-seconds` for active ones to finish."""
        seconds = self.args.drain_seconds
        if app.handler.num_alive:
            say(f"draining {app.handler.num_alive} requests, at most {seconds:g} s (again to end at once)")
        left = await app.drain(seconds)
        say(f"stopped; {left} requests were cut short" if left else "stopped")

    @contextlib.contextmanager
    def observing(self, app: ServerApp) -> Iterator[None]:
        """Runs the request log, traces and the metrics port that the flags ask for."""
        from server.request_log import RequestLog
        from server.tracing import Tracing

        args = self.args
        with contextlib.ExitStack() as stack:
            with mending():
                watching: list[RequestLog | Tracing] = []
                if args.request_log is not None:
                    tokenizer = app.handler.engine.tokenizer
                    watching.append(RequestLog(args.request_log, tokenizer=tokenizer, prompts=args.log_prompts))
                if args.traces:
                    watching.append(Tracing(model=self.name))
                for observer in watching:
                    app.handler.observers.append(observer)
                    stack.callback(observer.close)
                if args.metrics_port is not None:
                    stack.callback(app.metrics.serve(args.host, args.metrics_port))
            yield


async def serve_in_process(lifecycle: ServerLifecycle, engine: Engine) -> None:
    """Serves a started engine of this process until a signal."""
    app = lifecycle.make_app(engine)
    with lifecycle.observing(app):
        await lifecycle.listen(app)
        lifecycle.greet()
        await lifecycle.stopping.wait()
        await lifecycle.drain(app)


async def serve_engine_process(
    lifecycle: ServerLifecycle, model: Path, config: EngineConfig, cluster: ClusterConfig | None = None
) -> int:
    """Serves an engine that runs in its own process until a signal. The ports open at once; health reports NOT_SERVING
    until the engine is ready.

    Args:
      cluster: placement of this host (host 0), where several share the model.

    Returns:
      The exit code: 0 after a drain, 69 if the engine process ended first (with several hosts, that process's code).

    Raises:
      UserError: the settings or the checkpoint do not allow the engine to start.
    """
    args = lifecycle.args
    engine = RemoteEngine(config, read_tokenizer(model))
    with contextlib.ExitStack() as stack, contextlib.ExitStack() as start:
        supervisor = Supervisor(
            engine,
            EngineJob.of(str(model), config, None if args.profile is None else str(args.profile), cluster),
            restarts=RestartPolicy() if args.supervise else None,
            command=ENGINE_COMMAND,
            progress=start.enter_context(starting()),
        )
        if cluster is None:
            app = lifecycle.make_app(engine, supervisor.give_up if args.supervise else None)
        else:  # the other hosts end when this one is late, so this engine never recovers alone

            def deadline() -> float:
                slowest = max(cost.milliseconds for cost in engine.report.buckets) / 1000
                return cluster.deadline(slowest) + hosts.OWN_SECONDS

            app = lifecycle.make_app(engine, supervisor.give_up, deadline)
        stack.enter_context(lifecycle.observing(app))
        await lifecycle.listen(app)
        if cluster is not None:  # the engine process writes its flight record
            asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, supervisor.signal, signal.SIGUSR2)
        running = asyncio.create_task(supervisor.run())
        try:
            await _wait_for_first(running, supervisor.ready, lifecycle.stopping)
            start.close()
            if supervisor.ready.is_set():
                await app.check_health()
                show(engine.report, model=lifecycle.name)
                lifecycle.greet()
                await _wait_for_first(running, lifecycle.stopping)
            await (lifecycle.drain(app) if lifecycle.stopping.is_set() else app.stop())
        finally:
            await supervisor.close()
        try:
            await running
        except EngineGone as problem:
            say(f"error: {problem}")
            return problem.exit_code
    return exit_codes.ENDED


def read_tokenizer(model: Path) -> Tokenizer | None:
    """Loads a checkpoint's tokenizer with its chat template. Raises UserError if it cannot be read."""
    from jaxserve.text import tokenizer

    with mending():
        return tokenizer.Tokenizer.from_directory(model)


async def _wait_for_first(running: asyncio.Task[None], *events: asyncio.Event) -> None:
    """Returns once the task has ended or one of the events is set."""
    waiting = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait([running, *waiting], return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waiting:
            task.cancel()
