"""The scheduler, one rule at a time."""

from __future__ import annotations

import numpy as np
import pytest

from jaxserve.errors import InvalidRequest
from jaxserve.iteration import Chunk, IterationPlan
from jaxserve.request import FinishReason
from jaxserve.scheduler.buckets import BucketCost, BucketLadder
from jaxserve.scheduler.order import PRIORITY_SECONDS
from jaxserve.scheduler.policy import FixedTokenBudget
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.scheduler.slot_pool import SlotPool
from jaxserve.scheduler.state import check_fits
from tests.jaxserve.scheduler.stepping import answer, crowded, finish, land, names, request, scheduler, step

# ---- At submission


@pytest.mark.parametrize(
    ("wrong", "field", "message"),
    [
        (request("a", ()), "prompt", "is empty"),
        (request("a", 64), "prompt", "has 64 tokens; a request may hold 64, so at most 63 fit"),
        (request("a", 60), "max_tokens", "is 8 after a prompt of 60 tokens; a request may hold 64, so at most 4 fit"),
    ],
)
def test_what_can_never_fit_the_context_is_refused(wrong, field, message):
    with pytest.raises(InvalidRequest, match=message) as error:
        check_fits(wrong, max_context=64, n_slots=256)
    assert error.value.field == field


@pytest.mark.parametrize("policy", ["grow", "reserve"])
def test_pool_limit_is_exact(policy):
    made = scheduler(blocks=3, policy=policy, growth=16)
    with pytest.raises(InvalidRequest, match="the pool holds 12, so at most 8 fit") as error:
        check_fits(request("a", 4, max_tokens=9), made.max_context, made.pool.n_slots)
    assert error.value.field == "max_tokens"
    with pytest.raises(InvalidRequest, match=r"prompt: has 12 tokens; the pool holds 12"):
        check_fits(request("a", 12, max_tokens=1), made.max_context, made.pool.n_slots)
    made.submit(request("a", 4, max_tokens=8))
    made.submit(request("b", 11, max_tokens=1))
    ends = [e for e in finish(made) if e.finish_reason]
    assert [(e.request_id, e.finish_reason) for e in ends] == [("a", FinishReason.LENGTH), ("b", FinishReason.LENGTH)]


def test_a_live_id_cannot_be_used_twice():
    made = scheduler()
    made.submit(request("a"))
    with pytest.raises(ValueError, match="request_id 'a' is in use"):
        made.submit(request("a"))
    made.abort("a")
    made.submit(request("a"))
    assert made.num_waiting == 1


def test_nothing_to_do_is_no_plan():
    made = scheduler()
    assert made.schedule() is None
    assert not made.has_work


# ---- Order


def test_first_come_first_served_by_arrival_then_by_submission():
    made = scheduler(rows=1)
    for name, arrival in (("b", 1.0), ("c", 1.0), ("a", 0.5)):
        made.submit(request(name, arrival=arrival, max_tokens=1))
    assert [names(step(made)[0])[0] for _ in range(3)] == ["a", "b", "c"]


def test_priority_outweighs_waiting_up_to_its_seconds():
    made = scheduler(rows=1)
    made.submit(request("early", arrival=0.0, max_tokens=1))
    made.submit(request("usual", arrival=1.0, max_tokens=1))
    made.submit(request("urgent", arrival=0.9 * PRIORITY_SECONDS, priority=1, max_tokens=1))
    made.submit(request("late", arrival=1.5 + PRIORITY_SECONDS, priority=1, max_tokens=1))
    assert [names(step(made)[0])[0] for _ in range(4)] == ["urgent", "early", "usual", "late"]


def test_nobody_overtakes_the_first_who_does_not_fit():
    made = scheduler(rows=3, blocks=6, policy="reserve", context=24)
    made.submit(request("a", 4, max_tokens=8))  # 3 blocks
    made.submit(request("b", 4, max_tokens=12))  # 4 blocks: not now
    made.submit(request("c", 4, max_tokens=4))  # 2 blocks: would fit
    assert names(step(made)[0]) == ["a"]
    while made.requests.num_running:
        assert names(step(made)[0]) == []
    assert names(step(made)[0]) == ["b", "c"]


def test_a_plan_holds_max_rows():
    made = scheduler(rows=2)
    for name in "abc":
        made.submit(request(name, 2))
    plan, _ = step(made)
    assert names(plan) == ["a", "b"]
    assert (made.requests.num_running, made.num_waiting, made.waiting_tokens) == (2, 1, 2)


# ---- Chunks and buckets


def test_decodes_go_first_and_prompts_fill_the_bucket():
    made = scheduler(sizes=(1, 2, 4, 8))
    made.submit(request("a", 3))
    made.submit(request("b", 12))
    made.submit(request("c", 3))
    plans = [step(made)[0] for _ in range(3)]
    assert [plan.bucket for plan in plans] == [8, 8, 8]
    assert [plan.num_tokens for plan in plans] == [8, 8, 5]
    assert plans[0].chunks == (Chunk(0, 0, 3, True), Chunk(1, 0, 5, False))
    assert plans[1].chunks == (Chunk(0, 3, 1, True), Chunk(1, 5, 7, True))
    # Two decodes and c: bucket 8 at once costs less than bucket 4 and then again an iteration.
    assert plans[2].chunks == (Chunk(0, 4, 1, True), Chunk(1, 12, 1, True), Chunk(2, 0, 3, True))


def test_a_prompt_chunk_of_one_token_stands_with_the_decodes():
    made = scheduler(sizes=(8,))
    made.submit(request("a", 7))
    made.submit(request("b", 4))
    assert step(made)[0].chunks == (Chunk(1, 0, 1, False), Chunk(0, 0, 7, True))


def test_a_request_beyond_the_bucket_waits_on():
    # 3 + 4 tokens at 512 ms, or the first alone at 4 ms and the second later: the second is not let in yet.
    ladder = BucketLadder(
        [BucketCost(size=n, compile_seconds=0.0, milliseconds=ms) for n, ms in ((3, 3.0), (4, 4.0), (512, 512.0))]
    )
    pool = SlotPool(8, 4, policy="grow", prefix_cache=True)
    pool.growth_tokens = 0
    made = Scheduler(pool, ladder, max_rows=2, max_context=64)
    made.submit(request("a", 4))
    made.submit(request("b", 4))
    used = made.pool.slots_used
    plan = made.schedule()
    assert plan is not None
    assert (plan.bucket, names(plan)) == (4, ["a"])
    assert made.num_waiting == 1
    assert made.pool.slots_used == used + 4
    assert names(step_after(made, plan)) == ["b"]


def step_after(made: Scheduler, plan: IterationPlan) -> IterationPlan:
    land(made, plan)
    return step(made)[0]


def test_the_token_budget_caps_tokens_and_bucket():
    made = scheduler(token_budget=6)
    made.submit(request("a", 20))
    plan, _ = step(made)
    assert (plan.bucket, plan.num_tokens) == (4, 4)
    made = scheduler(sizes=(8, 16), token_budget=3)
    made.submit(request("a", 20))
    plan, _ = step(made)
    assert (plan.bucket, plan.num_tokens) == (8, 3)


def test_more_decodes_than_the_budget_serve_the_earliest():
    made = scheduler(sizes=(1, 2))
    for name in "abc":
        made.submit(request(name, 1))
    rows = [sorted(chunk.row for chunk in step(made)[0].chunks) for _ in range(3)]
    assert rows == [[0, 1], [0, 1], [0, 1]]
    assert len(finish(made)) == 3 * 8 - 2 * 3


def test_decodes_leave_a_token_for_an_earlier_prompt():
    made = scheduler(sizes=(1, 2), rows=3)
    for name in "bc":
        made.submit(request(name, 1, arrival=1.0))
    step(made)
    made.submit(request("a", 3, arrival=0.0))
    assert [c.row for c in step(made)[0].chunks] == [0, 1]  # not admitted: the decodes that run fill the bucket
    made.policy = FixedTokenBudget(3)
    made._ladder = BucketLadder([BucketCost(size=3, compile_seconds=0.0, milliseconds=1.0)])
    assert step(made)[0].chunks[-1] == Chunk(2, 0, 1, False)
    made.policy = FixedTokenBudget(2)
    assert [(c.row, c.length) for c in step(made)[0].chunks] == [(0, 1), (2, 1)]


# ---- Ends


@pytest.mark.parametrize(
    ("sampling", "token", "reason"),
    [
        ({}, 2, FinishReason.EOS),
        ({"ignore_eos": True}, 2, None),
        ({"ignore_eos": True, "stop_token_ids": (2,)}, 2, FinishReason.STOP),
        ({"stop_token_ids": (5, 9)}, 9, FinishReason.STOP),
        ({"stop_token_ids": (2,)}, 2, FinishReason.EOS),
        ({"max_tokens": 1}, 2, FinishReason.EOS),
        ({"max_tokens": 1}, 9, FinishReason.LENGTH),
    ],
)
def test_why_a_request_ends(sampling, token, reason):
    made = scheduler(eos_token_ids=frozenset({2, 3}))
    made.submit(request("a", 4, **sampling))
    _, (event,) = step(made, [token])
    assert (event.token_ids, event.logprobs, event.finish_reason) == ((token,), (-0.0,), reason)


def test_logits_that_are_not_finite_end_their_request_alone():
    made = scheduler()
    made.submit(request("a"))
    made.submit(request("b"))
    plan = made.schedule()
    assert plan is not None
    result = answer(plan)
    result.logprobs[0] = np.nan
    broken, fine = land(made, plan, result)
    assert (broken.request_id, broken.finish_reason, broken.token_ids) == ("a", FinishReason.ERROR, ())
    assert broken.error == "the model's logits for position 4 are not finite"
    assert (fine.request_id, fine.finish_reason, fine.token_ids) == ("b", None, (7,))
    assert [event.finish_reason for event in finish(made)][-1] == FinishReason.LENGTH
    assert made.pool.slots_used == 0


# ---- Aborts


def test_abort_in_every_state():
    made = crowded()
    made.submit(request("c", 2))
    made.submit(request("d", 2, max_tokens=1))
    assert made.abort("nobody") == []
    ((_, event),) = made.abort("c")  # waiting
    assert event is not None
    assert (event.token_ids, event.finish_reason) == ((), FinishReason.ABORTED)
    assert (made.num_waiting, made.waiting_tokens) == (3, 8)
    first, second = made.schedule(), made.schedule()
    assert first is not None
    assert second is not None
    land(made, first)
    third = made.schedule()  # preempts b
    assert third is not None
    assert made.num_waiting == 2
    assert made.abort("b")  # preempted, a token in flight
    assert [e.request_id for e in land(made, second)] == ["a"]
    assert made.abort("a")  # running
    assert made.pool.slots_used == 0
    fourth = made.schedule()
    assert fourth is not None
    assert names(fourth) == ["d"]
    assert made.abort("d")  # its last token in flight
    assert made.abort("d") == []
    assert (made.requests.num_running, made.num_waiting) == (0, 0)
    assert made.has_work  # plans in flight
    assert land(made, third) == []
    assert land(made, fourth) == []
    assert not made.has_work
    assert made.requests.free_rows == [0, 1]
    assert made.pool.slots_used == 0


# ---- Prefixes


def test_a_conversation_hits_what_was_generated():
    made = scheduler()
    made.submit(request("a", (1, 2, 3, 4, 5), max_tokens=5))
    finish(made)  # 5 prompt tokens and five 7s, of which 9 positions were computed
    made.submit(request("b", (1, 2, 3, 4, 5, 7, 7, 7, 7, 7, 9)))
    plan, (event,) = step(made)
    assert plan.admissions[0].blocks == (0, 1)
    assert plan.chunks == (Chunk(0, 8, 3, True),)
    assert event.cached_tokens == 8


def test_flushing_forgets_prefixes_even_of_running_requests():
    made = scheduler()
    made.submit(request("a", range(8)))
    plan = made.schedule()
    assert plan is not None
    made.flush_prefix_cache()
    land(made, plan)
    finish(made)
    assert made.pool.blocks.num_cached == 0
    made.submit(request("b", range(8)))
    plan, (event,) = step(made)
    assert (plan.admissions[0].blocks, event.cached_tokens) == ((), 0)


def test_salts_keep_prefixes_apart():
    made = scheduler()
    made.submit(request("a", range(8), salt="x"))
    finish(made)
    for name, salt, cached in (("b", "", 0), ("c", "x", 4)):
        made.submit(request(name, range(8), salt=salt))
        assert step(made)[1][-1].cached_tokens == cached
        made.abort(name)


@pytest.mark.parametrize(("sizes", "chunk"), [((4, 32), 8), ((32,), 30)])
def test_fixed_chunks_need_one_bucket_that_holds_them(sizes, chunk):
    """With others, a chunk that does not fit beside the decodes would wait in empty iterations."""
    with pytest.raises(ValueError, match="with fixed_chunk there must be one, of "):
        scheduler(sizes=sizes, fixed_chunk=chunk, policy="reserve")
