"""What the default pace of prompts comes to under load, on the virtual clock."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from benchmarks.orca import SETUPS
from jaxserve.planning.calibration import FITS
from jaxserve.scheduler.buckets import BucketCost, BucketLadder
from jaxserve.scheduler.policy import make_policy
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.scheduler.slot_pool import SlotPool
from jaxserve.simulate import fleet, virtual_clock
from jaxserve.simulate import workload as load
from jaxserve.simulate.system import bucket_costs
from jaxserve.simulate.virtual_clock import Arrival, SimulatedDevice, SimulatedReplica
from jaxserve.simulate.workload import Range
from server.commands.bench import report
from server.commands.bench.report import RunReport

# Milliseconds of 560M parameters in float32 on two cores; nearly all of it is arithmetic from 32 tokens on.
CORES = {2: 44, 4: 48, 8: 54, 16: 70, 32: 100, 64: 155, 128: 280, 256: 500}
CAPACITY = 1.1  # requests a second, in the long run, of those below
SIZES = (8, 16, 32, 64, 128, 256, 512)


def arrivals(requests: int, rate: float, seed: int, prompt: Range, output: Range) -> Sequence[Arrival]:
    workload = load.uniform(requests=requests, prompt=prompt, output=output, vocab_size=1, seed=seed)
    return virtual_clock.arrivals(load.poisson(workload, rate=rate, seed=seed))


def serve(coming: Sequence[Arrival], costs: list[BucketCost], rows: int, *, paced: bool) -> RunReport:
    pool = SlotPool(rows * 512 // 16, 16, policy="grow", prefix_cache=False)
    ladder = BucketLadder(costs)
    policy = make_policy(ladder, max_rows=rows, is_fixed=not paced)
    made = Scheduler(pool, ladder, max_rows=rows, max_context=512, policy=policy)
    seconds = {cost.size: cost.milliseconds / 1000 for cost in costs}
    device = SimulatedDevice(lambda plan: [seconds[plan.bucket]], 1)
    return report.summarise("", fleet.serve(coming, [SimulatedReplica(made, device, in_flight=2)]))


@pytest.mark.parametrize(("share", "longest"), [(0.8, 32), (1.2, 64)])
def test_default_pace_on_cores(share, longest):
    """An iteration is as long as a full batch of 32 decodes, or a bucket longer where more comes than can be served."""
    costs = [BucketCost(size=size, compile_seconds=0.0, milliseconds=ms) for size, ms in CORES.items()]
    figures = []
    for seed in range(3):
        coming = arrivals(40, share * CAPACITY, seed, Range(low=32, high=256), Range(low=1, high=128))
        for paced in (True, False):
            served = serve(coming, costs, 32, paced=paced)
            assert served.between_tokens_ms is not None
            assert served.first_token_ms is not None
            figures.append((served.between_tokens_ms.p95, served.first_token_ms.p50, served.tokens_per_second))
    between, first, rate = np.median(np.array(figures).reshape(3, 2, 3), axis=0).T
    assert between[0] < CORES[longest] + 0.1
    assert between[0] < 0.75 * between[1]
    assert first[0] < 2.2 * first[1]
    assert rate[0] > 0.97 * rate[1]


@pytest.mark.parametrize("share", [0.8, 1.2])
def test_on_an_accelerator_nothing_is_lost(share):
    costs = list(bucket_costs(SETUPS["13B"].roofline(FITS["a100-40g"]), SIZES, 64))
    prompt, output = Range(low=32, high=384), Range(low=1, high=128)
    everything = serve(arrivals(100, 1e6, 0, prompt, output), costs, 64, paced=False)
    coming = arrivals(100, share * everything.requests_per_second, 0, prompt, output)
    ours, unpaced = (serve(coming, costs, 64, paced=paced) for paced in (True, False))
    assert ours.tokens_per_second > 0.97 * unpaced.tokens_per_second
    assert ours.between_tokens_ms is not None
    assert unpaced.between_tokens_ms is not None
    assert ours.between_tokens_ms.p95 <= unpaced.between_tokens_ms.p95
