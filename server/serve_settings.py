"""The settings of `jaxserve serve`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from jaxserve.config import EngineConfig
from jaxserve.fields import param, params
from jaxserve.multihost.config import ClusterConfig
from server.auth import ApiKeys
from server.engine_process.supervisor import RestartPolicy
from server.tls import Tls


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """The settings of `jaxserve serve`. Flags come from the metadata of fields.

    Attributes:
      model: the checkpoint directory.
      engine: settings of the engine.
      cluster: this host's place among several; None where it serves alone.
      tls / keys: None serves without encryption, or without API keys. Hosts that answer no calls have neither.
      profile: directory for captures of jax's profiler, or None.
      names: by which calls may name the model, at least one; the first is in answers.

    Raises:
      ValueError: a setting has a wrong value; the message names its flag.
    """

    model: Path
    engine: EngineConfig
    cluster: ClusterConfig | None
    tls: Tls | None
    keys: ApiKeys | None
    profile: Path | None
    names: tuple[str, ...]
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
    allowed_origins: str | None = param(
        None,
        "origins whose web pages may call over HTTP (CORS), such as https://a.example,https://b.example; *: all",
        default_help="none but the server's own page",
        metavar="ORIGIN,...|*",
        group="security",
    )
    log_level: Literal["debug", "info", "warning", "error"] = param("warning", "least level of what is logged")
    chat_template: str | None = param(
        None, "Jinja file with the template of chats", default_help="the checkpoint's", metavar="FILE", group="model"
    )
    tool_parser: Literal["hermes", "qwen3_coder", "llama3_json", "mistral", "pythonic"] | None = param(
        None, "form in which the model calls tools", default_help="as its chat template shows", group="model"
    )
    request_log: str | None = param(None, "write a JSON line for every request", default_help="none", metavar="FILE|-")
    log_prompts: bool = param(False, "include prompts and answers in the request log")
    traces: bool = param(
        False, "send OpenTelemetry spans of every request to OTEL_EXPORTER_OTLP_ENDPOINT; needs jaxserve[otel]"
    )

    kv_events: str | None = param(
        None,
        "tell routers which blocks the prefix cache has: over gRPC (SubscribeKvEvents), and over ZMQ as vLLM does, at "
        "an endpoint that is bound if it has a * (tcp://*:5557) and else connected to; needs jaxserve[kv-events]",
        default_help="no",
        metavar="ENDPOINT|grpc",
    )
    kv_events_replay: str | None = param(
        None,
        "endpoint to bind at which ZMQ subscribers ask for KV events that they missed",
        default_help="none",
        metavar="ENDPOINT",
    )
    kv_events_topic: str = param("", "topic of KV events over ZMQ, such as kv@POD@MODEL", metavar="TOPIC")

    def __post_init__(self) -> None:
        for name, each in SERVE_PARAMS.items():
            if (problem := each.problem(getattr(self, name))) is not None:
                raise ValueError(f"{each.flag} {problem}")
        if self.supervise and self.in_process:
            raise ValueError("--supervise needs the engine in its own process; leave --front thread out")
        if self.log_prompts and self.request_log is None:
            raise ValueError("--log-prompts needs --request-log")
        if (self.kv_events_replay or self.kv_events_topic) and self.kv_events in (None, "grpc"):
            raise ValueError("--kv-events-replay and --kv-events-topic need --kv-events ENDPOINT")
        taken: dict[int, str] = {}
        for name in ("port", "http_port", "metrics_port"):
            port, flag = getattr(self, name), SERVE_PARAMS[name].flag
            if port and taken.setdefault(port, flag) != flag:
                raise ValueError(f"{taken[port]} and {flag} are both {port}; give each a port of its own")

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def in_process(self) -> bool:
        return self.front == "thread"

    @property
    def restarts(self) -> RestartPolicy | None:
        """How often a failed engine process is started again; None never does."""
        return RestartPolicy() if self.supervise else None


SERVE_PARAMS = params(ServeSettings)
