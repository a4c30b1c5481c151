"""The scheduler, one rule at a time."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest

from jaxserve.iteration import Chunk, IterationPlan, IterationResult, SamplerVariant
from jaxserve.request import MAX_LOGPROBS, Alternatives, FinishReason, InvalidRequest, Request, SamplingParams
from jaxserve.scheduling.buckets import BucketCost, BucketLadder
from jaxserve.scheduling.scheduler import PRIORITY_SECONDS, Scheduler
from jaxserve.scheduling.slots import SlotPool
from jaxserve.scheduling.waiting import WaitingQueue


def scheduler(
    *, rows=4, sizes=(1, 2, 4, 8, 16), blocks=64, block_size=4, policy="grow", context=64, growth=0, **more
) -> Scheduler:
    pool = SlotPool(blocks, block_size, policy=policy, prefix_cache=True)
    pool.growth_tokens = growth
    costs = [BucketCost(size=n, compile_seconds=0.0, milliseconds=10.0 + n) for n in sizes]
    return Scheduler(pool, BucketLadder(costs), max_rows=rows, max_context=context, **more)


def request(name, prompt=4, *, arrival=0.0, priority=0, salt="", **sampling) -> Request:
    """`prompt`: token ids, or how many tokens of the request's own."""
    own = prompt if not isinstance(prompt, int) else tuple(1000 * (1 + ord(name[0])) + i for i in range(prompt))
    params = SamplingParams(**{"max_tokens": 8, "temperature": 0.0, **sampling})
    return Request(
        request_id=name, prompt=tuple(own), sampling=params, arrival=arrival, priority=priority, cache_salt=salt
    )


def answer(plan: IterationPlan, tokens=None) -> IterationResult:
    """Every chunk's token is 7 unless told otherwise; scores are numbered by flat token."""
    count = len(plan.chunks)
    flat = np.arange(plan.bucket, dtype=np.float32)
    ids = np.arange(plan.bucket, dtype=np.int32)[:, None] * 100 + np.arange(MAX_LOGPROBS, dtype=np.int32)
    chosen = np.full(count, 7, np.int32) if tokens is None else np.array(tokens, np.int32)
    return IterationResult(
        tokens=chosen,
        logprobs=-np.arange(count, dtype=np.float32),
        top_ids=np.tile(np.arange(MAX_LOGPROBS, dtype=np.int32), (count, 1)),
        top_logprobs=np.tile(-np.arange(MAX_LOGPROBS, dtype=np.float32), (count, 1)),
        score_logprobs=-flat,
        score_top_ids=ids,
        score_top_logprobs=-ids.astype(np.float32),
    )


def step(made: Scheduler, tokens=None):
    """One iteration with nothing else in flight: its plan and events."""
    plan = made.schedule()
    assert plan is not None
    return plan, made.complete(plan, answer(plan, tokens))


def names(plan: IterationPlan) -> list[str]:
    return [admission.request_id for admission in plan.admissions]


def finish(made: Scheduler, *launched: IterationPlan) -> list:
    """Run on until all have ended; the events. `launched`: plans in flight."""
    events, in_flight = [], deque(launched)
    while made.has_work:
        plan = made.schedule()
        if plan is not None:
            in_flight.append(plan)
        if plan is None or len(in_flight) > 1:
            done = in_flight.popleft()
            events += made.complete(done, answer(done))
    return events


# ---- At the door


@pytest.mark.parametrize(
    ("wrong", "field", "message"),
    [
        (request("a", ()), "prompt", "is empty"),
        (request("a", 64), "prompt", "has 64 tokens; a request may hold 64, so at most 63 leave room"),
        (request("a", 60), "max_tokens", "is 8 after a prompt of 60 tokens; a request may hold 64, so at most 4 fit"),
    ],
)
def test_what_can_never_fit_the_context_is_refused(wrong, field, message):
    made = scheduler()
    with pytest.raises(InvalidRequest, match=message) as error:
        made.submit(wrong)
    assert error.value.field == field
    assert not made.has_work


@pytest.mark.parametrize("policy", ["grow", "reserve"])
def test_what_can_never_fit_the_pool_is_refused_and_what_just_fits_runs(policy):
    made = scheduler(blocks=3, policy=policy, growth=16)
    with pytest.raises(InvalidRequest, match="the pool holds 12, so at most 8 fit") as error:
        made.submit(request("a", 4, max_tokens=9))
    assert error.value.field == "max_tokens"
    with pytest.raises(InvalidRequest, match=r"prompt: has 12 tokens; the pool holds 12"):
        made.submit(request("a", 12, max_tokens=1))
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
    while made.num_running:
        assert names(step(made)[0]) == []
    assert names(step(made)[0]) == ["b", "c"]


def test_a_plan_holds_max_rows():
    made = scheduler(rows=2)
    for name in "abc":
        made.submit(request(name, 2))
    plan, _ = step(made)
    assert names(plan) == ["a", "b"]
    assert (made.num_running, made.num_waiting, made.waiting_tokens) == (2, 1, 2)


def test_the_queue_removes_from_the_middle_and_keeps_count():
    class Entry:
        def __init__(self, key):
            self.key, self.tokens = (float(key), key), [0] * 3

    queue: WaitingQueue[Entry] = WaitingQueue()
    entries = [Entry(k) for k in range(1000)]
    for entry in reversed(entries):
        queue.push(entry)
    for entry in entries[:990]:
        queue.remove(entry)
    assert (len(queue), queue.num_tokens) == (10, 30)
    assert len(queue._heap) < 200  # those removed do not pile up
    assert queue.first() is entries[990]
    assert queue.pop() is entries[990]
    queue.push(entries[990])
    assert [queue.pop() for _ in range(10) if queue.first()] == entries[990:]
    assert queue.first() is None
    assert (len(queue), queue.num_tokens) == (0, 0)


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
    made.complete(plan, answer(plan))
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
    made._default_pace = None  # which is of the ladder before
    made._budget = 3
    made._ladder = BucketLadder([BucketCost(size=3, compile_seconds=0.0, milliseconds=1.0)])
    assert step(made)[0].chunks[-1] == Chunk(2, 0, 1, False)
    made._budget = 2
    assert [(c.row, c.length) for c in step(made)[0].chunks] == [(0, 1), (2, 1)]


# ---- One plan ahead


def test_two_plans_in_flight_and_no_more():
    made = scheduler()
    made.submit(request("a", 4))
    first, second = made.schedule(), made.schedule()
    assert first is not None
    assert second is not None
    assert (first.sequence, second.sequence) == (0, 1)
    assert second.chunks == (Chunk(0, 4, 1, True),)  # its token is not known here yet
    assert made.schedule() is None
    made.complete(first, answer(first))
    assert made.schedule() is not None


def test_plans_complete_in_order():
    made = scheduler()
    made.submit(request("a", 4))
    first, second = made.schedule(), made.schedule()
    assert first is not None
    assert second is not None
    with pytest.raises(AssertionError, match="plan 1 completed before 0"):
        made.complete(second, answer(second))


def test_nothing_is_scheduled_past_max_tokens_and_the_row_is_free_at_once():
    made = scheduler(rows=1)
    made.submit(request("a", 4, max_tokens=2))
    made.submit(request("b", 4, max_tokens=1))
    first, second = made.schedule(), made.schedule()
    assert first is not None
    assert second is not None
    made.complete(first, answer(first))
    third = made.schedule()
    assert third is not None
    assert (names(third), third.admissions[0].row) == (["b"], 0)  # while a's last token is in flight on the same row
    assert made.num_running == 2
    (event,) = made.complete(second, answer(second))
    assert (event.request_id, event.finish_reason) == ("a", FinishReason.LENGTH)
    (event,) = made.complete(third, answer(third))
    assert (event.request_id, event.finish_reason) == ("b", FinishReason.LENGTH)
    assert not made.has_work


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
    broken, fine = made.complete(plan, result)
    assert (broken.request_id, broken.finish_reason, broken.token_ids) == ("a", FinishReason.ERROR, ())
    assert broken.error == "the model's logits for position 4 are not finite"
    assert (fine.request_id, fine.finish_reason, fine.token_ids) == ("b", None, (7,))
    assert [event.finish_reason for event in finish(made)][-1] == FinishReason.LENGTH
    assert made.pool.slots_used == 0


def test_a_stop_found_late_discards_one_token():
    made = scheduler(rows=1, eos_token_ids=frozenset({2}))
    made.submit(request("a", 3))
    made.submit(request("b", 4))
    first, second = made.schedule(), made.schedule()
    assert first is not None
    assert second is not None
    (event,) = made.complete(first, answer(first, [2]))
    assert event.finish_reason == FinishReason.EOS
    assert made.pool.slots_used == 0
    third = made.schedule()  # b takes row and blocks while a's discarded chunk is in flight
    assert third is not None
    assert third.admissions[0].request_id == "b"
    assert made.complete(second, answer(second)) == []
    assert made.complete(third, answer(third))[0].request_id == "b"


def test_a_block_with_a_discarded_write_in_flight_is_not_published():
    # Position 3, the end-of-sequence token, is being computed in vain by the second plan: it would fill block 0.
    made = scheduler(rows=1, eos_token_ids=frozenset({2}))
    made.submit(request("a", (4, 5, 6)))
    first, second = made.schedule(), made.schedule()
    assert first is not None
    assert second is not None
    assert second.chunks == (Chunk(0, 3, 1, True),)
    made.complete(first, answer(first, [2]))
    made.submit(request("b", (4, 5, 6, 2, 8)))
    third = made.schedule()
    assert third is not None
    assert third.admissions[0].blocks == ()
    made.complete(second, answer(second))
    assert made.pool.num_cached == 0
    made.complete(third, answer(third))
    assert made.pool.num_cached == 1


def test_a_block_is_published_when_its_plan_has_completed_not_before():
    made = scheduler(sizes=(1, 2, 4, 8))
    made.submit(request("a", range(8)))
    first = made.schedule()
    made.submit(request("b", range(10)))
    second = made.schedule()
    assert first is not None
    assert second is not None
    assert second.admissions[0].blocks == ()
    made.complete(first, answer(first))
    made.complete(second, answer(second))
    made.submit(request("c", range(10)))
    assert step(made)[0].admissions[0].blocks == (0, 1)


def test_stages_hold_disjoint_rows():
    made = scheduler(rows=2, n_stages=2)
    for name in "abcdefg":
        made.submit(request(name, 2, max_tokens=3))
    plans = deque(made.schedule() for _ in range(3))
    assert [names(plan) for plan in plans if plan] == [["a", "b"], ["c", "d"], ["e", "f"]]
    assert made.schedule() is None
    first = plans.popleft()
    assert first is not None
    made.complete(first, answer(first))
    plan = made.schedule()
    assert plan is not None
    assert [chunk.row for chunk in plan.chunks] == [0, 1]
    assert made.num_waiting == 1


def test_with_stages_an_aborted_row_is_free_when_its_plan_has_landed():
    made = scheduler(rows=1, n_stages=2)
    made.submit(request("a", 2))
    first = made.schedule()
    assert first is not None
    made.abort("a")
    made.submit(request("b", 2))
    second = made.schedule()
    assert second is not None
    assert second.chunks[0].row == 1
    assert made.complete(first, answer(first)) == []
    made.submit(request("c", 2))
    third = made.schedule()
    assert third is not None
    assert third.chunks[0].row == 0


# ---- Preemption


def crowded(**more) -> Scheduler:
    """Two requests of 2 blocks each on 2 rows, in a pool of 5 blocks, about to need a third each."""
    made = scheduler(rows=2, blocks=5, block_size=2, sizes=(1, 2, 4, 8), context=10, **more)
    made.submit(request("a", 3, max_tokens=6))
    made.submit(request("b", 3, max_tokens=6))
    return made


def test_the_latest_is_preempted_and_resumes_where_it_was():
    made = crowded()
    _, events = step(made, [11, 21])
    assert [e.request_id for e in events] == ["a", "b"]
    step(made, [12, 22])  # position 3
    plan, events = step(made, [13])  # position 4: a takes the last block, b needs one and is the latest
    assert [chunk.row for chunk in plan.chunks] == [0]
    assert (made.num_running, made.num_waiting, made.waiting_tokens) == (1, 1, 5)
    tokens, admissions = [], []
    while made.has_work:
        plan, events = step(made)
        admissions += plan.admissions
        tokens += [e.token_ids[0] for e in events if e.request_id == "b"]
    (admission,) = admissions
    assert admission.request_id == "b"
    assert admission.tokens[3:] == (21, 22)
    assert admission.prompt_length == 3
    assert len(tokens) == 4


def test_a_token_in_flight_at_preemption_is_kept():
    made = crowded()
    first, second = made.schedule(), made.schedule()
    assert first is not None
    assert second is not None
    made.complete(first, answer(first, [11, 21]))
    third = made.schedule()
    assert third is not None
    assert [chunk.row for chunk in third.chunks] == [0]
    assert (made.num_waiting, made.waiting_tokens) == (1, 5)  # the one in flight counted
    events = made.complete(second, answer(second, [12, 22]))
    assert [(e.request_id, e.token_ids) for e in events] == [("a", (12,)), ("b", (22,))]
    assert made.waiting_tokens == 5
    events += finish(made, third)
    assert sum(e.request_id == "b" for e in events) == 5


def test_a_preempted_request_that_ends_by_the_token_in_flight_is_through():
    made = crowded(eos_token_ids=frozenset({2}))
    first, second = made.schedule(), made.schedule()
    assert first is not None
    assert second is not None
    made.complete(first, answer(first))
    assert made.schedule() is not None
    events = made.complete(second, answer(second, [7, 2]))
    assert events[1].finish_reason == FinishReason.EOS
    assert (made.num_waiting, made.num_running) == (0, 1)
    assert made.abort("b") is None


def test_a_preempted_request_is_not_overtaken():
    made = crowded()
    first, second = made.schedule(), made.schedule()
    assert first is not None
    assert second is not None
    made.complete(first, answer(first))
    third = made.schedule()  # preempts b; a row and two blocks are free
    assert third is not None
    made.submit(request("c", 1, max_tokens=1))
    made.complete(second, answer(second))
    order = []
    in_flight = deque([third])
    while made.has_work:
        plan = made.schedule()
        if plan is not None:
            order += names(plan)
            in_flight.append(plan)
        if plan is None or len(in_flight) > 1:
            done = in_flight.popleft()
            made.complete(done, answer(done))
    assert order == ["b", "c"]


def test_blocks_about_to_come_back_are_waited_for():
    made = scheduler(blocks=4, block_size=2, sizes=(1, 2, 4, 8), context=8)
    made.submit(request("a", 4, max_tokens=4))
    made.submit(request("b", 3, max_tokens=1))
    first = made.schedule()  # samples a's first token and b's only one
    assert first is not None
    assert made.schedule() is None  # a needs a block; b ends with the plan in flight
    made.complete(first, answer(first))
    plan = made.schedule()
    assert plan is not None
    assert plan.chunks == (Chunk(0, 4, 1, True),)


# ---- Aborts


def test_abort_in_every_state():
    made = crowded()
    made.submit(request("c", 2))
    made.submit(request("d", 2, max_tokens=1))
    assert made.abort("nobody") is None
    event = made.abort("c")  # waiting
    assert event is not None
    assert (event.token_ids, event.finish_reason) == ((), FinishReason.ABORTED)
    assert (made.num_waiting, made.waiting_tokens) == (3, 8)
    first, second = made.schedule(), made.schedule()
    assert first is not None
    assert second is not None
    made.complete(first, answer(first))
    third = made.schedule()  # preempts b
    assert third is not None
    assert made.num_waiting == 2
    assert made.abort("b") is not None  # preempted, a token in flight
    assert [e.request_id for e in made.complete(second, answer(second))] == ["a"]
    assert made.abort("a") is not None  # running
    assert made.pool.slots_used == 0
    fourth = made.schedule()
    assert fourth is not None
    assert names(fourth) == ["d"]
    assert made.abort("d") is not None  # its last token in flight
    assert made.abort("d") is None
    assert (made.num_running, made.num_waiting) == (0, 0)
    assert made.has_work  # plans in flight
    assert made.complete(third, answer(third)) == []
    assert made.complete(fourth, answer(fourth)) == []
    assert not made.has_work
    assert made._free_rows == [0, 1]
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
    made.complete(plan, answer(plan))
    finish(made)
    assert made.pool.num_cached == 0
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


# ---- What is reported


def test_the_sampler_is_the_most_demanding_row_that_samples():
    made = scheduler(rows=3, sizes=(16,))
    plain = request("a", 2)
    truncated = request("b", 2, temperature=1.0, top_p=0.5)
    full = request("c", 20, presence_penalty=1.0)
    variants = []
    for one in (plain, truncated, full):
        made.submit(one)
        variants.append(step(made)[0].sampler)
    # c's prompt takes two iterations; in the first it does not sample.
    variants.append(step(made)[0].sampler)
    assert variants == [SamplerVariant.PLAIN, SamplerVariant.TRUNCATED, SamplerVariant.TRUNCATED, SamplerVariant.FULL]
    made = scheduler(sizes=(2,))
    made.submit(request("a", 3))
    assert step(made)[0].sampler is None
    assert step(made)[0].sampler is SamplerVariant.PLAIN


@pytest.mark.parametrize(("asked", "full"), [(None, False), (0, False), (2, True)])
def test_logprobs(asked, full):
    made = scheduler()
    made.submit(request("a", 2, logprobs=asked))
    plan, (event,) = step(made)
    assert (plan.sampler == SamplerVariant.FULL) == full
    assert event.logprobs == (0.0,)
    assert event.top_logprobs == ((Alternatives((0, 1), (0.0, -1.0)),) if full else ())


@pytest.mark.parametrize("asked", [0, 2])
def test_prompt_logprobs_are_cut_out_of_the_flat_tokens(asked):
    made = scheduler(sizes=(1, 4, 8))
    made.submit(request("a", 3))
    step(made)
    made.submit(request("b", 9, prompt_logprobs=asked))
    seen = []
    # a's decode is flat token 0, so b's 7 prompt tokens are flat tokens 1 to 7 and score prompt positions 1 to 7.
    plan, events = step(made)
    assert plan.scoring
    assert plan.chunks == (Chunk(0, 3, 1, True), Chunk(1, 0, 7, False))
    assert [e.request_id for e in events] == ["a", "b"]
    assert events[1].token_ids == ()
    seen += events[1].prompt_logprobs
    # Positions 7 and 8 of b: 7 is followed by the last prompt token; what follows 8 is generated.
    plan, events = step(made)
    assert plan.scoring
    assert len(events[1].token_ids) == 1
    seen += events[1].prompt_logprobs
    assert [logprob for logprob, _ in seen] == [-1.0, -2.0, -3.0, -4.0, -5.0, -6.0, -7.0, -1.0]
    if asked:
        assert seen[2][1] == Alternatives((300, 301), (-300.0, -301.0))
    else:
        assert all(alternatives is None for _, alternatives in seen)
    plan, events = step(made)
    assert not plan.scoring
    assert events[1].prompt_logprobs == ()


def test_a_prompt_of_one_token_has_nothing_to_score():
    made = scheduler()
    made.submit(request("a", 1, prompt_logprobs=1))
    plan, (event,) = step(made)
    assert not plan.scoring
    assert event.prompt_logprobs == ()


def test_a_prompt_to_be_scored_takes_no_hits_and_is_scored_once():
    made = scheduler(blocks=6, block_size=2, sizes=(1, 2, 4, 8), context=12)
    made.submit(request("z", (50, 51, 52), max_tokens=1))
    finish(made)
    made.submit(request("a", 3, max_tokens=9))
    made.submit(request("b", (50, 51, 52), max_tokens=9, prompt_logprobs=0))
    plan, events = step(made)
    assert all(not a.blocks for a in plan.admissions)
    assert len(events[1].prompt_logprobs) == 2
    assert events[1].cached_tokens == 0
    admissions = []
    while made.has_work:
        plan, events = step(made)
        admissions += plan.admissions
        assert not plan.scoring
        assert all(not e.prompt_logprobs for e in events)
    assert [a.request_id for a in admissions] == ["b"]  # it was preempted on the way


def test_a_preemption_amid_scoring_repeats_no_score():
    made = scheduler(rows=2, blocks=7, block_size=2, sizes=(1, 2, 4), context=14)
    made.submit(request("a", 4, max_tokens=8))
    made.submit(request("b", 8, max_tokens=1, prompt_logprobs=0))
    step(made)  # a's prompt
    seen, admissions = [], []
    while made.has_work:
        plan, events = step(made)
        seen += [entry for e in events for entry in e.prompt_logprobs]
        admissions += plan.admissions
        if plan.sequence == 2:
            assert len(seen) == 6  # of 7, and then a needs the block that b would have come to
            assert made.num_waiting == 0
        if plan.sequence == 3:
            assert made.num_waiting == 1
    assert len(seen) == 7
    # The whole prompt is computed again, whatever the cache holds of it.
    assert [(a.request_id, a.blocks) for a in admissions] == [("b", ()), ("b", ())]


# ---- Request-level batching


def test_a_batch_of_requests_begins_and_ends_as_one():
    made = scheduler(rows=2, mode="request")
    made.submit(request("a", 2, max_tokens=1))
    made.submit(request("b", 2, max_tokens=3))
    made.submit(request("c", 2, max_tokens=1))
    plan, events = step(made)
    assert (names(plan), events) == (["a", "b"], [])
    with pytest.raises(ValueError, match="in use"):
        made.submit(request("a"))  # its answer is not out yet
    for _ in range(2):
        assert made.num_waiting == 1
        plan, events = step(made)
        assert names(plan) == []
    assert [(e.request_id, e.finish_reason) for e in events] == [
        ("a", FinishReason.LENGTH),
        ("b", None),
        ("b", None),
        ("b", FinishReason.LENGTH),
    ]
    assert names(step(made)[0]) == ["c"]
    assert not made.has_work


def test_who_comes_after_the_batch_has_formed_waits_even_for_an_empty_row():
    made = scheduler(rows=2, mode="request")
    made.submit(request("a", 2, max_tokens=2))
    assert names(step(made)[0]) == ["a"]
    made.submit(request("b", 2, max_tokens=2))
    assert names(step(made)[0]) == []
    assert names(step(made)[0]) == ["b"]


def test_a_batch_admits_what_it_was_formed_of_over_several_iterations():
    made = scheduler(rows=2, sizes=(1, 2, 4), mode="request")
    for name in "ab":
        made.submit(request(name, 4))
    assert names(step(made)[0]) == ["a"]
    assert names(step(made)[0]) == ["b"]


def test_a_batch_that_the_pool_has_cut_short_stays_closed():
    made = scheduler(rows=3, blocks=6, policy="reserve", context=24, mode="request")
    made.submit(request("a", 4, max_tokens=1))  # 2 blocks
    made.submit(request("b", 4, max_tokens=8))  # 3 blocks
    made.submit(request("c", 4, max_tokens=4))  # 2 blocks: not now
    assert names(step(made)[0]) == ["a", "b"]
    while made.num_running:
        assert names(step(made)[0]) == []  # though a's blocks and row are free at once
    assert names(step(made)[0]) == ["c"]


def test_an_abort_takes_back_what_was_held_and_sets_the_rest_free():
    made = scheduler(rows=3, mode="request")
    for name, most in (("a", 1), ("b", 1), ("c", 5)):
        made.submit(request(name, 2, max_tokens=most))
    assert step(made)[1] == []
    event = made.abort("a")  # finished, but held back
    assert event is not None
    assert event.finish_reason == FinishReason.ABORTED
    assert made.abort("a") is None
    assert made.take_held() == []
    assert made.abort("c") is not None  # the last that ran
    assert made.has_work
    assert [e.request_id for e in made.take_held()] == ["b"]
    assert not made.has_work
