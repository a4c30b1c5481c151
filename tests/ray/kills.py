"""Kills engine processes and replicas of a deployment on Ray in turn, and tells how their streams end.

    python -m tests.ray.kills --kills 100

Eight streams run on two replicas at each kill, and eight calls follow it. A stream may end whole, with an error event
or with a broken connection; each of the calls is to be answered.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import os
import signal
import sys
import threading

import httpx2 as httpx

from tests.ray.failures import REPLICAS, STREAMS, end_of_stream
from tests.ray.local_cluster import WAIT_SECONDS, Cluster, until

ENGINES = REPLICAS["min_replicas"]


def kill_one(cluster: Cluster, victim: str, pool: concurrent.futures.Executor) -> tuple[collections.Counter[str], int]:
    """How the streams end that run when the process is killed, and how many of the calls after it are answered."""
    before, begun = cluster.engines(), threading.Barrier(STREAMS + 1)
    streams = [pool.submit(end_of_stream, cluster, begun) for _ in range(STREAMS)]
    begun.wait(WAIT_SECONDS)
    os.kill(min(before if victim == "engine" else cluster.replicas()), signal.SIGKILL)
    calls = [pool.submit(cluster.complete) for _ in range(STREAMS)]
    ends = collections.Counter(each.result()[0] for each in streams)
    answered = 0
    for call in calls:
        try:
            call.result()
            answered += 1
        except (AssertionError, httpx.HTTPError) as problem:
            print(f"  lost: {problem}", file=sys.stderr)
    until(lambda: not before <= cluster.engines())
    until(lambda: len(cluster.engines()) == ENGINES and cluster.is_running())
    return ends, answered


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--routing", default="session", help="session or prefix")
    args = parser.parse_args()
    cluster, wrong = Cluster(), 0
    try:
        cluster.deploy(routing=args.routing, **REPLICAS | {"actor_options": {"num_cpus": 1}})
        until(lambda: len(cluster.engines()) == ENGINES)
        ends: dict[str, collections.Counter[str]] = {"engine": collections.Counter(), "replica": collections.Counter()}
        answered = 0
        with concurrent.futures.ThreadPoolExecutor(2 * STREAMS) as pool:
            for number in range(1, args.kills + 1):
                victim = "replica" if number % 2 else "engine"
                seen, calls = kill_one(cluster, victim, pool)
                ends[victim] += seen
                answered += calls
                told = "; ".join(f"{name}: {dict(of)}" for name, of in ends.items())
                print(f"{number} kills; {told}; calls answered: {answered} of {number * STREAMS}", flush=True)
        wrong = sum(of["silent"] for of in ends.values()) + args.kills * STREAMS - answered
    finally:
        cluster.close()
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
