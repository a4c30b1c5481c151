"""Stand-ins for the controllers of Deployments and LeaderWorkerSets, and for a Service, over kubelets of pods.py."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections import deque
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.deploy.pods import Kubelet, Pod, kill
from tests.deploy.rendered import of_kind

_TICK = 0.05  # seconds between two looks of a controller


@dataclass(eq=False)
class Group:
    """The pods of one replica: the one of a Deployment, or a LeaderWorkerSet's leader and its workers.

    Attributes:
      version: of the templates that it was made from.
      is_ending: whether it has been deleted.
    """

    version: int
    pods: list[Pod]
    is_ending: bool = False

    @property
    def front(self) -> Pod:
        """The pod that the Service sends calls to."""
        return self.pods[0]

    @property
    def is_ready(self) -> bool:
        return self.front.is_ready and not self.is_ending

    @property
    def is_whole(self) -> bool:
        return all(pod.is_running for pod in self.pods)

    @property
    def has_failed(self) -> bool:
        """Whether a container has ended that nobody starts again."""
        return any(pod.task and pod.task.done() and not pod.task.cancelled() for pod in self.pods)


@dataclass(frozen=True)
class _Workload:
    """A Deployment or a LeaderWorkerSet.

    Attributes:
      templates: of the pods of one replica.
      rolling: maxSurge and maxUnavailable.
      restarts: whether a container that ends is started again alone, rather than all of its group.
    """

    templates: list[dict[str, Any]]
    rolling: Mapping[str, int]
    restarts: bool

    @classmethod
    def read(cls, objects: list[dict[str, Any]]) -> _Workload:
        if found := of_kind(objects, "Deployment"):
            (spec,) = (each["spec"] for each in found)
            return cls([spec["template"]], spec["strategy"]["rollingUpdate"], True)
        (spec,) = (each["spec"] for each in of_kind(objects, "LeaderWorkerSet"))
        pattern, rollout = spec["leaderWorkerTemplate"], spec["rolloutStrategy"]
        assert (pattern["restartPolicy"], rollout["type"]) == ("RecreateGroupOnPodRestart", "RollingUpdate")
        assert spec["startupPolicy"] == "LeaderCreated"
        templates = [pattern["leaderTemplate"], *[pattern["workerTemplate"]] * (pattern["size"] - 1)]
        return cls(templates, rollout["rollingUpdateConfiguration"], False)


@dataclass(eq=False)
class Cluster:
    """Nodes that hold one pod each, and one Deployment or LeaderWorkerSet with its Service.

    Args:
      objects: rendered.
      folder: for what the pods write.
      replicas: of the Deployment or the LeaderWorkerSet.
      environment: more for its pods.
      volumes: folders in the place of volumes, by name.
      hurry: what the periods of probes are divided by.
      lost_after: seconds after which a silent node's pods are made anew elsewhere.
      known_after: seconds after which callers know of a change of the Service's endpoints.
    """

    objects: list[dict[str, Any]]
    folder: Path
    nodes: int
    replicas: int
    environment: Mapping[str, str]
    volumes: Mapping[str, Path]
    hurry: float = 1.0
    lost_after: float = 2.0
    known_after: float = 1.0
    groups: list[Group] = field(default_factory=list)

    def __post_init__(self) -> None:
        (service,) = of_kind(self.objects, "Service")
        self._selector = service["spec"]["selector"]
        self._workload, self._version = _Workload.read(self.objects), 0
        self._environment: dict[str, str] = {}
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

    @property
    def pods(self) -> list[Pod]:
        return [pod for group in self.groups for pod in group.pods]

    def roll_out(self, environment: Mapping[str, str]) -> None:
        """Changes the templates: their pods have more in their environment."""
        self._environment |= environment
        self._version += 1

    def lose(self, node: str) -> None:
        """A node is gone, and nobody has noticed yet."""
        (group,) = (group for group in self.groups for pod in group.pods if pod.node == node)
        lost = [pod for pod in group.pods if pod.node == node]
        kubelet = self._kubelets[node]
        kubelet.is_lost = True
        for pod in lost:
            assert pod.task is not None
            pod.task.cancel()  # nobody starts its container again, or tells that it is not ready
            kill(pod)

        async def notice() -> None:
            await asyncio.sleep(self.lost_after)
            await self._end(group, [pod for pod in group.pods if pod not in lost])
            await self._kubelets.pop(node).close()

        self._do(notice())

    @property
    def kills(self) -> int:
        return sum(kubelet.kills for kubelet in self._kubelets.values())

    def is_settled(self) -> bool:
        """Whether there are as many replicas as wanted, all of this version and ready, and callers know it."""
        serving = [each for each in self.groups if each.is_ready and each.is_whole and each.version == self._version]
        unnoticed = any(kubelet.is_lost for kubelet in self._kubelets.values())
        known = [each.front for each in self.groups] == self.endpoints()
        return len(self.groups) == self.replicas and self.groups == serving and known and not unnoticed

    def endpoints(self) -> list[Pod]:
        """The ready pods of the Service, as callers know them by now."""
        while len(self._seen) > 1 and self._seen[1][0] <= time.monotonic() - self.known_after:
            self._seen.popleft()
        return self._seen[0][1] if self._seen else []

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _control(self) -> None:
        while True:
            for group in self.groups:
                if group.has_failed and not group.is_ending:
                    self._do(self._end(group, group.pods))
            alive = [group for group in self.groups if not group.is_ending]
            current = [group for group in alive if group.version == self._version]
            most = self.replicas + self._workload.rolling["maxSurge"]
            if len(alive) < most and len(current) < self.replicas:
                self._start()
            available = sum(group.is_ready for group in alive)
            least = self.replicas - self._workload.rolling["maxUnavailable"]
            if len(alive) > self.replicas or len(current) < len(alive):
                # Those of an old version go first, then those that serve nobody, then the youngest.
                group = min(reversed(alive), key=lambda each: (each.version == self._version, each.is_ready))
                if available - group.is_ready >= least:
                    self._do(self._end(group, group.pods))
            self._seen.append((time.monotonic(), [group.front for group in alive if group.is_ready]))
            await asyncio.sleep(_TICK)

    def _start(self) -> None:
        """Starts a replica, if there are free nodes for all of its pods."""
        taken = {pod.node for pod in self.pods}
        free = [name for name, kubelet in self._kubelets.items() if name not in taken and not kubelet.is_lost]
        templates = self._workload.templates
        if len(free) < len(templates):
            return
        numbers = [next(self._numbers) for _ in templates]
        ips = [f"127.77.{number // 250}.{number % 250 + 1}" for number in numbers]
        group = Group(self._version, [])
        for index, (template, number, ip) in enumerate(zip(templates, numbers, ips, strict=True)):
            environment = dict(self._environment)
            if not self._workload.restarts:  # what the webhook of LeaderWorkerSets adds
                place = {"LEADER_ADDRESS": ips[0], "GROUP_SIZE": str(len(templates)), "WORKER_INDEX": str(index)}
                environment |= {f"LWS_{name}": value for name, value in place.items()}
            pod = Pod(
                name=f"jaxserve-{number}",
                ip=ip,
                node=free[index],
                template=_with(template, environment),
                folder=self.folder / f"pod-{number}",
                volumes=self.volumes,
                restarts=self._workload.restarts,
            )
            pod.folder.mkdir()
            pod.task = asyncio.create_task(self._kubelets[pod.node].run(pod))
            group.pods.append(pod)
        selected = [pod for pod in group.pods if pod.template["metadata"]["labels"].items() >= self._selector.items()]
        assert selected == [group.front]
        self.groups.append(group)

    async def _end(self, group: Group, alive: list[Pod]) -> None:
        group.is_ending = True
        await asyncio.gather(*[self._kubelets[pod.node].end(pod) for pod in alive])
        if group in self.groups:
            self.groups.remove(group)


def _with(template: dict[str, Any], environment: Mapping[str, str]) -> dict[str, Any]:
    copy = json.loads(json.dumps(template))
    copy["spec"]["containers"][0]["env"] += [{"name": name, "value": value} for name, value in environment.items()]
    return copy
