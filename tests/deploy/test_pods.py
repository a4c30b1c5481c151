"""Rendered folders as processes of this machine, under load: a rollout, the loss of a node, more and fewer replicas.

    python -m tests.deploy.test_pods

runs all of it with the probes' periods as they are written, and prints what callers saw.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.deploy.cluster import Cluster
from tests.deploy.pods import kill
from tests.deploy.rendered import KUSTOMIZE, of_kind, render
from tests.deploy.test_dockerfile import ROOT

WAIT_SECONDS = 300.0
PAUSE = 0.25  # seconds between two calls of one caller: pods that start have to get on
# Few and small programs, so that a start takes seconds.
QUICK = {"JAXSERVE_BUCKETS": "16", "JAXSERVE_MAX_ROWS": "8", "JAXSERVE_SLOTS": "8000", "JAXSERVE_NO_SCORING": "true"}
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
TOKENS = 100
KEY = "a-key-of-callers"

pytestmark = pytest.mark.processes


class Callers:
    """Callers behind a gateway, which sends each call to the next endpoint, and again while it has sent no token.

    Args:
      patience: seconds for which the gateway tries a call again.

    Attributes:
      counts: of calls that were `answered`, `retried`, `broken` after a token had come, or `lost`.
      answers: different texts; all calls ask the same.
    """

    def __init__(self, cluster: Cluster, patience: float) -> None:
        self._cluster, self._patience = cluster, patience
        self._turns = itertools.count()
        headers = {"authorization": f"Bearer {KEY}"}
        self._http = httpx.AsyncClient(timeout=WAIT_SECONDS, trust_env=False, headers=headers)
        self._is_over = False
        self.counts: Counter[str] = Counter()
        self.answers: set[str] = set()

    @contextlib.asynccontextmanager
    async def calling(self) -> AsyncIterator[None]:
        """Two callers that stream and two that wait for whole answers, each with one call after the other."""
        async with self._http, asyncio.TaskGroup() as group:
            for streams in (True, False, True, False):
                group.create_task(self._call_on(streams))
            yield
            self._is_over = True

    async def _call_on(self, streams: bool) -> None:
        while not self._is_over:
            how = await self._call(streams)
            self.counts[how] += 1
            await asyncio.sleep(PAUSE)

    async def _call(self, streams: bool) -> str:
        until = time.monotonic() + self._patience
        while time.monotonic() < until:
            endpoints = self._cluster.endpoints()
            tokens: list[str] = []
            try:
                pod = endpoints[next(self._turns) % len(endpoints)]
                await self._ask(f"http://{pod.ip}:{pod.port('http')}", streams, tokens)
            except (httpx.HTTPError, ZeroDivisionError):
                if tokens:
                    return "broken"
                self.counts["retried"] += 1
                await asyncio.sleep(0.1)
                continue
            self.answers.add("".join(tokens))
            return "answered"
        return "lost"

    async def _ask(self, url: str, streams: bool, tokens: list[str]) -> None:
        """Raises httpx.HTTPError if no whole answer comes."""
        body = {"prompt": "It was", "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "stream": streams}
        async with self._http.stream("POST", f"{url}/v1/completions", json=body) as response:
            if response.status_code == 503:
                raise httpx.ReadError("it serves nobody now")
            assert response.status_code == 200, await response.aread()
            if not streams:
                tokens.append(json.loads(await response.aread())["choices"][0]["text"])
                return
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    return
                if line.startswith("data: "):
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        raise httpx.ReadError(event["error"]["message"])
                    tokens.append(event["choices"][0]["text"])
            raise AssertionError(f"a stream ended silently after {len(tokens)} tokens")


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(WAIT_SECONDS):
        while not condition():
            await asyncio.sleep(0.05)


class Scene:
    """A cluster under load, and what callers saw of each event."""

    def __init__(self, cluster: Cluster, callers: Callers) -> None:
        self.cluster, self._callers = cluster, callers

    async def after(self, event: Callable[[], Any]) -> dict[str, float]:
        """Counts from an event until everything is as it should be again, and as many calls more."""
        before, since = Counter(self._callers.counts), time.monotonic()
        event()
        await until(lambda: not self.cluster.is_settled())  # the end of a killed process takes a moment
        await until(self.cluster.is_settled)
        seconds = time.monotonic() - since
        enough = self._callers.counts["answered"] + 8
        await until(lambda: self._callers.counts["answered"] >= enough)
        seen = Counter(self._callers.counts)
        seen.subtract(before)
        return {name: seen[name] for name in ("answered", "retried", "broken", "lost")} | {"seconds": seconds}

    def roll_out(self) -> None:
        self.cluster.roll_out({"JAXSERVE_MAX_QUEUED_REQUESTS": "100"})

    def fewer(self) -> None:
        self.cluster.replicas -= 1

    def more(self) -> None:
        self.cluster.replicas += 1

    def kill(self) -> None:
        kill(self.cluster.pods[0])

    def kill_last_host(self) -> None:
        kill(self.cluster.pods[-1])

    def lose(self) -> None:
        self.cluster.lose(self.cluster.pods[0].node)

    def ended_in_time(self) -> bool:
        """Whether no pod's grace period was too short, or its drain."""
        logs = [each.read_text() for each in self.cluster.folder.glob("pod-*/log")]
        return not self.cluster.kills and not any("were cut short" in each for each in logs)

    async def metrics_are_there(self) -> None:
        """Scrapes a pod as the PodMonitor says, for every metric that a manifest or the dashboard names."""
        (monitor,) = of_kind(self.cluster.objects, "PodMonitor")
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        pod = self.cluster.groups[0].front
        url = f"http://{pod.ip}:{pod.port(endpoint['port'])}{endpoint['path']}"
        async with httpx.AsyncClient(trust_env=False) as client:
            text = (await client.get(url)).text
        known = {sample.name for family in text_string_to_metric_families(text) for sample in family.samples}
        assert named() <= known, named() - known
        (config,) = (each for each in text.splitlines() if each.startswith("vllm:cache_config_info{"))
        labels = dict(re.findall(r'(\w+)="([^"]*)"', config))
        assert int(labels["block_size"]) * int(labels["num_gpu_blocks"]) == int(QUICK["JAXSERVE_SLOTS"])


def named() -> set[str]:
    """Metrics that the manifests, in any folder, and the dashboard ask for."""
    texts = [(KUSTOMIZE.parent / "grafana" / "jaxserve.json").read_text()]
    for path in KUSTOMIZE.rglob("*.yaml"):
        texts += [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
    found = {name for text in texts for name in re.findall(r"\b(?:jaxserve_|vllm:)\w+", text)}
    assert {"jaxserve_outstanding_seconds", "vllm:cache_config_info", "jaxserve_healthy"} <= found
    return found


def secrets(folder: Path) -> dict[str, Path]:
    """What the manifests of several hosts ask for, beside the model."""
    files = {
        "hosts": ("secret", "the hosts of this group know it"),
        "keys": ("keys.toml", f'[team]\nkeys = ["{KEY}"]\n'),
    }
    for volume, (name, text) in files.items():
        (folder / volume).mkdir(mode=0o700)
        (folder / volume / name).write_text(text)
        (folder / volume / name).chmod(0o600)
    return {volume: folder / volume for volume in files} | {"models": ROOT / "jaxserve"}


@contextlib.asynccontextmanager
async def scene(folder: Path, objects: list[dict[str, Any]], patience: float, **given: Any) -> AsyncIterator[Scene]:
    """A cluster under load."""
    environment, volumes = dict(QUICK), {"cache": CACHE}
    if of_kind(objects, "LeaderWorkerSet"):
        environment |= {"JAXSERVE_MODEL": "/models/demo", "JAXSERVE_STAGES": "2"}
        volumes |= secrets(folder)
    async with Cluster(objects, folder, environment=environment, volumes=volumes, **given) as cluster:
        try:
            await until(cluster.is_settled)
            callers = Callers(cluster, patience)
            async with callers.calling():
                yield Scene(cluster, callers)
            assert len(callers.answers) == 1
        except BaseException:
            for log in sorted(folder.glob("pod-*/log")):
                print(log.read_text(), file=sys.stderr)
            raise


def test_scaling_down_loses_no_call_and_gauges_are_scraped(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with scene(tmp_path, render("base"), patience=2, nodes=2, replicas=2, hurry=20) as it:
            await it.metrics_are_there()
            seen = await it.after(it.fewer)
            assert (seen["retried"], seen["broken"], seen["lost"]) == (0, 0, 0)
            assert it.ended_in_time()

    asyncio.run(scenario())


def test_hosts_start_anew_together_after_one_is_killed(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with scene(tmp_path, render("hosts"), patience=120, nodes=2, replicas=1, hurry=20) as it:
            await it.metrics_are_there()
            seen = await it.after(it.kill_last_host)
            assert seen["lost"] == 0
            assert [pod.starts for pod in it.cluster.pods] == [1, 1]
            assert len(list(tmp_path.glob("pod-*"))) == 4
            assert it.ended_in_time()

    asyncio.run(scenario())


ENDED = ("rollout", "a replica less", "a replica more")  # and drained: no call needs a second try


async def run(folder: Path, name: str, objects: list[dict[str, Any]], hurry: float) -> dict[str, dict[str, float]]:
    """What callers saw of each event in a cluster of what a folder renders."""
    is_group = name == "hosts"
    nodes, replicas = (6, 2) if is_group else (4, 3)
    async with scene(folder, objects, patience=60, nodes=nodes, replicas=replicas, hurry=hurry) as it:
        await it.metrics_are_there()
        happen = {"rollout": it.roll_out, "a replica less": it.fewer, "a replica more": it.more}
        happen |= {"a host killed": it.kill_last_host} if is_group else {"a container killed": it.kill}
        table = {}
        for what, event in (happen | {"a node lost": it.lose}).items():
            table[what] = seen = await it.after(event)
            print(what, seen, flush=True)
        assert it.ended_in_time()
    return table


@pytest.mark.weekly
@pytest.mark.parametrize(("name", "probe"), [("base", "http"), ("base", "grpc"), ("hosts", "http")])
def test_every_event(name: str, probe: str, tmp_path: Path) -> None:
    objects = json.loads(json.dumps(render(name)))
    if probe == "grpc":  # as one would ask a server without HTTP
        (deployment,) = of_kind(objects, "Deployment")
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        for each in ("startupProbe", "readinessProbe", "livenessProbe"):
            del container[each]["httpGet"]
            container[each]["grpc"] = {"port": 50051}
    table = asyncio.run(run(tmp_path, name, objects, hurry=20))
    for what, seen in table.items():
        assert seen["lost"] == 0, what
        if what in ENDED:
            assert (seen["retried"], seen["broken"]) == (0, 0), what


def main() -> None:
    for name, title in (("base", "Deployment of one-host replicas"), ("hosts", "LeaderWorkerSet of two hosts")):
        with tempfile.TemporaryDirectory() as folder:
            table = asyncio.run(run(Path(folder), name, render(name), hurry=1))
        print(f"| {title} | all ready after | calls answered | sent again | streams cut, with an error | calls lost |")
        print("|---|---|---|---|---|---|")
        for what, seen in table.items():
            row = (f"{seen[each]:.0f}" for each in ("answered", "retried", "broken", "lost"))
            print(f"| {what} | {seen['seconds']:.0f} s | {' | '.join(row)} |")


if __name__ == "__main__":
    main()
