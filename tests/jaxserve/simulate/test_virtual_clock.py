"""The virtual clock against queues worked out by hand, and the rules of who may be in flight."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from jaxserve.scheduler.buckets import BucketCost, BucketLadder
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.scheduler.slot_pool import SlotPool
from jaxserve.simulate import fleet, virtual_clock
from jaxserve.simulate import workload as load
from jaxserve.simulate.virtual_clock import EOS, Arrival, HostTimes, SimulatedDevice, SimulatedReplica


def arrival(time, prompt=4, output=1, *, limit=None, priority=0) -> Arrival:
    return Arrival(time, np.zeros(prompt, np.int32), output, limit or output, priority)


def scheduler(*, rows=1, stages=1, sizes=(64,), **more) -> Scheduler:
    costs = [BucketCost(size=n, compile_seconds=0.0, milliseconds=1.0) for n in sizes]
    pool = SlotPool(4096, 1, policy="reserve", prefix_cache=False)
    return Scheduler(pool, BucketLadder(costs), max_rows=rows, max_context=512, n_stages=stages, **more)


def run(coming, made, seconds, *, stages=1, in_flight=1, **more):
    device = SimulatedDevice(lambda _: [seconds] * stages, stages)
    return fleet.serve(coming, [SimulatedReplica(made, device, in_flight=in_flight, **more)])


def test_a_server_of_constant_time_queues_as_by_hand():
    # One row, one token each: served in turn, 2 s each.
    outcomes = run([arrival(t) for t in (0.0, 0.5, 1.0, 7.0)], scheduler(), 2.0)
    assert [each.token_times for each in outcomes] == [[2.0], [4.0], [6.0], [9.0]]


def test_poisson_waits_match_queueing_theory():
    # M/D/1: the mean wait is rho / (2 (1 - rho)) service times (Pollaczek-Khinchine).
    workload = load.uniform(
        requests=20_000, prompt=load.Range(low=4, high=4), output=load.Range(low=1, high=1), vocab_size=1, seed=0
    )
    coming = virtual_clock.arrivals(load.poisson(workload, rate=0.6, seed=2))
    outcomes = run(coming, scheduler(), 1.0)
    waits = [each.token_times[0] - each.arrival - 1.0 for each in outcomes]
    assert np.mean(waits) == pytest.approx(0.6 / (2 * 0.4), rel=0.05)


def test_arrival_joins_next_iteration():
    outcomes = run([arrival(0.0, output=4), arrival(0.5, output=2)], scheduler(rows=2), 1.0)
    assert outcomes[0].token_times == [1.0, 2.0, 3.0, 4.0]
    assert outcomes[1].token_times == [2.0, 3.0]


def test_arrival_waits_for_launched_iteration():
    outcomes = run([arrival(0.0, output=4), arrival(0.5, output=1)], scheduler(rows=2), 1.0, in_flight=2)
    assert outcomes[0].token_times == [1.0, 2.0, 3.0, 4.0]  # nothing between them
    assert outcomes[1].token_times == [3.0]


def test_batches_of_two_stages_overlap():
    coming = [arrival(0.0, output=3), arrival(0.0, output=3)]
    outcomes = run(coming, scheduler(rows=1, stages=2), 1.0, stages=2, in_flight=2)
    # While one is in the second stage the other is in the first.
    assert [each.token_times for each in outcomes] == [[2.0, 4.0, 6.0], [3.0, 5.0, 7.0]]
    outcomes = run(coming, scheduler(rows=1, stages=2), 1.0, stages=2, in_flight=1)
    assert outcomes[0].token_times == [2.0, 4.0, 6.0]  # a request is never twice in flight
    assert outcomes[1].token_times == [8.0, 10.0, 12.0]


def test_stages_keep_a_request_in_one_batch():
    flying: list[tuple[float, set[int]]] = []
    now = 0.0

    def watch(plan, landing):
        nonlocal now
        rows = {chunk.row for chunk in plan.chunks}
        earlier = [others for done, others in flying if done > landing - 3.0]
        assert all(rows.isdisjoint(others) for others in earlier)
        assert len(earlier) < 3
        flying.append((landing, rows))

    coming = [arrival(0.1 * index, prompt=8, output=1 + index % 7) for index in range(40)]
    outcomes = run(coming, scheduler(rows=3, stages=3), 1.0, stages=3, in_flight=3, watch=watch)
    assert [len(each.token_times) for each in outcomes] == [1 + index % 7 for index in range(40)]


def test_a_polling_host_sees_arrivals_while_it_can_launch():
    coming = [arrival(0.0, output=2), arrival(0.5, output=1)]
    blocked = run(coming, scheduler(rows=1, stages=2), 1.0, stages=2, in_flight=2)
    polled = run(coming, scheduler(rows=1, stages=2), 1.0, stages=2, in_flight=2, host=HostTimes(polls=True))
    assert blocked[1].token_times == [5.0]  # seen when the first iteration lands, at 2; behind the next one
    assert polled[1].token_times == [3.0]  # launched at 0.5, in the first stage at 1


def test_the_hosts_time_is_spent_before_and_after():
    outcomes = run([arrival(0.0, output=2)], scheduler(), 1.0, host=HostTimes(launch=0.25, complete=0.5))
    assert outcomes[0].token_times == [1.75, 3.5]
    ahead = run([arrival(0.0, output=3)], scheduler(), 1.0, host=HostTimes(launch=0.25, complete=0.5), in_flight=2)
    assert ahead[0].token_times == [1.75, 2.75, 3.75]  # behind the device's back


def test_early_end_still_reserves_its_limit():
    made = scheduler(rows=4, eos_token_ids=frozenset({EOS}))
    held = []
    coming = [arrival(0.0, prompt=4, output=3, limit=100)]
    outcomes = run(coming, made, 1.0, watch=lambda _plan, _landing: held.append(made.pool.slots_used))
    assert outcomes[0].token_times == [1.0, 2.0, 3.0]
    assert held == [104, 104, 104]


def test_what_can_never_fit_is_refused_by_name():
    outcomes = run([arrival(0.0, prompt=600), arrival(1.0)], scheduler(), 1.0)
    assert "a request may hold 512" in str(outcomes[0].error)
    assert outcomes[1].token_times == [2.0]


def by_two(coming, *, seconds=1.0, rows=1) -> tuple[list, list[int]]:
    """Outcomes of two replicas that take so long an iteration, and how many iterations each ran."""
    devices = [SimulatedDevice(lambda _: [seconds], 1) for _ in range(2)]
    replicas = [SimulatedReplica(scheduler(rows=rows), device, in_flight=1) for device in devices]
    outcomes = fleet.serve(coming, replicas)
    return outcomes, [round(device.busy[0] / seconds) for device in devices]


def test_an_arrival_goes_where_the_least_is_left_to_compute():
    # 4 prompt tokens each. The first replica owes 104, the second 14: the third goes there, and so does the fourth.
    coming = [arrival(0.0, output=100), *(arrival(0.1 * n, output=10) for n in range(1, 4))]
    outcomes, iterations = by_two(coming)
    assert iterations == [100, 30]
    assert [each.token_times[-1] for each in outcomes] == pytest.approx([100.0, 10.1, 20.1, 30.1])


def test_what_has_come_by_an_arrival_is_owed_no_more():
    # The second owes 5 prompt tokens and 1 to generate; the first 12 - 5 at 5.5, and 12 - 8 at 8.5.
    for time, expected in ((5.5, [12, 2]), (8.5, [12, 1])):
        coming = [arrival(0.0, output=12), arrival(time - 0.1, prompt=5, output=1), arrival(time, output=1)]
        assert by_two(coming, rows=2)[1] == expected


def test_two_replicas_are_two_servers():
    # M/D/1 each if they were drawn by chance; the least left to compute does better than that.
    workload = load.uniform(
        requests=5000, prompt=load.Range(low=4, high=4), output=load.Range(low=1, high=1), vocab_size=1, seed=0
    )
    outcomes, iterations = by_two(virtual_clock.arrivals(load.poisson(workload, rate=1.6, seed=2)))
    assert sum(iterations) == 5000
    waits = [each.token_times[0] - each.arrival - 1.0 for each in outcomes]
    assert min(waits) > -1e-9
    assert np.mean(waits) < 0.8 / (2 * 0.2)


def test_no_jax_is_needed():
    modules = "fleet, virtual_clock, system, ladder"
    program = f"import sys; from jaxserve.simulate import {modules}; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
