"""A scheduler without a device, its requests, and iterations one at a time.

Every token is 7 unless told otherwise.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from jaxserve.iteration import IterationPlan, IterationResult
from jaxserve.request import Request, TokenEvent
from jaxserve.sampling_params import MAX_LOGPROBS, SamplingParams
from jaxserve.scheduler.buckets import BucketCost, BucketLadder
from jaxserve.scheduler.policy import make_policy
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.scheduler.slot_pool import SlotPool
from jaxserve.scheduler.static_batching import StaticBatchScheduler


def scheduler(
    *,
    rows=4,
    sizes=(1, 2, 4, 8, 16),
    blocks=64,
    block_size=4,
    policy="grow",
    context=64,
    growth=0,
    static=False,
    token_budget=None,
    target_tpot=None,
    slot_milliseconds=0.0,
    policy_window=None,
    **more,
) -> Scheduler:
    pool = SlotPool(blocks, block_size, policy=policy, prefix_cache=True)
    pool.growth_tokens = growth
    costs = [BucketCost(size=n, compile_seconds=0.0, milliseconds=10.0 + n) for n in sizes]
    ladder = BucketLadder(costs)
    budget_policy = make_policy(
        ladder,
        max_rows=rows,
        batches=more.get("in_flight", more["n_stages"] + 1) if more.get("n_stages", 1) > 1 else 1,
        token_budget=token_budget,
        target_tpot=target_tpot,
        slot_milliseconds=slot_milliseconds,
        window=policy_window,
        is_fixed=static or more.get("fixed_chunk") is not None,
    )
    made = StaticBatchScheduler if static else Scheduler
    return made(pool, ladder, max_rows=rows, max_context=context, policy=budget_policy, **more)


def request(name, prompt=4, *, arrival=0.0, priority=0, tenant="", share=1.0, salt="", **sampling) -> Request:
    """`prompt`: token ids, or how many tokens of the request's own."""
    own = prompt if not isinstance(prompt, int) else tuple(1000 * (1 + ord(name[0])) + i for i in range(prompt))
    params = SamplingParams(**{"max_tokens": 8, "temperature": 0.0, **sampling})
    return Request(
        request_id=name,
        prompt=tuple(own),
        sampling=params,
        arrival=arrival,
        priority=priority,
        tenant=tenant,
        share=share,
        cache_salt=salt,
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


def land(made: Scheduler, plan: IterationPlan, result: IterationResult | None = None) -> list[TokenEvent]:
    """Complete a plan, with the answer that every chunk is 7 unless told otherwise; its events."""
    return [event for _, event in made.complete(plan, answer(plan) if result is None else result)]


def step(made: Scheduler, tokens=None):
    """One iteration with nothing else in flight: its plan and events."""
    plan = made.schedule()
    assert plan is not None
    return plan, land(made, plan, answer(plan, tokens))


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
            events += land(made, done)
    return events


def crowded(**more) -> Scheduler:
    """Two requests of 2 blocks each on 2 rows, in a pool of 5 blocks, about to need a third each."""
    made = scheduler(rows=2, blocks=5, block_size=2, sizes=(1, 2, 4, 8), context=10, **more)
    made.submit(request("a", 3, max_tokens=6))
    made.submit(request("b", 3, max_tokens=6))
    return made
