"""A Ray Serve application of jaxserve."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy, RequestRouterConfig

from jaxserve.multihost.config import ClusterConfig, check_settings
from server.commands import cli, flags
from server.commands.serve import SERVE_PARAMS
from server.ray import tpu
from server.ray.ingress import Ingress
from server.ray.replica import OWED, Replica, RoutedReplica
from server.ray.router import STATS_SECONDS, PrefixRouter, SessionRouter

# What belongs to Serve's proxy, to Ray, or to processes on ports of their own.
_NOT_HERE = {
    *("host", "port", "http-port", "metrics-port", "front", "tls-cert", "tls-key", "tls-client-ca"),
    *("hosts", "host-id", "coordinator", "hosts-secret", "kv-events", "kv-events-replay", "kv-events-topic", "profile"),
}
_LAST_SECONDS = 15.0  # for the engine process to end after the drain
_WINDOW_SECONDS = 5.0  # over which owed tokens are averaged


@dataclass(frozen=True, slots=True, kw_only=True)
class RayConfig:
    """A deployment of jaxserve on Ray Serve.

    Attributes:
      flags: of `jaxserve serve`, such as `("--model", "/shared/llama-70b", "--tensor", "8")`. Ports, TLS and hosts are
        not among them: Serve has those.
      name: of the deployment.
      actor_options: what each replica takes: `{"num_gpus": 8}`, `{"resources": {"TPU": 4}}`. See `ray_actor_options`.
      min_replicas / max_replicas: with more than one, Serve starts replicas while those that run owe more than
        `target_owed_tokens` each, and stops them when they owe less.
      target_owed_tokens: tokens of prompts and answers that a replica has promised and not computed yet.
      upscale_delay / downscale_delay: seconds for which a change of the number is wanted before it is made.
      routing: "session", by the header `x-session-id`, or "prefix", to the replica that has the prompt's prefix in its
        cache. The latter puts an ingress, an actor of its own, between Serve's proxy and the replicas.
    """

    flags: tuple[str, ...] = ()
    name: str = "jaxserve"
    actor_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    min_replicas: int = 1
    max_replicas: int = 1
    target_owed_tokens: int = 20_000
    upscale_delay: float = 5.0
    downscale_delay: float = 300.0
    routing: Literal["session", "prefix"] = "session"

    def __post_init__(self) -> None:
        if not 1 <= self.min_replicas <= self.max_replicas:
            raise ValueError(
                f"min_replicas is {self.min_replicas} and max_replicas {self.max_replicas}; they must be at least 1, "
                "and the second no less than the first"
            )
        if self.target_owed_tokens < 1:
            raise ValueError(f"target_owed_tokens is {self.target_owed_tokens}; it must be at least 1")
        if self.routing not in ("session", "prefix"):
            raise ValueError(f"routing is {self.routing!r}; it must be session or prefix")


class OwedTokens:
    """Serve's autoscaling policy: as many replicas as it takes for each to owe the target.

    Args:
      target: owed tokens of a replica.
    """

    def __init__(self, target: int) -> None:
        self._target = target

    def __call__(self, context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
        owed = (context.aggregated_metrics or {}).get(OWED, {})
        return sum(owed.values()) / self._target, {}


def deployment(config: RayConfig) -> serve.Application:
    """The application for `serve.run`: HTTP with streams, and gRPC, through Serve's proxies.

    Raises:
      ValueError: a flag is not one of `jaxserve serve`, or has no meaning on Ray.
    """
    return group(config, hosts=1)


def group(config: RayConfig, *, hosts: int, tpu_slice: str | None = None) -> serve.Application:
    """Like `deployment`, with several hosts for each replica, each on a node of its own.

    A replica is host 0. It and an actor for each other host have a placement group, of which each takes a bundle of
    `actor_options`.

    Args:
      tpu_slice: pod type, such as "v6e-16", of the TPU slices of which each replica takes one, whole; `actor_options`
        have the chips of a host, `{"resources": {"TPU": 4}}`. Ray knows the slice of a node by its labels.

    Raises:
      ValueError: as for `deployment`, or the hosts cannot share the devices that the flags ask for.
    """
    try:
        args = cli.parser().parse_args(["serve", *config.flags])
    except SystemExit:
        raise ValueError(f"flags are {' '.join(config.flags)}: jaxserve serve refuses them") from None
    given = {each.name for each in args.settings if each.source != "default"}
    if wrong := sorted(given & _NOT_HERE):
        raise ValueError(f"--{wrong[0]} has no meaning on Ray Serve, which has ports, TLS and machines of its own")
    engine, settings = flags.engine_config(args), flags.read(args, SERVE_PARAMS)
    if hosts > 1:
        check_settings(engine, ClusterConfig(hosts=hosts, host=0, coordinator="127.0.0.1:1"))
    if tpu_slice is not None and (hosts == 1 or not config.actor_options.get("resources", {}).get("TPU")):
        raise ValueError(
            f"tpu_slice is {tpu_slice}, with {hosts} hosts and actor_options {dict(config.actor_options)}; it is for "
            'several hosts whose actor_options have the chips of one: {"resources": {"TPU": 4}}'
        )
    autoscaling = AutoscalingConfig(
        min_replicas=config.min_replicas,
        max_replicas=config.max_replicas,
        metrics_interval_s=1.0,
        look_back_period_s=_WINDOW_SECONDS,
        upscale_delay_s=config.upscale_delay,
        downscale_delay_s=config.downscale_delay,
        policy=AutoscalingPolicy(policy_function=OwedTokens, policy_kwargs={"target": config.target_owed_tokens}),
    )
    by_prefix = config.routing == "prefix"
    router = RequestRouterConfig(request_router_class=SessionRouter)
    if by_prefix:
        router = RequestRouterConfig(
            request_router_class=PrefixRouter,
            request_router_kwargs={"rows": engine.max_rows},
            request_routing_stats_period_s=STATS_SECONDS,
        )
    shared = {
        # The replica has a queue and bounds of its own, and tells its callers when it is full.
        "max_ongoing_requests": 2 * (engine.max_rows + engine.max_queued_requests),
        "graceful_shutdown_timeout_s": settings["drain_seconds"] + _LAST_SECONDS,
        "health_check_period_s": 1.0,
    }
    spread = hosts > 1 and tpu_slice is None
    made = serve.deployment(
        RoutedReplica if by_prefix else serve.ingress()(Replica),
        name=config.name,
        ray_actor_options=dict(config.actor_options) if tpu_slice is None else tpu.on_first_worker(tpu_slice),
        placement_group_bundles=[tpu.bundle(config.actor_options)] * hosts if spread else None,
        placement_group_strategy="STRICT_SPREAD" if spread else None,
        autoscaling_config=autoscaling,
        request_router_config=router,
        **shared,
    ).bind(config.flags, hosts, dict(config.actor_options), tpu_slice)
    if not by_prefix:
        return made
    scaling = AutoscalingConfig(
        min_replicas=config.min_replicas, max_replicas=config.max_replicas, target_ongoing_requests=2 * engine.max_rows
    )
    ingress = serve.deployment(
        serve.ingress()(Ingress), name=f"{config.name}-ingress", autoscaling_config=scaling, **shared
    )
    return ingress.bind(config.flags, hosts, made)
