"""Turns between tenants."""

from __future__ import annotations

import dataclasses
from collections import Counter, deque
from random import Random

import pytest

from jaxserve.iteration import Chunk
from jaxserve.request import Request
from jaxserve.scheduler.buckets import BucketCost, BucketLadder
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.scheduler.state import Phase, RequestState
from jaxserve.scheduler.tenants import FairQueue
from jaxserve.scheduler.waiting import WaitingQueue
from tests.jaxserve.scheduler.stepping import finish, land, names, request, scheduler, step


def admitted(made: Scheduler) -> list[str]:
    """Names in the order of admission until all have ended."""
    found = []
    while made.has_work:
        found += names(step(made)[0])
    return found


# Whose turn it is


def test_a_flood_does_not_delay_another_tenant():
    made = scheduler(rows=1)
    for number in range(20):
        made.submit(request(f"f{number:02}", tenant="flood", max_tokens=1))
    assert names(step(made)[0]) == ["f00"]
    made.submit(request("polite", arrival=9.0, tenant="polite", max_tokens=1))
    order = [names(step(made)[0])[0] for _ in range(3)]
    assert "polite" in order[:2]


def test_priority_is_among_the_tenants_own_requests():
    made = scheduler(rows=1)
    for number in range(20):
        made.submit(request(f"f{number:02}", tenant="flood", priority=2**31 - 1 - (number == 0), max_tokens=1))
    made.submit(request("p", arrival=9.0, tenant="polite", max_tokens=1))
    order = admitted(made)
    assert order[0] == "f01"  # the first has less priority than the others
    assert order.index("p") < 3
    assert order[-1] == "f00"


def test_tokens_are_served_by_shares():
    made = scheduler(rows=3, blocks=400)
    for number in range(300):
        for tenant, share in (("a", 1.0), ("b", 3.0)):
            made.submit(request(f"{tenant}{number:03}", 6, tenant=tenant, share=share, max_tokens=5))
    tokens, tenants = Counter[str](), dict[int, str]()
    for _ in range(300):
        plan, _ = step(made)
        tenants |= {admission.row: admission.request_id[0] for admission in plan.admissions}
        for chunk in plan.chunks:
            tokens[tenants[chunk.row]] += chunk.length
    assert tokens["b"] / tokens["a"] == pytest.approx(3, rel=0.05)


def test_long_answers_count():
    """Of two tenants with equal prompts, the one with answers ten times as long gets fewer rows."""
    made = scheduler(rows=4, blocks=400)
    for number in range(100):
        made.submit(request(f"l{number:03}", 4, tenant="long", max_tokens=40))
        made.submit(request(f"s{number:03}", 4, tenant="short", max_tokens=4))
    order = Counter(name[0] for _ in range(200) for name in names(step(made)[0]))
    assert order["s"] > 4 * order["l"]


def test_who_was_idle_has_saved_nothing():
    made = scheduler(rows=1)
    for number in range(40):
        made.submit(request(f"a{number:02}", tenant="a", max_tokens=1))
        made.submit(request(f"c{number:02}", tenant="c", max_tokens=1))
    for _ in range(20):
        step(made)
    for number in range(10):
        made.submit(request(f"b{number:02}", arrival=5.0, tenant="b", max_tokens=1))
    order = Counter(names(step(made)[0])[0][0] for _ in range(10))
    assert max(order.values()) <= 5


def queued(*names: str) -> tuple[FairQueue, list[RequestState]]:
    """A queue with a request of 8 tokens of each name's tenant, its first letter."""
    fair, states = FairQueue(BucketLadder([BucketCost(size=8, compile_seconds=0.0, milliseconds=1.0)]), 4), []
    for number, name in enumerate(names):
        states.append(state := RequestState.of(request(name, 8, tenant=name[0]), frozenset()))
        state.key = (0.0, number)
        fair.join(state)
        fair.push(state)
    return fair, states


def test_a_tenant_starts_at_the_least_of_those_that_wait():
    fair, (first, other, _) = queued("a1", "c1", "a2")
    assert fair.pop() is first
    for _ in range(30):
        fair.charge_samples([first, other, other], [Chunk(0, 9, 1, 1)] * 3)
    late = RequestState.of(request("b1", tenant="b"), frozenset())
    fair.join(late)
    fair.push(late)
    assert 0 < late.tenant.served == first.tenant.served < other.tenant.served


def test_a_request_put_back_costs_nothing_and_keeps_its_turn():
    fair, (first, _, _) = queued("a1", "b1", "a2")
    assert fair.pop() is first
    fair.charge_prompt(first)
    assert first.tenant.served > 0
    fair.put_back(first)
    assert first.tenant.served == pytest.approx(0.0)
    assert fair.first() is first


def test_blocks_are_taken_from_the_tenant_that_had_more():
    """Under pressure the flood loses its blocks, though its request came before."""
    made = scheduler(rows=2, blocks=5, block_size=2, sizes=(1, 2, 4, 8), context=10)
    for name, tenant in (("f", "flood"), ("g", "flood"), ("h", "flood")):
        made.submit(request(name, 3, tenant=tenant, max_tokens=6))
    made.submit(request("p", 3, arrival=9.0, tenant="polite", share=2.0, max_tokens=6))
    preempted = []
    while made.has_work:
        before = made.preemptions
        step(made)
        if made.preemptions > before:
            preempted += [state.name for state in made.requests.live.values() if state.has_begun and state.row < 0]
    assert preempted[0] == "f"


def test_a_request_that_never_began_costs_nothing():
    """The bucket is full before the second request's turn comes; it is next, and was charged once."""
    made = scheduler(rows=4, sizes=(1, 2, 4, 8), token_budget=8)
    made.submit(request("a", 8, tenant="a", max_tokens=1))
    made.submit(request("b", 8, tenant="b", max_tokens=1))
    made.submit(request("c", 8, tenant="a", max_tokens=1))
    assert [names(step(made)[0]) for _ in range(3)] == [["a"], ["b"], ["c"]]


# One tenant


def test_one_tenant_has_the_queue_as_it_was():
    """Any mix of operations gives what the queue by key alone gives, and nothing is counted."""
    ladder = BucketLadder([BucketCost(size=8, compile_seconds=0.0, milliseconds=1.0)])
    for seed in range(50):
        draw, fair, plain = Random(seed), FairQueue(ladder, 4), WaitingQueue[RequestState]()
        waiting, popped = [], []
        for number in range(200):
            action = draw.random()
            if action < 0.5:
                state = RequestState.of(request(f"r{number}", draw.randint(1, 9)), frozenset())
                state.key = (float(draw.randrange(20)), number)
                fair.join(state)
                fair.push(state)
                plain.push(state)
                waiting.append(state)
            elif action < 0.7 and waiting:
                state = waiting.pop(draw.randrange(len(waiting)))
                fair.remove(state)
                fair.leave(state)
                plain.remove(state)
            elif action < 0.9 and waiting:
                assert fair.first() is plain.first()
                state = plain.pop()
                assert fair.pop() is state
                fair.charge_prompt(state)
                waiting.remove(state)
                popped.append(state)
            elif popped:
                state = popped.pop()
                (fair.put_back if draw.random() < 0.5 else fair.push)(state)
                plain.push(state)
                waiting.append(state)
            assert fair.first() is plain.first()
            assert (len(fair), fair.num_tokens) == (len(plain), plain.num_tokens)
        assert all(tenant.served == 0 for tenant in fair._tenants.values())


# Whatever arrives


@pytest.mark.parametrize("n_stages", [1, 2])
@pytest.mark.parametrize("policy", ["grow", "reserve"])
@pytest.mark.parametrize("seed", range(8))
def test_nobody_starves_and_nothing_stands_idle(seed, policy, n_stages):
    """Work is conserved, a tenant's requests are admitted by key, and the counters of those who wait stay together."""
    draw = Random(seed)
    rows, blocks = draw.randint(1, 5), draw.randint(16, 60)
    made = scheduler(rows=rows, blocks=blocks, policy=policy, growth=draw.choice([0, 2]), n_stages=n_stages)
    shares = {name: draw.choice([0.5, 1.0, 4.0]) for name in "abcd"[: draw.randint(2, 4)]}
    coming = deque(arrivals(draw, shares))
    in_flight, turn, ended = deque(), 0, Counter[str]()
    submitted = Counter(each.tenant for _, each in coming)
    while coming or made.has_work:
        while coming and coming[0][0] <= turn:
            made.submit(coming.popleft()[1])
        turn += 1
        before = {state.name: state for state in made.requests.live.values() if state.phase == Phase.WAITING}
        plan = made.schedule()
        if plan is not None:
            in_flight.append(plan)
            first = {}
            for name in names(plan):  # before whoever of its tenant still waits
                first.setdefault(before[name].tenant.name, []).append(before[name].key)
            for tenant, keys in first.items():
                waits = [each.key for each in before.values() if each.tenant.name == tenant and each.row < 0]
                assert keys == sorted(keys)
                assert all(keys[-1] < key for key in waits if key not in keys)
        if in_flight and (plan is None or len(in_flight) > n_stages):
            done = in_flight.popleft()
            for event in land(made, done):
                ended[event.request_id[0]] += event.finish_reason is not None
        check_counters(made)
    assert ended == submitted
    assert not made.requests.waiting._num_active
    assert made.pool.slots_used == 0


@pytest.mark.parametrize("policy", ["grow", "reserve"])
@pytest.mark.parametrize("seed", range(8))
def test_turns_leave_no_more_idle_than_arrivals(seed, policy):
    """The same requests take as many iterations and as many tokens of buckets as without tenants."""
    taken = []
    for tenants in (True, False):
        draw = Random(seed)
        made = scheduler(rows=draw.randint(2, 5), blocks=60, policy=policy)
        for _, each in arrivals(draw, {name: draw.choice([0.5, 1.0, 4.0]) for name in "abcd"}):
            made.submit(each if tenants else dataclasses.replace(each, tenant="", share=1.0))
        plans = []
        while made.has_work:
            plans.append(step(made)[0])
        taken.append((len(plans), sum(plan.bucket for plan in plans)))
    assert taken[0][0] == pytest.approx(taken[1][0], rel=0.1)
    assert taken[0][1] == pytest.approx(taken[1][1], rel=0.1)


def arrivals(draw: Random, shares: dict[str, float]) -> list[tuple[int, Request]]:
    """(iteration, request): each tenant has bursts of its own."""
    found = []
    for tenant, share in shares.items():
        turn = 0
        for number in range(draw.randint(5, 40)):
            turn += draw.choice([0, 0, 0, 1, 30])
            prompt, answers = draw.randint(1, 30), draw.randint(1, 20)
            name, priority = f"{tenant}{number}", draw.choice([0, 0, 3])
            more = {"tenant": tenant, "share": share, "priority": priority, "max_tokens": answers}
            found.append((turn, request(name, prompt, arrival=float(turn), **more)))
    return sorted(found, key=lambda each: each[0])


def check_counters(made: Scheduler) -> None:
    """Of tenants that wait, none has had much more than another (Sheng et al., theorem 4.4, with our rows and lengths).

    What lies between them is at most a whole request in each row of the plans in flight.
    """
    most = 3 * 5 * (30 * 0.0016 + 20 * 0.011) / 0.5  # seconds of a prompt's token and of a decode without others
    served = [tenant.served for tenant in made.requests.waiting._tenants.values() if tenant.waiting]
    assert not served or max(served) - min(served) <= most


def test_many_tenants_take_turns_alike():
    made = scheduler(rows=2, blocks=400)
    for number in range(3):
        for tenant in range(50):
            made.submit(request(f"{number}-{tenant}", tenant=str(tenant), arrival=float(tenant), max_tokens=1))
    order = admitted(made)
    assert sorted(order[:50]) == sorted(f"0-{tenant}" for tenant in range(50))
    assert not finish(made)
    assert not made.requests.waiting._tenants  # none is kept


def test_a_tenant_is_forgotten_where_it_is_not_ahead():
    fair, (first, _, ahead) = queued("a1", "b1", "c1")
    for state in (first, ahead):
        fair.remove(state)
    fair.charge_prompt(ahead)
    for state in (first, ahead):
        fair.leave(state)
    assert set(fair._tenants) == {"b", "c"}
