"""The settings of `jaxserve serve`: its flags, and the checked values that they give."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from jaxserve.config import EngineConfig
from jaxserve.fields import param, params
from jaxserve.multihost.config import ClusterConfig
from server import tls
from server.auth import ApiKeys
from server.commands import flags, hosts, settings
from server.commands.console import check_folder, user_errors
from server.commands.engine_start import add_model_flags, add_profile_flag, model_directory
from server.engine_process.supervisor import RestartPolicy
from server.tls import Tls


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """Everything that `jaxserve serve` was asked for. The metadata of fields makes flags.

    Attributes:
      model: the checkpoint directory.
      engine: settings of the engine.
      cluster: this host's place among several; None where it serves alone.
      tls / keys: None serves without encryption, and without API keys. Hosts that answer no calls have neither.
      profile: directory for a jax profiler capture, or None.

    Raises:
      ValueError: a setting has a wrong value; the message names its flag.
    """

    model: Path
    engine: EngineConfig
    cluster: ClusterConfig | None
    tls: Tls | None
    keys: ApiKeys | None
    profile: Path | None
    host: str = param("127.0.0.1", "address to listen on")
    port: int = param(50051, "port for gRPC; 0 takes a free one", minimum=0, maximum=65535)
    http_port: int | None = param(
        8000,
        "port for HTTP; 0 takes a free one; off: only gRPC",
        minimum=0,
        maximum=65535,
        metavar="PORT|off",
        none="off",
    )
    drain_seconds: float = param(30.0, "how long running requests may go on after SIGTERM", minimum=0, metavar="S")
    stall_seconds: float | None = param(
        None,
        "how long the engine may have work and complete no iteration before health reports it",
        default_help="the measured time of the next iteration and 3 more, at most four times that, and at least 2",
        minimum=0,
        exclusive=True,
        metavar="S",
    )
    front: Literal["process", "thread"] = param(
        "process", "process: the engine runs in its own process; thread: it runs in a thread of the server"
    )
    supervise: bool = param(
        False, "start the engine process again when it dies or hangs; requests that have not started wait for it"
    )
    metrics_port: int | None = param(
        None,
        "extra port for Prometheus: /metrics without TLS and without keys",
        default_help="none",
        minimum=0,
        maximum=65535,
        metavar="N",
    )
    request_log: str | None = param(None, "write a JSON line for every request", default_help="none", metavar="FILE|-")
    log_prompts: bool = param(False, "include prompts and answers in the request log")
    traces: bool = param(
        False, "send OpenTelemetry spans of every request to OTEL_EXPORTER_OTLP_ENDPOINT; needs jaxserve[otel]"
    )

    def __post_init__(self) -> None:
        for name, each in SERVE_PARAMS.items():
            if (problem := each.problem(getattr(self, name))) is not None:
                raise ValueError(f"{each.flag} {problem}")
        if self.supervise and self.in_process:
            raise ValueError("--supervise needs the engine in its own process; leave --front thread out")
        if self.log_prompts and self.request_log is None:
            raise ValueError("--log-prompts needs --request-log")

    @property
    def name(self) -> str:
        return self.model.name

    @property
    def in_process(self) -> bool:
        return self.front == "thread"

    @property
    def restarts(self) -> RestartPolicy | None:
        """How often a failed engine process is started again; None never does."""
        return RestartPolicy() if self.supervise else None


SERVE_PARAMS = params(ServeSettings)


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
            **flags.read(args, SERVE_PARAMS),
        )


def add_flags(parser: argparse.ArgumentParser) -> None:
    for each in SERVE_PARAMS.values():
        flags.add(parser, each)
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
