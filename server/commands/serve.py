"""`jaxserve serve`: serves one model over gRPC and HTTP until a signal."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import socket
import sys
from pathlib import Path

from server.commands import hosts, serve_settings, settings
from server.commands.console import UserError, address, console
from server.commands.engine_start import profiling, start_engine
from server.commands.serve_settings import ServeSettings

HELP = """\
Serves a model over gRPC (service jaxserve.v1.Inference, with health checks and reflection) and over HTTP for clients
of OpenAI and of TGI.

  jaxserve serve                                       the built-in demo model, on 127.0.0.1:50051 and :8000
  jaxserve serve --model DIR --host 0.0.0.0            a checkpoint, to other machines as well
  jaxserve serve --model DIR --max-rows 32 --buckets 16,64,256
  jaxserve serve --hosts 2 --host-id 0 --coordinator 10.0.0.1:9000 --tensor 4 --stages 2      see docs/hosts.md
  jaxserve client "It was a"                           from a second terminal

Without --tls-cert nothing is encrypted, and without --api-keys anyone may call: listen only on networks you trust.
Every setting can also come from a TOML file or the environment (--config, --print-config, JAXSERVE_PORT=...).
SIGTERM or Ctrl-C refuses new requests and lets running ones finish; a second one ends the server at once."""

add_flags = serve_settings.add_flags


def run(args: argparse.Namespace) -> int:
    """Serves until a signal. Returns 0 once drained, 69 if the engine process ended first."""
    if args.print_config:
        print(settings.as_toml(args.settings), end="")
        return 0
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    chosen = serve_settings.from_flags(args)
    if chosen.cluster is not None and chosen.cluster.host:
        if chosen.in_process:
            return hosts.follow(chosen.model, chosen.engine, chosen.cluster)
        return asyncio.run(hosts.follow_in_own_process(chosen.model, chosen.engine, chosen.cluster, chosen.restarts))
    for port in (chosen.port, chosen.http_port, chosen.metrics_port):
        if port is not None:
            _check_free(chosen.host, port)  # now rather than after minutes of loading
    from server import lifecycle

    if not chosen.in_process:
        return asyncio.run(lifecycle.serve_engine_process(chosen, _greet))
    engine = start_engine(chosen.model, chosen.engine, chosen.cluster)
    with profiling(chosen.profile), engine:
        asyncio.run(lifecycle.serve_in_process(chosen, _greet, engine))
    return 0


def _check_free(host: str, port: int) -> None:
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
    except (OSError, UnicodeError) as problem:  # UnicodeError: the text cannot be a host name
        why = getattr(problem, "strerror", None) or problem
        raise UserError(f"cannot listen on {address(host, port)}: {why}") from None


def _greet(chosen: ServeSettings, port: int, http_port: int | None) -> None:
    """Shows where the server listens, and commands that call it."""
    near = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(chosen.host, chosen.host)
    out = console()
    http = "" if http_port is None else f" and on {address(chosen.host, http_port)} (HTTP, a page at /)"
    listening = address(chosen.host, port)
    out.print(f"[bold]ready[/bold] on {listening} (gRPC jaxserve.v1.Inference, health, reflection){http}. Try:")
    out.print(f'\n  {_command()} client --server {address(near, port)} "It was a"\n', markup=False)
    if http_port is not None:
        body = json.dumps({"model": chosen.name, "prompt": "It was a"})
        url = f"http://{address(near, http_port)}/v1/completions"
        out.print(f"  curl {url} -H 'Content-Type: application/json' -d '{body}'\n", markup=False)


def _command() -> str:
    """How to call this program again from the directory where it was called."""
    program = Path(sys.argv[0])
    if program.name != "jaxserve":
        return f"{sys.executable} -m server.commands.cli"
    with contextlib.suppress(ValueError):
        program = program.absolute().relative_to(Path.cwd())
    return str(program)
