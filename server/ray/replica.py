"""A replica on Ray Serve: a front in the actor, its engine process behind it."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
from collections.abc import AsyncIterator, Sequence
from typing import Any

import ray
from prometheus_client.parser import text_string_to_metric_families
from ray.serve import metrics
from ray.util import get_current_placement_group
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxserve.generation import defaults
from jaxserve.text.tokenizer import Tokenizer
from server.app import Application, create_app
from server.engine_process.job import EngineJob
from server.engine_process.remote_engine import RemoteEngine
from server.engine_process.supervisor import ENGINE_COMMAND, Supervisor
from server.lifecycle import wedged_seconds
from server.metrics import Metrics
from server.ray import tpu
from server.ray.host import Group, Host, end_with_parent, settings
from server.ray.prefixes import CachedBlocks, Prompt
from server.ray.rpcs import Ending, InferenceRpcs, RpcEnded, with_rpcs
from server.ray.streams import put_by

OWED = "owed_tokens"  # of a replica, for autoscaling
_METRICS_SECONDS = 5.0  # between two reports to Ray


@with_rpcs
class Replica:
    """What Serve runs in each actor; its engine process ends with it, and it with its raylet.

    Serve's proxies call `__serve_build_asgi_app__`'s application over HTTP, and the methods of `with_rpcs` over gRPC.

    Args:
      flags: of `jaxserve serve`.
      hosts: with more than one, this is host 0, and starts an actor for each other in a bundle of its placement group.
      actor_options: what each host takes.
      tpu_slice: pod type of the TPU slice that the hosts are, such as "v6e-16"; None for any nodes. This is then on the
        node of its worker 0, and host I on that of worker I.
    """

    _reports_blocks = False  # whether routers want to know what is in the prefix cache

    async def __init__(
        self, flags: Sequence[str], hosts: int, actor_options: dict[str, Any], tpu_slice: str | None = None
    ) -> None:
        end_with_parent()
        self._supervisor: Supervisor | None = None  # until the flags are known to be right
        self._reporting: asyncio.Task[None] | None = None
        group = None
        if hosts > 1:
            placement = (
                get_current_placement_group() if tpu_slice is None else tpu.slice_of_this_node(hosts, actor_options)
            )
            await placement.ready()  # may take long, and a port is free only at the moment
            group = Group(hosts=hosts, coordinator=_coordinator(), secret=secrets.token_hex(32).encode())
            self._hosts = _start_hosts(flags, group, actor_options, placement)
        self._settings = chosen = settings(flags, group)
        tokenizer = Tokenizer.from_directory(chosen.model)
        self._engine = RemoteEngine(chosen.engine, tokenizer, defaults.read(chosen.model, chosen.engine))
        job = EngineJob.of(
            str(chosen.model),
            chosen.engine,
            None,
            chosen.cluster,
            log_level=chosen.log_level,
            kv_events=self._reports_blocks,
        )
        self._supervisor = supervisor = Supervisor(self._engine, job, restarts=chosen.restarts, command=ENGINE_COMMAND)
        self._running = asyncio.create_task(supervisor.run())
        ready = asyncio.create_task(supervisor.ready.wait())
        await asyncio.wait([self._running, ready], return_when=asyncio.FIRST_COMPLETED)
        if self._running.done():
            ready.cancel()
            self._running.result()  # raises why it could not start

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """The application that Serve's proxy calls, once the engine is ready."""
        return without_request_id(self._make_app())

    def _make_app(self) -> Application:
        chosen, supervisor = self._settings, self._supervisor
        assert supervisor is not None
        app = create_app(
            self._engine,
            name=chosen.name,
            aliases=chosen.names[1:],
            keys=chosen.keys,
            allowed_origins=chosen.allowed_origins,
            drain_seconds=chosen.drain_seconds,
            stall_seconds=chosen.stall_seconds,
            on_wedged=supervisor.give_up,
            wedged_seconds=wedged_seconds(chosen.cluster, self._engine),
        )
        self.rpcs = InferenceRpcs(app.handler, chosen.keys)
        self._reporting = asyncio.create_task(_report(app.metrics))
        return app

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Asked by Serve: what the deployment's policy reads."""
        return {OWED: float(self._engine.load().outstanding_tokens)}

    def check_health(self) -> None:
        """Raises if the engine is restarted no more: Serve then replaces the replica."""
        if not self._engine.takes_requests:
            raise RuntimeError(self._engine.problem)

    async def __del__(self) -> None:
        """Called by Serve after the drain."""
        if self._reporting is not None:
            self._reporting.cancel()
        if self._supervisor is not None:
            await self._supervisor.close()
            await asyncio.wait([self._running])


class RoutedReplica(Replica):
    """A replica behind an `Ingress`: it tells routers the blocks in its prefix cache."""

    _reports_blocks = True

    async def __init__(
        self, flags: Sequence[str], hosts: int, actor_options: dict[str, Any], tpu_slice: str | None = None
    ) -> None:
        await super().__init__(flags, hosts, actor_options, tpu_slice)
        self._blocks = CachedBlocks(self._engine)
        app = self._make_app()
        self._app = without_request_id(app)
        self._serving = contextlib.AsyncExitStack()
        await self._serving.enter_async_context(app.lifespan())

    def record_routing_stats(self) -> dict[str, Any]:
        """Asked by Serve: what `PrefixRouter` reads."""
        load = self._engine.load()
        step, blocks = self._blocks.told()
        report = {"block_size": self._engine.report.block_size, "step": step, "blocks": blocks}
        return report | {"calls": load.running + load.waiting}

    async def call_http(self, _: Prompt, scope: Scope, body: bytes) -> AsyncIterator[list[Message]]:
        """The ASGI messages of the answer to a call, several at a time."""
        received = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def receive() -> Message:
            for message in received:
                return message
            return await asyncio.get_running_loop().create_future()  # a caller who leaves ends this generator

        async with contextlib.aclosing(put_by(lambda put: self._app(scope, receive, put))) as pieces:
            async for messages in pieces:
                yield messages

    async def call_rpc(self, _: Prompt, name: str, request: Any, ending: Ending) -> AsyncIterator[Any]:
        """The messages of an RPC; the last one is the Ending if it has failed."""
        try:
            if InferenceRpcs.streams(name):
                async with contextlib.aclosing(self.rpcs.stream(name, request, ending)) as messages:
                    async for message in messages:
                        yield message
            else:
                yield await self.rpcs.answer(name, request, ending)
        except RpcEnded:
            yield ending

    async def __del__(self) -> None:
        if hasattr(self, "_serving"):
            await self._serving.aclose()
        await super().__del__()


def without_request_id(app: ASGIApp) -> ASGIApp:
    """The application without `x-request-id` in its responses: Serve adds the same header."""

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_without(message: Message) -> None:
            if message["type"] == "http.response.start":
                kept = [header for header in message["headers"] if header[0] != b"x-request-id"]
                message = message | {"headers": kept}
            await send(message)

        await app(scope, receive, send_without)

    return call


async def _report(of: Metrics) -> None:
    """Passes a replica's samples on to Ray, whose agents show them to Prometheus."""
    gauges: dict[str, metrics.Gauge] = {}
    while True:
        for family in text_string_to_metric_families(of.text().decode()):
            for sample in family.samples:
                name = sample.name.replace(":", "_")
                if name not in gauges:
                    gauges[name] = metrics.Gauge(name, family.documentation, tuple(sample.labels))
                with contextlib.suppress(ValueError):  # labels that differ between samples of one name
                    gauges[name].set(sample.value, sample.labels)
        await asyncio.sleep(_METRICS_SECONDS)


def _coordinator() -> str:
    """An address of this node with a free port."""
    address = ray.util.get_node_ip_address()
    with socket.socket() as found:
        found.bind((address, 0))
        return f"{address}:{found.getsockname()[1]}"


def _start_hosts(
    flags: Sequence[str], group: Group, actor_options: dict[str, Any], placement: PlacementGroup
) -> list[Any]:
    """The actors of the other hosts, which end with this one; Ray restarts one that dies alone."""
    return [
        ray.remote(Host)
        .options(
            **{"num_cpus": 1} | actor_options,
            max_restarts=-1,
            scheduling_strategy=PlacementGroupSchedulingStrategy(placement, placement_group_bundle_index=host),
        )
        .remote(flags, group, host)
        for host in range(1, group.hosts)
    ]
