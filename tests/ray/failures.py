"""What callers of a deployment on Ray see when a part of it dies.

    python -m tests.ray.failures

Two replicas serve (one group of two hosts in the last case), each on a node of its own. Eight streams run and two
callers call all the time when a part is killed. Streams may break, visibly; a call that fails is not sent again.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from dataclasses import dataclass, field

import httpx2 as httpx

from tests.ray.local_cluster import FLAGS, ROOT, WAIT_SECONDS, Cluster, until

CASES = ("engine", "replica", "raylet", "node", "driver", "host")
STREAMS, CALLERS, TOKENS = 8, 2, 900
ENGINES = 2  # in every case
REPLICAS = {"min_replicas": 2, "max_replicas": 2, "actor_options": {"num_cpus": 5}}  # of a node's 8
_ENOUGH = 20  # answers in a row after which all is well again


@dataclass(slots=True)
class Outcome:
    """How streams ended, calls that were answered and lost, and what was told of the failure.

    Attributes:
      served_after: seconds from the kill until the last lost call; 0 if none was.
      whole_after: seconds from the kill until Serve had all replicas running and all engine processes were there.
    """

    streams: collections.Counter[str] = field(default_factory=collections.Counter)
    answered: int = 0
    lost: int = 0
    errors: set[str] = field(default_factory=set)
    served_after: float = 0.0
    whole_after: float = 0.0


def driver(cluster: Cluster) -> subprocess.Popen[bytes]:
    """A process that has deployed the application, and stays."""
    code = (
        "import sys, ray; from ray import serve; from server.ray import RayConfig, deployment\n"
        f"ray.init(address={cluster.address!r}, runtime_env={cluster.environment!r})\n"
        f"serve.run(deployment(RayConfig(flags={FLAGS!r}, **{REPLICAS!r})), route_prefix='/')\n"
        "print('deployed', flush=True); sys.stdin.read()"
    )
    started = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert started.stdout is not None
    assert any(b"deployed" in line for line in started.stdout)
    return started


def kill(cluster: Cluster, case: str, started: subprocess.Popen[bytes] | None) -> None:
    """Kills the part; of nodes the one without Serve's proxy and controller."""
    if case == "driver":
        assert started is not None
        started.kill()
        return
    if case == "host":  # the one that is no replica
        victim = next(each for each in cluster.engines() if cluster.parent_of(each) not in cluster.replicas())
        os.kill(victim, signal.SIGKILL)
        return
    replica = next(each for each in cluster.replicas() if cluster.parent_of(each) != cluster.head)
    engine = next(each for each in cluster.engines() if cluster.parent_of(each) == replica)
    raylet = cluster.parent_of(replica)
    victims = {"engine": [engine], "replica": [replica], "raylet": [raylet], "node": [raylet, replica, engine]}[case]
    for victim in victims:
        os.kill(victim, signal.SIGKILL)


def end_of_stream(cluster: Cluster, begun: threading.Barrier) -> tuple[str, set[str]]:
    """How a stream that waits at `begun` after its first event ends, and the errors that its caller sees."""
    told = iter([begun.wait])
    try:
        events = cluster.stream(TOKENS, lambda: next(told, lambda: None)())
    except httpx.HTTPError as problem:
        return "a broken connection", {str(problem)}
    errors = {each["error"]["message"] for each in events if "error" in each}
    return "an error event" if errors else "whole" if events[-1] == "data: [DONE]" else "silent", errors


def measure(case: str, routing: str = "session") -> Outcome:
    """Kills a part under load, and waits until all is as before."""
    cluster, started, outcome = Cluster(nodes=3 if case in ("raylet", "node") else 2), None, Outcome()
    try:
        if case == "driver":
            started = driver(cluster)
        elif case == "host":
            cluster.deploy("--stages", "2", "--flight-folder", tempfile.gettempdir(), hosts=2)
        else:
            cluster.deploy(routing=routing, **REPLICAS)
        until(lambda: len(cluster.engines()) == ENGINES)
        before = cluster.engines()
        begun, lock = threading.Barrier(STREAMS + 1), threading.Lock()
        stop, last_failure, in_row = threading.Event(), [0.0], [0]

        def stream() -> None:
            how, errors = end_of_stream(cluster, begun)
            with lock:
                outcome.streams[how] += 1
                outcome.errors |= errors

        def call() -> None:
            while not stop.is_set():
                try:
                    cluster.complete(5)
                    with lock:
                        outcome.answered, in_row[0] = outcome.answered + 1, in_row[0] + 1
                except (AssertionError, httpx.HTTPError) as problem:
                    with lock:
                        outcome.lost, in_row[0], last_failure[0] = outcome.lost + 1, 0, time.monotonic()
                        outcome.errors.add(str(problem).splitlines()[0][:100] or type(problem).__name__)
                time.sleep(0.1)

        with concurrent.futures.ThreadPoolExecutor(STREAMS + CALLERS) as pool:
            running = [pool.submit(stream) for _ in range(STREAMS)]
            begun.wait(WAIT_SECONDS)
            running += [pool.submit(call) for _ in range(CALLERS)]
            killed = last_failure[0] = time.monotonic()  # if there is none
            kill(cluster, case, started)
            try:
                if case != "driver":
                    until(lambda: not before <= cluster.engines())
                    until(lambda: len(cluster.engines()) == ENGINES and cluster.is_running())
                until(lambda: in_row[0] >= _ENOUGH)
                outcome.whole_after = time.monotonic() - killed
            finally:
                stop.set()
            for each in running:
                each.result()
        outcome.served_after = last_failure[0] - killed
        return outcome
    finally:
        if started is not None:
            started.kill()
            started.wait()
        cluster.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES, help="what is killed")
    parser.add_argument(
        "--routing", default="session", help="session or prefix, where an engine, a replica or a node is killed"
    )
    print("| killed | running streams | calls lost, of | last one after | all replicas back after |")
    print("|---|---|---|---|---|")
    args = parser.parse_args()
    for case in args.cases:
        try:
            it = measure(case, args.routing)
        except Exception:
            traceback.print_exc()
            continue
        streams = ", ".join(f"{number} {how}" for how, number in it.streams.most_common())
        calls = f"{it.lost} of {it.lost + it.answered}"
        print(f"| {case} | {streams} | {calls} | {it.served_after:.1f} s | {it.whole_after:.1f} s |", flush=True)
        for error in sorted(it.errors):
            print(f"  {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
