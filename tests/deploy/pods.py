"""Stand-ins for kubelets: they run the containers of rendered pods as processes of this machine.

A pod has an address of its own below 127.0.0.0/8, so that all have the ports that their files say. Of the image the
Dockerfile gives the entry point and the environment. Seconds are those of the files, but for the probes' periods.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx2 as httpx
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.deploy.test_dockerfile import ROOT, last, stages

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
      volumes: folders of this machine in the place of volumes, by name; a volume of type emptyDir needs none.
      restarts: whether its container is started again after it has ended.
      is_ready: whether the Service sends it calls.
      is_ending: whether it has been deleted.
      starts: how often its container was started.
    """

    name: str
    ip: str
    node: str
    template: dict[str, Any]
    folder: Path
    volumes: Mapping[str, Path]
    restarts: bool
    is_ready: bool = False
    is_ending: bool = False
    starts: int = 0
    process: asyncio.subprocess.Process | None = None
    task: asyncio.Task[None] | None = None

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.returncode is None

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
            assert "emptyDir" in each or each["name"] in self.volumes, f"no folder for a volume of {self.name}: {each}"
        mounts = {each["name"]: each["mountPath"] for each in self.container["volumeMounts"]}
        found = {path: self.volumes.get(name, self.folder / name) for name, path in mounts.items()}
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
        """Runs the pod's container until the pod is deleted, or until it ends and is not to be started again."""
        while not pod.is_ending and (pod.restarts or not pod.starts):
            command, environment = pod.command()
            with (pod.folder / "log").open("a") as log:
                pod.process = await asyncio.create_subprocess_exec(
                    *command, env=environment, stdout=log, stderr=log, cwd=pod.folder, start_new_session=True
                )
            pod.starts += 1
            if pod.is_ending:
                kill(pod)
            probes = asyncio.create_task(self._probe(pod)) if "startupProbe" in pod.container else None
            try:
                await pod.process.wait()
            finally:
                if probes:
                    probes.cancel()
            pod.is_ready = False

    async def end(self, pod: Pod) -> None:
        """Deletes a pod: preStop, SIGTERM, and SIGKILL once the grace period is over."""
        pod.is_ending, pod.is_ready = True, False
        await self._stop(pod)
        assert pod.task is not None
        await pod.task

    async def _stop(self, pod: Pod) -> None:
        if not pod.is_running:
            return
        assert pod.process is not None
        try:
            async with asyncio.timeout(pod.template["spec"]["terminationGracePeriodSeconds"]):
                if "lifecycle" in pod.container:
                    command = pod.container["lifecycle"]["preStop"]["exec"]["command"]
                    await (await asyncio.create_subprocess_exec(*command)).wait()
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
    if pod.is_running:
        assert pod.process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pod.process.pid, signal.SIGKILL)
