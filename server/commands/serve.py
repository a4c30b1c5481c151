"""`jaxserve serve`: gRPC and HTTP around one engine, from its first port to its last drained request."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import socket
import sys
from pathlib import Path

from server import auth, tls
from server.commands import flags, hosts, settings
from server.commands.console import UserError, address, check_folder, console, mending
from server.commands.engine_start import add_model_flags, add_profile_flag, load_engine, model_directory, profiling
from server.engine_process.supervisor import RestartPolicy

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
        help="how long the engine may have work and complete no iteration before health says so (default: what the "
        "iteration that is due was measured to take and 3 more, at most four times that, and at least 2)",
    )
    parser.add_argument(
        "--front",
        choices=("process", "thread"),
        default="process",
        help="whether callers are answered in a process of their own, or by a thread of the engine's "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--supervise",
        action="store_true",
        help="start the engine's process again when it dies or is wedged; requests that have not begun wait for it",
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
    add_profile_flag(parser)
    add_model_flags(parser)


def _port_or_off(text: str) -> int | None:
    if text == "off":
        return None
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither off nor a port") from None


def run(args: argparse.Namespace) -> int:
    """Serves until a signal. Returns 0 once drained, 69 where the engine's process has ended before."""
    if args.print_config:
        print(settings.as_toml(args.settings), end="")
        return 0
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    ports = (("--port", args.port), ("--http-port", args.http_port), ("--metrics-port", args.metrics_port))
    for flag, port in ports:
        if port is not None and not 0 <= port <= 65535:
            raise UserError(f"{flag} {port} is not a port; it must be from 0 to 65535")
    if not args.drain_seconds >= 0:
        raise UserError(f"--drain-seconds {args.drain_seconds} is negative")
    if args.stall_seconds is not None and not args.stall_seconds > 0:
        raise UserError(f"--stall-seconds {args.stall_seconds:g} is no time above 0")
    if args.supervise and args.front == "thread":
        raise UserError("--supervise needs an engine in a process of its own; leave --front thread out")
    if args.log_prompts and args.request_log is None:
        raise UserError("--log-prompts needs --request-log")
    check_folder("--profile", args.profile)
    path = model_directory(args).resolve()
    cluster = hosts.from_flags(args)
    if cluster is not None and cluster.host:
        with mending():
            config = flags.engine_config(args)
        if args.front == "process":
            restarts = RestartPolicy() if args.supervise else None
            return asyncio.run(hosts.follow_behind(path, config, cluster, restarts))
        return hosts.follow(path, config, cluster)
    for _, port in ports:
        if port is not None:
            _check_free(args.host, port)  # now rather than after minutes of loading
    with mending():
        args.tls = tls.from_flags(args)
        args.keys = auth.ApiKeys(args.api_keys) if args.api_keys is not None else None
        config = flags.engine_config(args)
    from server.lifecycle import ServerLifecycle, serve_engine_process, serve_in_process

    lifecycle = ServerLifecycle(args, name=path.name, greet=_greet)
    if args.front == "process":
        return asyncio.run(serve_engine_process(lifecycle, path, config, cluster))
    engine = load_engine(args, cluster)
    with profiling(args.profile), engine:
        asyncio.run(serve_in_process(lifecycle, engine))
    return 0


def _check_free(host: str, port: int) -> None:
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
    except (OSError, UnicodeError) as problem:  # the latter of a name that cannot be one
        why = getattr(problem, "strerror", None) or problem
        raise UserError(f"cannot listen on {address(host, port)}: {why}") from None


def _greet(host: str, name: str, port: int, http_port: int | None) -> None:
    near = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    out = console()
    http = "" if http_port is None else f" and on {address(host, http_port)} (HTTP, a page at /)"
    out.print(
        f"[bold]ready[/bold] on {address(host, port)} (gRPC jaxserve.v1.Inference, health, reflection){http}. Try:"
    )
    out.print(f'\n  {_command()} client --server {address(near, port)} "It was a"\n', markup=False)
    if http_port is not None:
        body = json.dumps({"model": name, "prompt": "It was a"})
        url = f"http://{address(near, http_port)}/v1/completions"
        out.print(f"  curl {url} -H 'Content-Type: application/json' -d '{body}'\n", markup=False)


def _command() -> str:
    """How to call this very program again from the folder it was called in."""
    program = Path(sys.argv[0])
    if program.name != "jaxserve":
        return f"{sys.executable} -m server.commands.cli"
    with contextlib.suppress(ValueError):
        program = program.absolute().relative_to(Path.cwd())
    return str(program)
