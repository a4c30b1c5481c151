"""Stand-ins for kubelets, a Deployment's controller and a Service: they run rendered pods as processes of this machine.

A pod has an address of its own below 127.0.0.0/8, so that all have the ports that their files say. Of the image the
Dockerfile gives the entry point and the environment. Seconds are those of the files, but for the probes' periods.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx2 as httpx
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.deploy.test_dockerfile import ROOT, last, stages

_TICK = 0.05  # seconds between two looks of a controller


# What is installed in an image, in this checkout.
_INSTALLED = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
_FAST = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}  # as all tests compile


def image(target: str) -> tuple[list[str], dict[str, str]]:
    """(command, environment) of an image."""
    stage = stages()[target]
    assert json.loads(last(stage, "ENTRYPOINT")) == ["jaxserve"]
    given = (each.split("=", 1) for word, rest in stage if word == "ENV" for each in rest.split())
    return [sys.executable, "-m", "server.commands.cli"], dict(given)


@dataclass(eq=False)
class Pod:
    """A pod on a node: its container's process, and what its probes have found.

    Attributes:
      version: of the template that it was made from.
      is_ready: whether the Service sends it calls.
      is_ending: whether it has been deleted.
      starts: how often its container was started.
    """

    name: str
    ip: str
    node: str
    version: int
    template: dict[str, Any]
    folder: Path
    cache: Path
    is_ready: bool = False
    is_ending: bool = False
    starts: int = 0
    process: asyncio.subprocess.Process | None = None
    task: asyncio.Task[None] | None = None

    @property
    def container(self) -> dict[str, Any]:
        (container,) = self.template["spec"]["containers"]
        return container

    def port(self, name: str) -> int:
        return next(each["containerPort"] for each in self.container["ports"] if each["name"] == name)

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    def places(self) -> dict[str, Path]:
        """Folders on this machine by the paths at which the container has them."""
        for each in self.template["spec"]["volumes"]:
            assert "emptyDir" in each, f"a volume of {self.name} is no emptyDir: {each}"
        mounts = {each["name"]: each["mountPath"] for each in self.container["volumeMounts"]}
        found = {path: self.cache if name == "cache" else self.folder / name for name, path in mounts.items()}
        for each in found.values():
            each.mkdir(mode=0o700, parents=True, exist_ok=True)
        return found

    def command(self) -> tuple[list[str], dict[str, str]]:
        """(command, environment) of the container's process."""
        command, environment = image(self.container["image"].split(":")[1])
        for each in self.container["env"]:
            assert set(each) == {"name", "value"}, f"not understood: {each}"
            environment[each["name"]] = each["value"]
        places = self.places()

        def here(value: str) -> str:
            for path, folder in places.items():
                if value == path or value.startswith(f"{path}/"):
                    return f"{folder}{value.removeprefix(path)}"
            return self.ip if value == "0.0.0.0" else value

        args = [here(each) for each in self.container["args"]]
        return [*command, *args], {name: here(value) for name, value in environment.items()} | _INSTALLED | _FAST


class Kubelet:
    """Runs the pods of one node.

    Args:
      hurry: what the periods of probes are divided by.

    Attributes:
      is_lost: whether the node is gone.
      kills: containers that did not end within their grace period, and were killed.
    """

    def __init__(self, name: str, hurry: float) -> None:
        self.name, self._hurry = name, hurry
        self.is_lost, self.kills = False, 0
        self._http = httpx.AsyncClient(trust_env=False)

    async def run(self, pod: Pod) -> None:
        """Keeps the pod's container running until the pod is deleted."""
        while not pod.is_ending:
            command, environment = pod.command()
            with (pod.folder / "log").open("a") as log:
                pod.process = await asyncio.create_subprocess_exec(
                    *command, env=environment, stdout=log, stderr=log, cwd=pod.folder, start_new_session=True
                )
            pod.starts += 1
            probes = asyncio.create_task(self._probe(pod))
            try:
                await pod.process.wait()
            finally:
                probes.cancel()
            pod.is_ready = False

    async def end(self, pod: Pod) -> None:
        """Deletes a pod: preStop, SIGTERM, and SIGKILL once the grace period is over."""
        pod.is_ending, pod.is_ready = True, False
        await self._stop(pod)
        assert pod.task is not None
        await pod.task

    async def _stop(self, pod: Pod) -> None:
        assert pod.process is not None
        try:
            async with asyncio.timeout(pod.template["spec"]["terminationGracePeriodSeconds"]):
                before = await asyncio.create_subprocess_exec(*pod.container["lifecycle"]["preStop"]["exec"]["command"])
                await before.wait()
                with contextlib.suppress(ProcessLookupError):
                    pod.process.terminate()
                await pod.process.wait()
        except TimeoutError:
            self.kills += 1
            kill(pod)

    async def _probe(self, pod: Pod) -> None:
        await self._until(pod, pod.container["startupProbe"], True)
        await asyncio.gather(self._readiness(pod), self._liveness(pod))

    async def _readiness(self, pod: Pod) -> None:
        while True:
            for wanted in (True, False):
                await self._until(pod, pod.container["readinessProbe"], wanted)
                pod.is_ready = wanted and not pod.is_ending

    async def _liveness(self, pod: Pod) -> None:
        await self._until(pod, pod.container["livenessProbe"], False)
        await self._stop(pod)

    async def _until(self, pod: Pod, probe: Mapping[str, Any], wanted: bool) -> None:
        """Returns once a probe has succeeded, or failed, as often in a row as its thresholds say.

        A startup probe that fails so often is not waited for: the test's own bound is shorter.
        """
        needed = probe.get("successThreshold", 1) if wanted else probe["failureThreshold"]
        in_row = 0
        while in_row < needed:
            succeeded = False
            with contextlib.suppress(OSError, TimeoutError, httpx.HTTPError, grpc.aio.AioRpcError):
                async with asyncio.timeout(probe["timeoutSeconds"]):
                    succeeded = await self._ask(pod, probe)
            in_row = in_row + 1 if succeeded == wanted else 0
            await asyncio.sleep(probe["periodSeconds"] / self._hurry)

    async def _ask(self, pod: Pod, probe: Mapping[str, Any]) -> bool:
        if "grpc" in probe:
            async with grpc.aio.insecure_channel(f"{pod.ip}:{probe['grpc']['port']}") as channel:
                stub: Any = health_pb2_grpc.HealthStub(channel)
                answer = await stub.Check(health_pb2.HealthCheckRequest())
                return answer.status == health_pb2.HealthCheckResponse.SERVING
        get = probe["httpGet"]
        answer = await self._http.get(f"http://{pod.ip}:{pod.port(get['port'])}{get['path']}")
        return 200 <= answer.status_code < 400

    async def close(self) -> None:
        await self._http.aclose()


def kill(pod: Pod) -> None:
    """Kills all processes of a container at once, as the end of its control group does."""
    if pod.process is not None and pod.process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pod.process.pid, signal.SIGKILL)


@dataclass(eq=False)
class Cluster:
    """Nodes with room for one pod each, and one Deployment with its Service.

    Args:
      objects: rendered; the Deployment that the Service leads to is run.
      folder: for what the pods write.
      replicas: of the Deployment.
      environment: more for its pods.
      cache: a folder in the place of the volume of that name, for a warm start.
      hurry: what the periods of probes are divided by.
      lost_after: seconds after which a silent node's pods are made anew elsewhere.
      known_after: seconds after which callers know of a change of the Service's endpoints.
    """

    objects: list[dict[str, Any]]
    folder: Path
    nodes: int
    replicas: int
    environment: Mapping[str, str]
    cache: Path
    hurry: float = 1.0
    lost_after: float = 2.0
    known_after: float = 1.0
    pods: list[Pod] = field(default_factory=list)

    def __post_init__(self) -> None:
        (service,) = [each for each in self.objects if each["kind"] == "Service"]
        self._selector = service["spec"]["selector"]
        (deployment,) = [each for each in self.objects if each["kind"] == "Deployment"]
        assert deployment["spec"]["selector"]["matchLabels"].items() >= self._selector.items()
        self._rolling = deployment["spec"]["strategy"]["rollingUpdate"]
        self._template, self._version = deployment["spec"]["template"], 0
        self.roll_out(self.environment)
        self._kubelets = {f"node-{index}": Kubelet(f"node-{index}", self.hurry) for index in range(self.nodes)}
        self._numbers = itertools.count(1)
        self._seen: deque[tuple[float, list[Pod]]] = deque()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Cluster:
        self._controller = asyncio.create_task(self._control())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._controller.cancel()
        for pod in self.pods:
            pod.is_ending = True
            kill(pod)
        await asyncio.gather(*self._tasks, *[pod.task for pod in self.pods if pod.task], return_exceptions=True)
        for kubelet in self._kubelets.values():
            await kubelet.close()

    def roll_out(self, environment: Mapping[str, str]) -> None:
        """Changes the template: its pods have more in their environment."""
        template = json.loads(json.dumps(self._template))
        template["spec"]["containers"][0]["env"] += [
            {"name": name, "value": value} for name, value in environment.items()
        ]
        self._template, self._version = template, self._version + 1

    def lose(self, node: str) -> list[Pod]:
        """A node is gone, and nobody has noticed yet. Returns its pods."""
        lost = [pod for pod in self.pods if pod.node == node]
        kubelet = self._kubelets[node]
        kubelet.is_lost = True
        for pod in lost:
            assert pod.task is not None
            pod.task.cancel()  # nobody starts its container again, or tells that it is not ready
            kill(pod)

        async def notice() -> None:
            await asyncio.sleep(self.lost_after)
            del self._kubelets[node]
            self.pods = [pod for pod in self.pods if pod not in lost]

        self._do(notice())
        return lost

    @property
    def kills(self) -> int:
        return sum(kubelet.kills for kubelet in self._kubelets.values())

    def is_settled(self) -> bool:
        """Whether there are as many pods as wanted, all of this version and ready, and callers know it."""
        serving = [pod for pod in self.pods if pod.is_ready and not pod.is_ending and pod.version == self._version]
        unnoticed = any(kubelet.is_lost for kubelet in self._kubelets.values())
        return len(self.pods) == self.replicas and self.pods == serving == self.endpoints() and not unnoticed

    def endpoints(self) -> list[Pod]:
        """The ready pods, as callers know them by now."""
        while len(self._seen) > 1 and self._seen[1][0] <= time.monotonic() - self.known_after:
            self._seen.popleft()
        return self._seen[0][1] if self._seen else []

    def _do(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _control(self) -> None:
        while True:
            alive = [pod for pod in self.pods if not pod.is_ending]
            current = [pod for pod in alive if pod.version == self._version]
            if len(alive) < self.replicas + self._rolling["maxSurge"] and len(current) < self.replicas:
                self._start()
            available = sum(pod.is_ready for pod in alive)
            least = self.replicas - self._rolling["maxUnavailable"]
            if len(alive) > self.replicas or len(current) < len(alive):
                # Those of an old version go first, then those that serve nobody, then the youngest.
                pod = min(reversed(alive), key=lambda pod: (pod.version == self._version, pod.is_ready))
                if available - pod.is_ready >= least:
                    self._do(self._end(pod))
            self._seen.append((time.monotonic(), [pod for pod in alive if pod.is_ready and not pod.is_ending]))
            await asyncio.sleep(_TICK)

    def _start(self) -> None:
        """Starts a pod, where a node has room for one."""
        taken = {pod.node for pod in self.pods}
        free = [name for name, kubelet in self._kubelets.items() if name not in taken and not kubelet.is_lost]
        if free:
            number = next(self._numbers)
            pod = Pod(
                name=f"jaxserve-{number}",
                ip=f"127.77.{number // 250}.{number % 250 + 1}",
                node=free[0],
                version=self._version,
                template=self._template,
                folder=self.folder / f"pod-{number}",
                cache=self.cache,
            )
            assert pod.template["metadata"]["labels"].items() >= self._selector.items()
            pod.folder.mkdir()
            self.pods.append(pod)
            pod.task = asyncio.create_task(self._kubelets[pod.node].run(pod))

    async def _end(self, pod: Pod) -> None:
        await self._kubelets[pod.node].end(pod)
        if pod in self.pods:
            self.pods.remove(pod)
