"""`jaxserve serve`: serves one model over gRPC and HTTP until a signal."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import sys
from pathlib import Path

from jaxserve.profiler import Profiler
from server import ports, tls
from server.auth import ApiKeys
from server.commands import flags, hosts, hub, interrupt, settings
from server.commands.console import check_folder, console, user_errors
from server.commands.engine_start import add_model_flags, model_directory, start_engine
from server.serve_settings import SERVE_PARAMS, ServeSettings

HELP = """\
Serves a model over gRPC (service jaxserve.v1.Inference, with health checks and reflection) and over HTTP for clients
of OpenAI and of TGI.

  jaxserve serve                                       the built-in demo model, on 127.0.0.1:50051 and :8000
  jaxserve serve --model DIR --host 0.0.0.0            a checkpoint, to other machines as well
  jaxserve serve --model Qwen/Qwen3-0.6B               a checkpoint of the Hugging Face Hub
  jaxserve serve --model DIR --max-rows 32 --buckets 16,64,256
  jaxserve serve --hosts 2 --host-id 0 --coordinator 10.0.0.1:9000 --hosts-secret FILE       see docs/hosts.md
  jaxserve client "It was a"                           from a second terminal

Without --tls-cert nothing is encrypted, and without --api-keys anyone may call: listen only on networks you trust.
Every setting can also come from a TOML file or the environment (--config, --print-config, JAXSERVE_PORT=...).
SIGTERM or Ctrl-C refuses new requests and lets running ones finish; a second one ends the server at once."""


def from_flags(args: argparse.Namespace) -> ServeSettings:
    """The settings that the flags describe. Raises UserError for a wrong flag."""
    check_folder("--profile", args.profile)
    with user_errors():
        model, cluster = model_directory(args).resolve(), hosts.from_flags(args)
        answers_calls = cluster is None or cluster.host == 0
        return ServeSettings(
            model=model,
            engine=flags.engine_config(args),
            cluster=cluster,
            tls=tls.from_flags(args) if answers_calls else None,
            keys=ApiKeys(args.api_keys) if answers_calls and args.api_keys is not None else None,
            profile=args.profile,
            names=tuple(args.served_model_name or [hub.name_of(model)]),
            **flags.read(args, SERVE_PARAMS),
        )


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_model_flags(parser)
    flags.group(parser, "model").add_argument(
        "--served-model-name",
        nargs="+",
        metavar="NAME",
        help="names by which calls may name the model; the first is in answers (default: the checkpoint's)",
    )
    server, security = flags.group(parser, "server"), flags.group(parser, "security")
    for each in SERVE_PARAMS.values():
        flags.add(flags.group(parser, each.group or "server"), each)
    server.add_argument(
        "--profile",
        type=Path,
        metavar="DIR",
        help="allow jax profiler captures of this host, and write them here: POST /start_profile and /stop_profile",
    )
    security.add_argument(
        "--api-keys",
        type=Path,
        metavar="FILE.toml",
        help="require one of these API keys (default: require none); the file is read again when it changes",
    )
    tls.add_flags(security)
    hosts.add_flags(parser)
    others = flags.group(parser, "settings")
    settings.add_flags(others)
    others.add_argument("-h", "--help", action="help", help="show this help and exit")


def run(args: argparse.Namespace) -> int:
    """Serves until a signal. Returns 0 once drained, 69 if the engine process ended first."""
    if args.print_config:
        print(settings.as_toml(args.settings), end="")
        return 0
    chosen = from_flags(args)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=chosen.log_level.upper())
    if chosen.cluster is not None and chosen.cluster.host:
        if chosen.in_process:
            return hosts.follow(chosen.model, chosen.engine, chosen.cluster, chosen.profile)
        return asyncio.run(
            hosts.follow_in_own_process(chosen.model, chosen.engine, chosen.cluster, chosen.restarts, chosen.profile)
        )
    with user_errors():
        for port in (chosen.port, chosen.http_port, chosen.metrics_port):
            if port is not None:
                ports.check_free(chosen.host, port)  # now, not after minutes of loading
    from server import lifecycle

    if not chosen.in_process:
        interrupt.end_at_once()  # until the server has handlers of its own; nothing runs yet
        return asyncio.run(lifecycle.serve_engine_process(chosen, _greet))
    engine = start_engine(chosen.model, chosen.engine, chosen.cluster)
    profiler = None if chosen.profile is None else Profiler(chosen.profile, tell=engine.tell_profile)
    with contextlib.closing(profiler) if profiler is not None else contextlib.nullcontext(), engine:
        asyncio.run(lifecycle.serve_in_process(chosen, _greet, engine, profiler))
    return 0


def _greet(chosen: ServeSettings, port: int, http_port: int | None, *, has_tokenizer: bool) -> None:
    """Shows where the server listens, and commands that call it.

    Args:
      has_tokenizer: whether texts can be sent, and not only token ids.
    """
    near = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(chosen.host, chosen.host)
    out = console()
    http = "" if http_port is None else f" and on {ports.address(chosen.host, http_port)} (HTTP, a page at /)"
    listening = ports.address(chosen.host, port)
    out.print(f"[bold]ready[/bold] on {listening} (gRPC jaxserve.v1.Inference, health, reflection){http}. Try:")
    if not has_tokenizer:
        out.print("\n[bold]This checkpoint has no tokenizer[/bold]: prompts and answers are token ids.")
    if has_tokenizer:
        out.print(f'\n  {_command()} client --server {ports.address(near, port)} "It was a"\n', markup=False)
    if http_port is not None:
        prompt = {"prompt": "It was a"} if has_tokenizer else {"prompt": [1, 2, 3], "return_token_ids": True}
        body = json.dumps({"model": chosen.name} | prompt)
        url = f"http://{ports.address(near, http_port)}/v1/completions"
        out.print(f"  curl {url} -H 'Content-Type: application/json' -d '{body}'\n", markup=False)


def _command() -> str:
    """The command that runs this program again from the current directory."""
    program = Path(sys.argv[0])
    if program.name != "jaxserve":
        return f"{sys.executable} -m server.commands.cli"
    with contextlib.suppress(ValueError):
        program = program.absolute().relative_to(Path.cwd())
    return str(program)
