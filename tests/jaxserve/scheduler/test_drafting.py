"""Drafts in the scheduler's plans, and what their answers mean."""

import numpy as np
import pytest

from jaxserve.iteration import Chunk, IterationPlan, IterationResult
from jaxserve.request import FinishReason, Request
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.scheduler.slot_pool import SlotPool
from jaxserve.scheduler.speculation import Speculation
from tests.jaxserve.scheduler.drafts import Script, ladder
from tests.jaxserve.scheduler.stepping import land


def scheduler(drafts: dict[int, tuple[int, ...]], *, n_stages: int = 1, blocks: int = 16) -> Scheduler:
    """Buckets of 1, 2, 4 and 8 tokens at one price, so that whatever may come true is drafted."""
    costs = ladder(dict.fromkeys((1, 2, 4, 8), 1000.0))
    speculation = Speculation(
        costs, most=4, max_points=8, waits=n_stages == 1, propose=lambda tokens: Script(tokens, drafts)
    )
    pool = SlotPool(blocks, 4, policy="grow", prefix_cache=True)
    pool.growth_tokens = 0
    return Scheduler(pool, costs, max_rows=2, max_context=32, n_stages=n_stages, speculation=speculation)


def request(name: str, prompt: tuple[int, ...] = (1, 2, 3), max_tokens: int = 8, **sampling) -> Request:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, **sampling)
    return Request(request_id=name, prompt=prompt, sampling=params)


def planned(made: Scheduler) -> IterationPlan:
    plan = made.schedule()
    assert plan is not None
    return plan


def answer(*tokens: int) -> IterationResult:
    return IterationResult(tokens=np.array(tokens, np.int32), logprobs=-np.arange(len(tokens), dtype=np.float32))


def test_row_continues_after_last_accepted_draft() -> None:
    made = scheduler({3: (9, 5, 6, 7), 4: (5, 6, 7)})
    made.submit(request("a"))
    first = planned(made)
    assert made.schedule() is None  # drafts may follow once its token is known
    land(made, first, answer(9))
    second = planned(made)
    assert second.chunks == (Chunk(0, 3, 4, 4),)
    assert (second.drafts, second.bucket) == ((5, 6, 7), 4)
    assert made.schedule() is None
    (event,) = land(made, second, answer(5, 6, 1, 8))
    assert (event.token_ids, event.logprobs) == ((5, 6, 1), (0.0, -1.0, -2.0))
    assert (made.drafted_tokens, made.accepted_tokens) == (3, 2)
    third = planned(made)  # nothing to draft: as ever, with the next ahead of it
    assert third.chunks == (Chunk(0, 6, 1, 1),)
    assert third.drafts == ()
    assert planned(made).chunks == (Chunk(0, 7, 1, 1),)


def test_nothing_to_draft_is_launched_ahead() -> None:
    made = scheduler({3: (9,)})  # once it is known whether 9 came, nothing is left to draft
    made.submit(request("a"))
    planned(made)
    assert planned(made).chunks == (Chunk(0, 3, 1, 1),)


def test_no_draft_goes_past_the_last_token_asked_for() -> None:
    made = scheduler({4: (5, 6, 7)})
    made.submit(request("a", max_tokens=3))
    land(made, planned(made), answer(9))
    plan = planned(made)
    assert plan.chunks == (Chunk(0, 3, 2, 2),)
    (event,) = land(made, plan, answer(5, 6))
    assert (event.token_ids, event.finish_reason) == ((5, 6), FinishReason.LENGTH)
    assert not made.has_work
    assert made.pool.slots_used == 0


def test_accepted_stop_token_ends_the_answer() -> None:
    made = scheduler({4: (5, 6, 7)})
    made.submit(request("a", stop_token_ids=(6,)))
    land(made, planned(made), answer(9))
    (event,) = land(made, planned(made), answer(5, 6, 7, 8))
    assert (event.token_ids, event.finish_reason) == ((5, 6), FinishReason.STOP)
    assert not made.has_work


@pytest.mark.parametrize(("drawn", "published"), [((1, 6, 7, 8, 2), 1), ((5, 6, 7, 8, 2), 2)])
def test_only_what_was_accepted_is_published(drawn, published) -> None:
    made = scheduler({4: (5, 6, 7, 8)})
    made.submit(request("a"))
    land(made, planned(made), answer(9))
    plan = planned(made)
    assert plan.chunks == (Chunk(0, 3, 5, 5),)  # up to the end of the second block
    land(made, plan, answer(*drawn))
    assert made.pool.blocks.num_cached == published


def test_prompts_leave_no_tokens_for_drafts() -> None:
    made = scheduler({4: (5, 6, 7), 5: (5, 6, 7)})
    made.submit(request("a"))
    land(made, planned(made), answer(9))
    made.submit(request("b", prompt=(4, 4, 4)))
    plan = planned(made)
    assert plan.chunks == (Chunk(0, 3, 1, 1), Chunk(1, 0, 3, 1))
    assert plan.drafts == ()


def test_nobody_gives_up_blocks_for_drafts() -> None:
    made = scheduler({4: (5, 6, 7, 8)}, blocks=2)
    made.submit(request("a", max_tokens=5))
    made.submit(request("b", max_tokens=1))
    land(made, planned(made), answer(9, 9))
    assert planned(made).chunks == (Chunk(0, 3, 4, 4),)  # b has ended and given its block back
    made = scheduler({4: (5, 6, 7, 8)}, blocks=2)
    made.submit(request("a", max_tokens=5))
    made.submit(request("b", max_tokens=5))
    land(made, planned(made), answer(9, 9))
    assert planned(made).chunks == (Chunk(0, 3, 1, 1), Chunk(1, 3, 1, 1))


def test_stages_draft_for_some_rows_while_others_are_under_way() -> None:
    made = scheduler({4: (5, 6, 7)}, n_stages=2)
    for name in "abc":
        made.submit(request(name))
    first, second = planned(made), planned(made)
    assert [len(plan.admissions) for plan in (first, second)] == [2, 1]
    land(made, first, answer(9, 9))
    third = planned(made)
    assert third.drafts == (5, 6, 7, 5, 6, 7)
    land(made, second, answer(9))
    assert planned(made).drafts == (5, 6, 7)
    events = land(made, third, answer(5, 6, 7, 1, 2, 6, 7, 1))
    assert [event.token_ids for event in events] == [(5, 6, 7, 1), (2,)]
