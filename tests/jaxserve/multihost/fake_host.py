"""One host of a group whose devices are made up, as a process of its own: everything but the tensors is real.

`python -m tests.jaxserve.multihost.fake_host '{"host": 1, ...}'`. Its stages answer token 7 at once; what it is told to
do wrong, it does at an iteration or a step of the start. Host 0 submits requests that never end by themselves and
prints what becomes of them, a line of JSON each.
"""

import json
import logging
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np

from jaxserve.iteration import IterationPlan
from jaxserve.loop import EngineLoop
from jaxserve.multihost import control_pb2 as pb
from jaxserve.multihost.config import ClusterConfig
from jaxserve.multihost.failure import HostFailed
from jaxserve.multihost.flight_recorder import FlightRecorder
from jaxserve.multihost.follower import ReplicaFollower
from jaxserve.multihost.group import HostGroup
from jaxserve.multihost.links import NoLink
from jaxserve.multihost.master import MasterPipeline
from jaxserve.multihost.worker import MasterConnection
from jaxserve.request import Request
from jaxserve.runner.batch import BatchLayout
from jaxserve.runner.pipeline import Pipeline
from jaxserve.runner.programs import Forward
from jaxserve.runner.stage import Launched
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduler.buckets import BucketCost, BucketLadder
from jaxserve.scheduler.cache_groups import CacheGroups
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.scheduler.slot_pool import SlotPool

BUCKET, ROWS, BLOCK, CONTEXT, BLOCKS = 8, 4, 4, 4096, 8192
NOTHING: Any = None


def tell(line: dict[str, Any]) -> None:
    """Prints a line of JSON, in one piece whatever other threads print."""
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def layout(stages: int) -> BatchLayout:
    rows = ROWS * (stages + 1 if stages > 1 else 1)
    groups = CacheGroups(block_size=BLOCK, max_context=CONTEXT, n_rows=4, most_tokens=BUCKET)
    return BatchLayout(bucket=BUCKET, max_rows=ROWS, n_rows=rows, groups=groups)


class Output:
    """An array that is there at once, or never, or that turns out to be an error."""

    def __init__(self, fault: str | None) -> None:
        self._fault = fault

    def block_until_ready(self) -> None:
        if self._fault == "wedge":
            threading.Event().wait()
        if self._fault == "device":
            raise RuntimeError("INTERNAL: the kernel was not amused")


class FakeStage:
    """A stage here or elsewhere; here it takes a millisecond."""

    buckets = (BUCKET,)
    compile_seconds: ClassVar = {BUCKET: 0.0}
    num_programs = 0

    def __init__(self, index: int, stages: int, here: bool, fault: str | None, at: int) -> None:
        shape = SimpleNamespace(
            layout=lambda bucket: layout(stages),
            point_counts=lambda buckets: (layout(stages).points,),
            attention=SimpleNamespace(block_size=BLOCK),
            groups=layout(stages).groups,
        )
        self.programs: Any = SimpleNamespace(shape=shape, hidden=lambda bucket: None)
        self.params = self.pool = None
        self._here, self._last, self._fault, self._at = here, index == stages - 1, fault, at
        self._iterations = 0

    def admit(self, admissions: Any) -> None: ...
    def draft(self, drafts: Any) -> None: ...
    def copy(self, copies: Any) -> None: ...
    def feed_back_tokens(self, points: Any, chosen: Any) -> None: ...
    def replace_params(self, params: Any) -> None: ...

    def forward(self, plan: IterationPlan, packed: Any, x: Any) -> Forward:
        if not self._here:
            return Forward(*[NOTHING] * 6)
        fault = self._fault if self._iterations == self._at else None
        self._iterations += 1
        if fault == "throw":
            raise RuntimeError("no such program")
        if fault == "stuck":
            threading.Event().wait()
        time.sleep(0.001)
        output: Any = Output(fault)
        return Forward(NOTHING, NOTHING, NOTHING, output, NOTHING, NOTHING)

    def sample(self, plan: IterationPlan, out: Forward, allowed: Any = None) -> Launched:
        if not self._here or plan.sampler is None:
            return Launched()
        chosen: Any = np.full((2, layout(1).points), 7, np.int32)
        return Launched(chosen)


def stages_of(told: dict) -> list[FakeStage]:
    here = places(told)[told["host"]]
    return [
        FakeStage(index, told["stages"], index in here, told.get("fault"), told.get("at", -1))
        for index in range(told["stages"])
    ]


def places(told: dict) -> dict[int, tuple[int, ...]]:
    each = told["hosts"] // told["stages"]
    return {host: (host // each,) for host in range(told["hosts"])}


def compile_or_throw(told: dict, party: Any) -> None:
    party.reached("compiling")
    if told.get("fault") == "compile":
        raise ValueError("the compiler was not amused")
    party.agree("blocks", BLOCKS)


def lead(told: dict, cluster: ClusterConfig, facts: list[tuple[str, str]]) -> None:
    group = HostGroup(cluster, facts, tell=lambda line: tell({"told": line}))
    group.listen()
    group.join()
    compile_or_throw(told, group)
    stages: Any = stages_of(told)
    links = [NoLink()] * len(stages)
    (hosts,) = group.place([places(told)])
    pipeline = MasterPipeline(stages, links, hosts, lambda: None)
    group.agree("ready", 1)
    recorder = FlightRecorder(pb.Recording(settings="{}"), BLOCK, seconds=60.0, folder=cluster.record_folder)
    group.on_failure = lambda problem: tell({"record": str(recorder.write(str(problem)))})
    costs = [BucketCost(size=BUCKET, compile_seconds=0.0, milliseconds=1.0)]
    pool = SlotPool(BLOCKS, BLOCK, policy="grow", prefix_cache=True)
    scheduler = Scheduler(pool, BucketLadder(costs), max_rows=ROWS, max_context=CONTEXT, n_stages=len(stages))
    replica = EngineLoop(0, pipeline, scheduler, costs)
    group.phase(told["deadline"], serving=True)
    pipeline.serve(recorder)
    tokens = 0

    def sink(events: Any) -> None:
        nonlocal tokens
        for event in events:
            tokens += len(event.token_ids)
            if event.finish_reason is not None:
                ended = {"request": event.request_id, "ended": event.finish_reason.value, "error": event.error}
                tell(ended | {"healthy": replica.is_healthy})
        if tokens >= told.get("tokens", 60) and not told.pop("announced", False):
            told["announced"] = True
            told["tokens"] = 10**9
            tell({"serving": True})

    for name in "abc":
        sampling = SamplingParams(max_tokens=CONTEXT - 10, ignore_eos=True, temperature=0.0)
        replica.submit(Request(request_id=name, prompt=(1, 2, 3), sampling=sampling), sink, cached=0)
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    replica.start()
    stopping.wait()
    replica.ask_to_stop()
    replica.join()
    pipeline.close()


def follow(told: dict, cluster: ClusterConfig, facts: list[tuple[str, str]]) -> None:
    membership = MasterConnection(cluster, facts, tell=lambda line: tell({"told": line}))
    membership.join()
    try:
        compile_or_throw(told, membership)
        membership.followers = {0: follower_of(told, cluster, membership)}
        membership.reached("ready")
        membership.agree("ready", 1)
    except Exception as problem:
        membership.fail(f"{type(problem).__name__}: {problem}")
        raise
    membership.follow()


def follower_of(told: dict, cluster: ClusterConfig, membership: MasterConnection) -> ReplicaFollower:
    stages: Any = stages_of(told)
    last = told["stages"] - 1
    answers = told["host"] == min(host for host, each in places(told).items() if last in each)
    recorder = FlightRecorder(pb.Recording(settings="{}"), BLOCK, seconds=60.0, folder=cluster.record_folder)
    membership.on_failure = lambda reason: tell({"record": str(recorder.write(reason))})
    return ReplicaFollower(
        (0, 1),
        Pipeline(stages, [NoLink()] * len(stages)),
        BLOCKS,
        membership,
        stages=places(told)[told["host"]],
        answers=answers,
        recorder=recorder if answers else None,
    )


def main(told: dict) -> int:
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    cluster = ClusterConfig(
        hosts=told["hosts"],
        host=told["host"],
        coordinator=told["coordinator"],
        join_timeout=told.get("join_timeout", 60.0),
        record_folder=Path(told.get("folder", ".")),
    )
    facts = [tuple(fact) for fact in told.get("facts", [("max_rows", "4")])]
    try:
        (follow if cluster.host else lead)(told, cluster, facts)
    except ValueError as problem:
        tell({"refused": str(problem)})
        return 2
    except HostFailed:
        threading.Event().wait()  # for the watchdog, which ends the process
    return 0


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
