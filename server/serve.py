"""`jaxserve serve`: gRPC and HTTP around one engine, from its first port to its last drained request."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from server import auth, hosts, settings, tls
from server.report import UserError, console, say
from server.start import add_model_flags, load_engine, mending, model_directory, profiling

if TYPE_CHECKING:
    from jaxserve.engine import Engine
    from server.http.template import ChatTemplate
    from server.surface import Surface

HELP = """\
Serves a model over gRPC (service jaxserve.v1.Inference, with health checks and reflection) and over HTTP, as clients
of OpenAI and of TGI expect it.

  jaxserve serve                                       the built-in demo model, on 127.0.0.1:50051 and :8000
  jaxserve serve --model DIR --host 0.0.0.0            a checkpoint, to other machines as well
  jaxserve serve --model DIR --max-rows 32 --buckets 16,64,256
  jaxserve serve --hosts 2 --host-id 0 --coordinator 10.0.0.1:9000 --tensor 4 --stages 2      see docs/hosts.md
  jaxserve client "It was a"                           from a second terminal

Without --tls-cert there is no encryption, without --api-keys anybody may call: let it listen on networks you trust
only. Every setting can come from a TOML file or the environment as well (--config, --print-config, JAXSERVE_PORT=...).
SIGTERM or Ctrl-C refuses new requests and lets running ones finish; a second one ends at once."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `jaxserve serve`."""
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument(
        "--port", type=int, default=50051, help="port for gRPC; 0 takes any that is free (default: %(default)s)"
    )
    parser.add_argument(
        "--http-port",
        type=_port_or_off,
        default=8000,
        metavar="PORT|off",
        help="port for HTTP, likewise; off: gRPC alone (default: %(default)s)",
    )
    parser.add_argument(
        "--drain-seconds",
        type=float,
        metavar="S",
        default=30.0,
        help="how long running requests may go on after SIGTERM (default: %(default)g)",
    )
    parser.add_argument(
        "--stall-seconds",
        type=float,
        metavar="S",
        help="how long the engine may have work and complete no iteration before health says so (default: four times "
        "what the largest bucket takes, and at least 2)",
    )
    group = parser.add_argument_group("observing")
    group.add_argument(
        "--metrics-port",
        type=int,
        metavar="N",
        help="a port for Prometheus' scrapers: /metrics, without TLS and without keys (default: none)",
    )
    group.add_argument("--request-log", metavar="FILE|-", help="a line of JSON for every request (default: none)")
    group.add_argument("--log-prompts", action="store_true", help="put prompts and answers into it as well")
    group.add_argument(
        "--traces",
        action="store_true",
        help="OpenTelemetry spans of every request, sent where OTEL_EXPORTER_OTLP_ENDPOINT says; takes jaxserve[otel]",
    )
    settings.add_flags(parser)
    parser.add_argument(
        "--api-keys",
        type=Path,
        metavar="FILE.toml",
        help="ask every caller for one of these keys (default: ask for none); read again when it changes",
    )
    tls.add_flags(parser)
    hosts.add_flags(parser)
    add_model_flags(parser)


def _port_or_off(text: str) -> int | None:
    return None if text == "off" else int(text)


def run(args: argparse.Namespace) -> int:
    """Serves until a signal. Returns 0 once drained."""
    if args.print_config:
        print(settings.as_toml(args.settings), end="")
        return 0
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for flag, port in (("--port", args.port), ("--http-port", args.http_port)):
        if port is not None and not 0 <= port <= 65535:
            raise UserError(f"{flag} {port} is not a port; it must be from 0 to 65535")
    if not args.drain_seconds >= 0:
        raise UserError(f"--drain-seconds {args.drain_seconds} is negative")
    if args.log_prompts and args.request_log is None:
        raise UserError("--log-prompts needs --request-log")
    path = model_directory(args).resolve()
    cluster = hosts.from_flags(args)
    if cluster is not None and cluster.host:
        return hosts.follow(args, cluster)
    for port in (args.port, args.http_port, args.metrics_port):
        if port is not None:
            _check_free(args.host, port)  # now rather than after minutes of loading
    from server.http.template import ChatTemplate

    with mending():
        args.tls = tls.from_flags(args)
        args.keys = auth.ApiKeys(args.api_keys) if args.api_keys is not None else None
        chat_template = ChatTemplate.from_directory(path)
    engine = load_engine(args) if cluster is None else hosts.lead(args, cluster)
    with profiling(args), engine:
        asyncio.run(_serve(engine, args, path.name, chat_template))
    return 0


def _check_free(host: str, port: int) -> None:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as problem:
        raise UserError(f"cannot listen on {_join(host, port)}: {problem.strerror or problem}") from None


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def _serve(engine: Engine, args: argparse.Namespace, name: str, chat_template: ChatTemplate | None) -> None:
    from server.surface import Surface

    surface = Surface(
        engine,
        name=name,
        version=metadata.version("jaxserve"),
        chat_template=chat_template,
        tls=args.tls,
        keys=args.keys,
        stall_seconds=args.stall_seconds,
    )
    with _observing(surface, args, name):
        await _serve_until_told(surface, args, name)


@contextlib.contextmanager
def _observing(surface: Surface, args: argparse.Namespace, name: str) -> Iterator[None]:
    """Request log, traces and the scrapers' port, as asked for."""
    from server.request_log import RequestLog
    from server.tracing import Tracing

    with contextlib.ExitStack() as stack:
        with mending():
            watching: list[RequestLog | Tracing] = []
            if args.request_log is not None:
                tokenizer = surface.door.engine.tokenizer
                watching.append(RequestLog(args.request_log, tokenizer=tokenizer, prompts=args.log_prompts))
            if args.traces:
                watching.append(Tracing(model=name))
            for observer in watching:
                surface.door.observers.append(observer)
                stack.callback(observer.close)
            if args.metrics_port is not None:
                stack.callback(surface.metrics.serve(args.host, args.metrics_port))
        yield


async def _serve_until_told(surface: Surface, args: argparse.Namespace, name: str) -> None:
    try:
        ports = await surface.start(args.host, args.port, args.http_port)
    except (RuntimeError, OSError) as problem:
        raise UserError(f"cannot listen on {_join(args.host, args.port)} and {args.http_port}: {problem}") from None
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _on_signal, number, stopping)
    _greet(args.host, name, *ports)
    await stopping.wait()
    if surface.door.num_alive:
        say(f"draining {surface.door.num_alive} requests, at most {args.drain_seconds:g} s (again to end at once)")
    left = await surface.drain(args.drain_seconds)
    say(f"stopped; {left} requests were cut short" if left else "stopped")


def _on_signal(number: int, stopping: asyncio.Event) -> None:
    if stopping.is_set():
        os._exit(128 + number)  # asked twice: not even the engine's iteration is waited for
    stopping.set()


def _greet(host: str, name: str, port: int, http_port: int | None) -> None:
    near = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    out = console()
    http = "" if http_port is None else f" and on {_join(host, http_port)} (HTTP, a page at /)"
    out.print(f"[bold]ready[/bold] on {_join(host, port)} (gRPC jaxserve.v1.Inference, health, reflection){http}. Try:")
    out.print(f'\n  {_command()} client --server {_join(near, port)} "It was a"\n', markup=False)
    if http_port is not None:
        body = json.dumps({"model": name, "prompt": "It was a"})
        url = f"http://{_join(near, http_port)}/v1/completions"
        out.print(f"  curl {url} -H 'Content-Type: application/json' -d '{body}'\n", markup=False)


def _command() -> str:
    """How to call this very program again from the folder it was called in."""
    program = Path(sys.argv[0])
    if program.name != "jaxserve":
        return f"{sys.executable} -m server.cli"
    with contextlib.suppress(ValueError):
        program = program.absolute().relative_to(Path.cwd())
    return str(program)
