"""A Ray cluster on this machine, with Serve and a deployment of the demo model."""

import contextlib
import json
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx2 as httpx
import ray
from ray import cluster_utils, serve
from ray.serve.config import gRPCOptions

from benchmarks.free_ports import free_ports
from server.ray import RayConfig, deployment, group

ROOT = Path(__file__).parents[2]
FLAGS = ("--buckets", "4,16", "--max-rows", "8", "--slots", "8000", "--max-context", "1000", "--no-scoring")
WAIT_SECONDS = 240.0
MARK = "TEST_GROUP"  # in the environment of every replica, and of its engine process


def until(condition: Callable[[], Any], seconds: float = WAIT_SECONDS) -> Any:
    bound = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < bound
        time.sleep(0.05)
    return found


class Cluster:
    """Nodes, as processes of this machine, with Serve on them.

    Args:
      others: labels and resources of nodes beside those, as TPU hosts have them.

    Attributes:
      head: the raylet of the node with Serve's controller.
      labels: those of the others, by their raylets.
    """

    def __init__(self, nodes: int = 1, others: Sequence[tuple[dict[str, str], dict[str, float]]] = ()) -> None:
        self._mark = uuid.uuid4().hex
        port, self.metrics_port, grpc_port = free_ports(3)
        self.url, self.grpc_address = f"http://127.0.0.1:{port}", f"127.0.0.1:{grpc_port}"
        self.environment = {"env_vars": {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), MARK: self._mark}}
        self._nodes = cluster_utils.Cluster()
        for node in range(nodes):
            export = {} if node else {"metrics_export_port": self.metrics_port}
            self._nodes.add_node(num_cpus=8, include_dashboard=False, object_store_memory=80 * 2**20, **export)
        self.labels: dict[int, dict[str, str]] = {}
        for labels, resources in others:
            node = self._nodes.add_node(
                num_cpus=2, include_dashboard=False, object_store_memory=80 * 2**20, labels=labels, resources=resources
            )
            self.labels[node.all_processes["raylet"][0].process.pid] = labels
        self.address = self._nodes.address
        self.head = self._nodes.head_node.all_processes["raylet"][0].process.pid
        ray.init(address=self._nodes.address, runtime_env=self.environment)
        servicer = "server.proto.jaxserve.v1.inference_pb2_grpc.add_InferenceServicer_to_server"
        serve.start(
            http_options={"port": port}, grpc_options=gRPCOptions(port=grpc_port, grpc_servicer_functions=[servicer])
        )

    def deploy(self, *flags: str, hosts: int = 1, tpu_slice: str | None = None, **fields: Any) -> None:
        config = RayConfig(flags=(*FLAGS, *flags), **{"actor_options": {"num_cpus": 1}} | fields)
        made = group(config, hosts=hosts, tpu_slice=tpu_slice) if hosts > 1 else deployment(config)
        serve.run(made, route_prefix="/")

    def is_running(self) -> bool:
        """Whether Serve has as many replicas running as it wants, and no other."""
        (application,) = serve.status().applications.values()
        return all(each.status == "HEALTHY" for each in application.deployments.values())

    def close(self) -> None:
        serve.shutdown()
        self.kill()

    def kill(self) -> None:
        """Ends the cluster without Serve's help."""
        ray.shutdown()
        self._nodes.shutdown()

    def _processes(self, name: bytes) -> set[int]:
        found = set()
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                command = (path / "cmdline").read_bytes()
                is_named = name in command and b"-ingress" not in command
                if is_named and f"{MARK}={self._mark}".encode() in (path / "environ").read_bytes():
                    found.add(int(path.name))
        return found

    def replicas(self) -> set[int]:
        return self._processes(b"ray::ServeReplica")

    def engines(self) -> set[int]:
        return self._processes(b"server.engine_process.main")

    @staticmethod
    def parent_of(pid: int) -> int:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])

    def node_of(self, engine: int) -> int:
        """The raylet above an engine process and its actor."""
        return self.parent_of(self.parent_of(engine))

    def complete(self, max_tokens: int = 5) -> str:
        body = {"prompt": "It was", "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(f"{self.url}/v1/completions", json=body, timeout=WAIT_SECONDS)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["text"]

    def complete_when_ready(self, max_tokens: int = 5) -> str:
        """Calls until a call is answered."""

        def attempt() -> str | None:
            try:
                return self.complete(max_tokens)
            except (AssertionError, httpx.HTTPError):
                return None

        return until(attempt)

    def stream(self, max_tokens: int, begun: Callable[[], None] = lambda: None) -> list[Any]:
        """The events of a stream. Raises httpx.HTTPError if its connection breaks."""
        body = {"prompt": "It was", "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        return self.events(body, begun)

    def events(self, body: dict[str, Any], begun: Callable[[], Any] = lambda: None) -> list[Any]:
        """The events of a stream of this call; `begun` is called after each of them."""
        events = []
        with httpx.stream("POST", f"{self.url}/v1/completions", json=body, timeout=WAIT_SECONDS) as response:
            for line in response.iter_lines():
                if line.startswith("data: "):
                    events.append(line if line == "data: [DONE]" else json.loads(line.removeprefix("data: ")))
                    begun()
        return events
