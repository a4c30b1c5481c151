"""The settings of `jaxserve serve`: its flags, and the checked values that they give."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from jaxserve.config import EngineConfig
from jaxserve.multihost.config import ClusterConfig
from server import tls
from server.auth import ApiKeys
from server.commands import flags, hosts, settings
from server.commands.console import UserError, check_folder, user_errors
from server.commands.engine_start import add_model_flags, add_profile_flag, model_directory
from server.engine_process.supervisor import RestartPolicy
from server.tls import Tls


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """Everything that `jaxserve serve` was asked for.

    Attributes:
      model: the checkpoint directory.
      engine: settings of the engine.
      cluster: this host's place among several; None where it serves alone.
      host: address to listen on.
      port / http_port / metrics_port: 0 takes a free port; None opens none.
      tls / keys: None serves without encryption, and without API keys. Hosts that answer no calls have neither.
      in_process: the engine runs in a thread of this process.
      restarts: how often a failed engine process is started again; None never does.
      drain_seconds: how long requests may go on after SIGTERM.
      stall_seconds: how long an iteration may take before health reports it; None goes by the measured costs.
      request_log: file of the request log, or `-` for standard output; None writes none.
      log_prompts: the request log has prompts and answers.
      traces: send OpenTelemetry spans.
      profile: directory for a jax profiler capture, or None.
    """

    model: Path
    engine: EngineConfig
    cluster: ClusterConfig | None
    host: str
    port: int
    http_port: int | None
    metrics_port: int | None
    tls: Tls | None
    keys: ApiKeys | None
    in_process: bool
    restarts: RestartPolicy | None
    drain_seconds: float
    stall_seconds: float | None
    request_log: str | None
    log_prompts: bool
    traces: bool
    profile: Path | None

    @property
    def name(self) -> str:
        """Name under which the model is served."""
        return self.model.name

    @property
    def is_worker(self) -> bool:
        """Whether this host runs its part of the model for host 0, and answers no calls itself."""
        return self.cluster is not None and self.cluster.host != 0


def from_flags(args: argparse.Namespace) -> ServeSettings:
    """The settings that the flags describe. Raises UserError for a wrong flag."""
    _check(args)
    model = model_directory(args).resolve()
    cluster = hosts.from_flags(args)
    answers_calls = cluster is None or cluster.host == 0
    with user_errors():
        return ServeSettings(
            model=model,
            engine=flags.engine_config(args),
            cluster=cluster,
            host=args.host,
            port=args.port,
            http_port=args.http_port,
            metrics_port=args.metrics_port,
            tls=tls.from_flags(args) if answers_calls else None,
            keys=ApiKeys(args.api_keys) if answers_calls and args.api_keys is not None else None,
            in_process=args.front == "thread",
            restarts=RestartPolicy() if args.supervise else None,
            drain_seconds=args.drain_seconds,
            stall_seconds=args.stall_seconds,
            request_log=args.request_log,
            log_prompts=args.log_prompts,
            traces=args.traces,
            profile=args.profile,
        )


def _check(args: argparse.Namespace) -> None:
    for flag, port in (
        ("--port", args.port),
        ("--http-port", args.http_port),
        ("--metrics-port", args.metrics_port),
    ):
        if port is not None and not 0 <= port <= 65535:
            raise UserError(f"{flag} {port} is not a port; it must be from 0 to 65535")
    if not args.drain_seconds >= 0:
        raise UserError(f"--drain-seconds {args.drain_seconds} is negative")
    if args.stall_seconds is not None and not args.stall_seconds > 0:
        raise UserError(f"--stall-seconds is {args.stall_seconds:g}; it must be above 0")
    if args.supervise and args.front == "thread":
        raise UserError("--supervise needs the engine in its own process; leave --front thread out")
    if args.log_prompts and args.request_log is None:
        raise UserError("--log-prompts needs --request-log")
    check_folder("--profile", args.profile)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `jaxserve serve`."""
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument(
        "--port", type=int, default=50051, help="port for gRPC; 0 takes a free one (default: %(default)s)"
    )
    parser.add_argument(
        "--http-port",
        type=_port_or_off,
        default=8000,
        metavar="PORT|off",
        help="port for HTTP; 0 takes a free one; off: only gRPC (default: %(default)s)",
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
        help="how long the engine may have work and complete no iteration before health reports it (default: the "
        "measured time of the next iteration and 3 more, at most four times that, and at least 2)",
    )
    parser.add_argument(
        "--front",
        choices=("process", "thread"),
        default="process",
        help="process: the engine runs in its own process; thread: it runs in a thread of the server "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--supervise",
        action="store_true",
        help="start the engine process again when it dies or hangs; requests that have not started wait for it",
    )
    group = parser.add_argument_group("observability")
    group.add_argument(
        "--metrics-port",
        type=int,
        metavar="N",
        help="extra port for Prometheus: /metrics without TLS and without keys (default: none)",
    )
    group.add_argument("--request-log", metavar="FILE|-", help="write a JSON line for every request (default: none)")
    group.add_argument("--log-prompts", action="store_true", help="include prompts and answers in the request log")
    group.add_argument(
        "--traces",
        action="store_true",
        help="send OpenTelemetry spans of every request to OTEL_EXPORTER_OTLP_ENDPOINT; needs jaxserve[otel]",
    )
    settings.add_flags(parser)
    parser.add_argument(
        "--api-keys",
        type=Path,
        metavar="FILE.toml",
        help="require one of these API keys (default: none required); the file is read again when it changes",
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
