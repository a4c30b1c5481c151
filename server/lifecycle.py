"""Serving from the first port to the last drained request: with the engine in this process, or behind it in one of its
own."""

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
from server.engine_process.job import Job
from server.engine_process.remote_engine import RemoteEngine
from server.engine_process.supervisor import ENGINE_COMMAND, EngineGone, Restarts, Supervisor

if TYPE_CHECKING:
    from jaxserve.config import EngineConfig
    from jaxserve.engine import Engine
    from jaxserve.multihost.config import ClusterConfig
    from jaxserve.text.tokenizer import Tokenizer
    from server.app import ServerApp
    from server.served_engine import ServedEngine


class Serving:
    """What a server offers, whatever its engine.

    Args:
      args: flags of `jaxserve serve`; `tls` and `keys` have been read.
      name: what the model is called.
      greet: tells the person (host, model, port, HTTP port or None) once the server is ready.
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

    def surface(
        self,
        engine: ServedEngine,
        on_wedged: Callable[[str], None] | None = None,
        wedged_seconds: Callable[[], float] | None = None,
    ) -> ServerApp:
        """Every protocol on an engine."""
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

    async def listen(self, surface: ServerApp) -> None:
        """Opens the ports, and takes signals from now on."""
        host, port, http_port = self.args.host, self.args.port, self.args.http_port
        try:
            self._ports = await surface.start(host, port, http_port)
        except (RuntimeError, OSError) as problem:
            raise UserError(f"cannot listen on {address(host, port)} and {http_port}: {problem}") from None
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: int) -> None:
        if self.stopping.is_set():
            os._exit(128 + number)  # asked twice: not even the engine's iteration is waited for
        self.stopping.set()

    def greet(self) -> None:
        """Tells that the engine is ready."""
        self._greet(self.args.host, self.name, *self._ports)

    async def drain(self, surface: ServerApp) -> None:
        """Has calls under way end, for as long as they may."""
        seconds = self.args.drain_seconds
        if surface.handler.num_alive:
            say(f"draining {surface.handler.num_alive} requests, at most {seconds:g} s (again to end at once)")
        left = await surface.drain(seconds)
        say(f"stopped; {left} requests were cut short" if left else "stopped")

    @contextlib.contextmanager
    def observing(self, surface: ServerApp) -> Iterator[None]:
        """Request log, traces and the scrapers' port, as asked for."""
        from server.request_log import RequestLog
        from server.tracing import Tracing

        args = self.args
        with contextlib.ExitStack() as stack:
            with mending():
                watching: list[RequestLog | Tracing] = []
                if args.request_log is not None:
                    tokenizer = surface.handler.engine.tokenizer
                    watching.append(RequestLog(args.request_log, tokenizer=tokenizer, prompts=args.log_prompts))
                if args.traces:
                    watching.append(Tracing(model=self.name))
                for observer in watching:
                    surface.handler.observers.append(observer)
                    stack.callback(observer.close)
                if args.metrics_port is not None:
                    stack.callback(surface.metrics.serve(args.host, args.metrics_port))
            yield


async def in_this_process(serving: Serving, engine: Engine) -> None:
    """Serves with a started engine until a signal."""
    surface = serving.surface(engine)
    with serving.observing(surface):
        await serving.listen(surface)
        serving.greet()
        await serving.stopping.wait()
        await serving.drain(surface)


async def before_a_process(
    serving: Serving, model: Path, config: EngineConfig, cluster: ClusterConfig | None = None
) -> int:
    """Serves with an engine in a process of its own until a signal. The ports are open from the start, and health says
    NOT_SERVING until the engine is ready.

    Args:
      cluster: this host's place among several, which is the first.

    Returns:
      The exit code: 0 once drained, 69 where the engine's process had ended before (with several hosts its own).

    Raises:
      UserError: the engine cannot be started as it was asked for.
    """
    args = serving.args
    engine = RemoteEngine(config, read_tokenizer(model))
    with contextlib.ExitStack() as stack, contextlib.ExitStack() as start:
        supervisor = Supervisor(
            engine,
            Job.of(str(model), config, None if args.profile is None else str(args.profile), cluster),
            restarts=Restarts() if args.supervise else None,
            command=ENGINE_COMMAND,
            progress=start.enter_context(starting()),
        )
        if cluster is None:
            surface = serving.surface(engine, supervisor.give_up if args.supervise else None)
        else:  # whose others end when it is late: alone it never goes on

            def deadline() -> float:
                slowest = max(cost.milliseconds for cost in engine.report.buckets) / 1000
                return cluster.deadline(slowest) + hosts.OWN_SECONDS

            surface = serving.surface(engine, supervisor.give_up, deadline)
        stack.enter_context(serving.observing(surface))
        await serving.listen(surface)
        if cluster is not None:  # has the engine process write what its flight recorder holds
            asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, supervisor.signal, signal.SIGUSR2)
        running = asyncio.create_task(supervisor.run())
        try:
            await _first(running, supervisor.ready, serving.stopping)
            start.close()
            if supervisor.ready.is_set():
                await surface.look()
                show(engine.report, model=serving.name)
                serving.greet()
                await _first(running, serving.stopping)
            await (serving.drain(surface) if serving.stopping.is_set() else surface.stop())
        finally:
            await supervisor.close()
        try:
            await running
        except EngineGone as problem:
            say(f"error: {problem}")
            return problem.exit_code
    return exit_codes.ENDED


def read_tokenizer(model: Path) -> Tokenizer | None:
    """The tokenizer of a checkpoint, with its chat template. Raises UserError if it cannot be read."""
    from jaxserve.text import tokenizer

    with mending():
        return tokenizer.Tokenizer.from_directory(model)


async def _first(running: asyncio.Task[None], *events: asyncio.Event) -> None:
    """Returns when one of these has happened."""
    waiting = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait([running, *waiting], return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waiting:
            task.cancel()
