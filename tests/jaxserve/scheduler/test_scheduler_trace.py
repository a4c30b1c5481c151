"""Thirteen iterations worked by hand: arrivals, departures, a prefix hit, a preemption and a stop found late.

Blocks of 4 slots, 7 blocks, 3 rows, buckets 1, 2, 4, 8 that cost 10 ms + 1 ms a token, one token of growth kept free
per request. Plan n+1 is made before plan n completes, as the engine does.

    request  arrives      prompt                        max_tokens  ends
    A        before 0     10 tokens                     3           at its limit
    B        before 0     6 tokens                      9           at its limit
    C        before 3     A's first 8 tokens, 1 more    8           with an end-of-sequence token at position 15
    D        before 4     5 tokens                      3           at its limit
"""

from __future__ import annotations

from collections import deque

import numpy as np

from jaxserve.iteration import Admission, Chunk, IterationPlan, IterationResult, SamplerVariant, TableChange
from jaxserve.request import FinishReason, Request, TokenEvent
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduler.buckets import BucketCost, BucketLadder
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.scheduler.slot_pool import SlotPool

EOS = 0
A = tuple(range(1, 11))
B = tuple(range(21, 27))
C = (*A[:8], 31)
D = tuple(range(41, 46))
GREEDY = {name: SamplingParams(max_tokens=n, temperature=0.0) for name, n in (("A", 3), ("B", 9), ("C", 8), ("D", 3))}
ARRIVALS = {0: [("A", A, 0.0), ("B", B, 1.0)], 3: [("C", C, 2.0)], 4: [("D", D, 3.0)]}


def token(name: str, position: int) -> int:
    """What the model answers: 105 is A's token at position 5, 205 is B's."""
    return EOS if (name, position) == ("C", 15) else 100 * ("ABCD".index(name) + 1) + position


def admission(row: int, name: str, tokens: tuple[int, ...], prompt_length: int, blocks: tuple[int, ...]) -> Admission:
    return Admission(
        row=row, request_id=name, tokens=tokens, prompt_length=prompt_length, blocks=blocks, sampling=GREEDY[name]
    )


def plan(sequence, bucket, chunks, changes=(), admissions=(), sampler=SamplerVariant.PLAIN) -> IterationPlan:
    return IterationPlan(
        sequence=sequence,
        bucket=bucket,
        admissions=tuple(admissions),
        chunks=tuple(Chunk(*chunk) for chunk in chunks),
        table_changes=tuple(TableChange(*change) for change in changes),
        sampler=sampler,
        scoring=False,
    )


PLANS = [
    # A's prompt alone fills the largest bucket, so B is not looked at. Two blocks are touched. Nothing is sampled.
    plan(0, 8, [(0, 0, 8, False)], [(0, 0, 0), (0, 1, 1)], [admission(0, "A", A, 10, ())], sampler=None),
    # The rest of A and all of B fill the bucket again; both end their prompts and sample.
    plan(1, 8, [(0, 8, 2, True), (1, 0, 6, True)], [(0, 2, 2), (1, 0, 3), (1, 1, 4)], [admission(1, "B", B, 6, ())]),
    # Decodes of tokens that the host does not know yet. All positions lie in blocks that are there already.
    plan(2, 2, [(0, 10, 1, True), (1, 6, 1, True)]),
    # C came. Plan 0 has completed, so A's first two blocks are published and C starts behind them, with one token to
    # compute: 3 tokens. Bucket 2 cannot take C along, so bucket 4 it is. This samples A's third and last token.
    plan(
        3,
        4,
        [(0, 11, 1, True), (1, 7, 1, True), (2, 8, 1, True)],
        [(2, 2, 5)],
        [admission(2, "C", C, 9, (0, 1))],
    ),
    # A's row 0 is free, though A's last token is in flight. D came, but B opens the last free block here: D waits.
    plan(4, 2, [(1, 8, 1, True), (2, 9, 1, True)], [(1, 2, 6)]),
    # A ended when plan 3 completed; its blocks 0 and 1 are C's too, block 2 is free again. D needs 2 and 1 for growth.
    plan(5, 2, [(1, 9, 1, True), (2, 10, 1, True)]),
    plan(6, 2, [(1, 10, 1, True), (2, 11, 1, True)]),
    # C opens its fourth block, the last that was free.
    plan(7, 2, [(1, 11, 1, True), (2, 12, 1, True)], [(2, 3, 2)]),
    # B needs a block and none is left: C came last and is preempted. Its chunk of plan 7 is in flight, writing to
    # block 2; B's own write to block 2 comes after that on the device. Blocks 0, 1 and 5 (positions 0 to 11 of C, which
    # plan 6 completed) stay in the cache.
    plan(8, 1, [(1, 12, 1, True)], [(1, 3, 2)]),
    # C's token of plan 7 has landed and C waits, ahead of D: it needs 1 new block, 3 from the cache and 1 for growth,
    # and 3 are there. D would not need more, but does not overtake. This samples B's last token.
    plan(9, 1, [(1, 13, 1, True)]),
    # (Nothing could be planned until plan 9 completed and gave B's blocks back.) C comes again with the 14 tokens known
    # of it, 12 of them in the cache, and computes the other 2. D follows: 7 tokens. Block 2 was never published and
    # goes first; then the least recently used: of B's blocks the last of the chain first.
    plan(
        10,
        8,
        [(0, 12, 2, True), (1, 0, 5, True)],
        [(0, 3, 2), (1, 0, 6), (1, 1, 4)],
        [admission(0, "C", (*C, 309, 310, 311, 312, 313), 9, (0, 1, 5)), admission(1, "D", D, 5, ())],
    ),
    plan(11, 2, [(0, 14, 1, True), (1, 5, 1, True)]),
    # Plan 11 chose the end of sequence for C at position 15, which is not known when this is launched: C's chunk is
    # computed in vain. D's is its last.
    plan(12, 2, [(0, 15, 1, True), (1, 6, 1, True)]),
]


def event(name: str, position: int, reason: FinishReason | None = None) -> TokenEvent:
    cached = 8 if name == "C" else 0  # found when C first began, not when it came again
    return TokenEvent(name, (token(name, position),), (-float(position),), finish_reason=reason, cached_tokens=cached)


EVENTS = [
    [],
    [event("A", 10), event("B", 6)],
    [event("A", 11), event("B", 7)],
    [event("A", 12, FinishReason.LENGTH), event("B", 8), event("C", 9)],
    [event("B", 9), event("C", 10)],
    [event("B", 10), event("C", 11)],
    [event("B", 11), event("C", 12)],
    [event("B", 12), event("C", 13)],
    [event("B", 13)],
    [event("B", 14, FinishReason.LENGTH)],
    [event("C", 14), event("D", 5)],
    [event("C", 15, FinishReason.EOS), event("D", 6)],
    [event("D", 7, FinishReason.LENGTH)],
]


def test_the_trace():
    pool = SlotPool(7, 4, policy="grow", prefix_cache=True)
    pool.growth_tokens = 1
    ladder = BucketLadder([BucketCost(size=n, compile_seconds=0.0, milliseconds=10.0 + n) for n in (1, 2, 4, 8)])
    scheduler = Scheduler(pool, ladder, max_rows=3, max_context=32, eos_token_ids=frozenset({EOS}))
    in_flight: deque[IterationPlan] = deque()
    on_row: dict[int, str] = {}
    names: dict[int, list[str]] = {}  # by plan: whose the chunks are
    plans: list[IterationPlan] = []
    while scheduler.has_work or not plans:
        arrivals = ARRIVALS.pop(len(plans), [])
        for name, prompt, arrival in arrivals:
            scheduler.submit(Request(request_id=name, prompt=prompt, sampling=GREEDY[name], arrival=arrival))
        made = scheduler.schedule()
        if made is not None:
            assert made == PLANS[len(plans)]
            plans.append(made)
            in_flight.append(made)
            on_row.update((a.row, a.request_id) for a in made.admissions)
            names[made.sequence] = [on_row[chunk.row] for chunk in made.chunks]
        if made is None or len(in_flight) == 2:
            done = in_flight.popleft()
            ends = [chunk.start + chunk.length for chunk in done.chunks]
            chosen = [token(name, end) for name, end in zip(names[done.sequence], ends, strict=True)]
            result = IterationResult(tokens=np.array(chosen, np.int32), logprobs=-np.array(ends, np.float32))
            assert [event for _, event in scheduler.complete(done, result)] == EVENTS[done.sequence]
    assert plans == PLANS
    assert pool.slots_used == 0
