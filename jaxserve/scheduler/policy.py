"""Token budget policies: how many tokens an iteration may carry, decodes against prompts.

The scheduler asks a policy twice for every plan: before it gathers decodes, and again before it admits requests and
fills the rest with prompts. To try another policy, write a class with these two methods and return it from
`make_policy`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import accumulate
from typing import Protocol

from jaxserve.scheduler.buckets import BucketLadder
from jaxserve.scheduler.plan_builder import PlanBuilder
from jaxserve.scheduler.requests import RequestTable
from jaxserve.scheduler.state import RequestState

# Iterations over which a prompt is spread while others decode. Simulated on Orca's trace (175B, 2 stages of 8 GPUs),
# 8 to 16 differ by 2% at any load; 24 costs 5% where slots are short.
PROMPT_ITERATIONS = 12

# Without a target: how many times as long as its decodes alone an iteration with prompts may take, and over how many
# iterations the waiting prompts may be spread. benchmarks/results/2026-11-23-simulator.md
# has the results of other values.
STRETCH, BACKLOG_ITERATIONS = 2.0, 8

# With a target: least prompt tokens a second beside decodes, as a share of those without a target. At a smaller share a
# prompt slows so many iterations a little that the mean time between tokens is no shorter.
LEAST_PACE = 0.25


class TokenBudgetPolicy(Protocol):
    """How many tokens the next iteration may carry."""

    def decode_budget(self, requests: RequestTable) -> int:
        """Most tokens while decodes are gathered."""
        ...

    def prompt_budget(self, requests: RequestTable, plan: PlanBuilder, decode_budget: int) -> int:
        """Most tokens in all, once `plan` holds the decodes and the prompts that have begun."""
        ...


class FixedTokenBudget:
    """Always the same budget."""

    def __init__(self, limit: int) -> None:
        self._limit = limit

    def decode_budget(self, requests: RequestTable) -> int:
        """The limit."""
        return self._limit

    def prompt_budget(self, requests: RequestTable, plan: PlanBuilder, decode_budget: int) -> int:
        """The limit."""
        return self._limit


class DefaultTokenBudget:
    """The token budget without a target: limits how much prompts delay decodes.

    An iteration with prompts takes no longer than one in which every row decodes, or than STRETCH times the duration of
    its own decodes, whichever is more. So tokens never come slower than with all rows in use. Where tokens beside the
    decodes are nearly free, as on an accelerator, an iteration takes all of them. It takes longer only to compute the
    waiting prompts within BACKLOG_ITERATIONS, so that this rule does not make the queue grow. If no row decodes, the
    budget is the limit.

    Everything follows from the measured bucket costs, so there is nothing to set for a device.
    """

    def __init__(self, ladder: BucketLadder, *, max_rows: int, limit: int, batches: int = 1) -> None:
        """
        Args:
          max_rows: most rows of one plan.
          limit: most tokens of an iteration (a result of `BucketLadder.limit`).
          batches: plans in flight that hold different rows.
        """
        self._sizes, self._limit, self._batches = ladder.sizes, limit, batches
        sizes, costs, last = ladder.sizes, ladder.costs_ms, len(ladder.sizes) - 1
        self._costs_ms, self._full = costs, min(bisect_left(sizes, max_rows), last)
        # For each bucket that decodes alone may take: the largest bucket that is fast enough, and at least that bucket.
        self._fast_enough = tuple(
            sizes[min(max(bisect_right(costs, max(costs[self._full], STRETCH * cost)) - 1, index), last)]
            for index, cost in enumerate(costs)
        )

    def decode_budget(self, requests: RequestTable) -> int:
        """The limit."""
        return self._limit

    def prompt_budget(self, requests: RequestTable, plan: PlanBuilder, decode_budget: int) -> int:
        """Most tokens of the next iteration (see `budget`).

        Deferred samples are not counted, because they have hardly anything left to compute.
        """
        decodes = plan.decodes
        if self._batches > 1:  # an iteration delays the rows of all plans in flight, which have about equally many each
            running = len(requests.running) + requests.num_counted - len(plan.prompts)
            decodes = max(decodes, -(-running // self._batches))
        return self.budget(decodes, plan.prompt_tokens + requests.waiting.num_tokens + requests.preempted_tokens)

    def budget(self, decodes: int, prompt_tokens: int) -> int:
        """Most tokens of the next iteration: a bucket's, or the limit.

        Args:
          decodes: rows of the iteration that decode.
          prompt_tokens: tokens not yet computed of the prompts that wait or have begun.
        """
        if not decodes or not prompt_tokens:
            return self._limit
        sizes, last = self._sizes, len(self._sizes) - 1
        fast_enough = self._fast_enough[min(bisect_left(sizes, decodes), last)]
        wanted = max(decodes - (-prompt_tokens // BACKLOG_ITERATIONS), decodes + 1)
        return min(max(fast_enough, sizes[min(bisect_left(sizes, wanted), last)]), self._limit)


class ObjectiveTokenBudget(DefaultTokenBudget):
    """The token budget for a target time between tokens (TPOT).

    While rows decode, an iteration carries as many prompt tokens as the target allows: the largest bucket with which
    they get their next token in time, by the buckets' measured costs and by the slots that the decodes read. Nothing is
    held back where no row decodes.

    The target is out of reach where a full batch of decodes with contexts like these takes longer, or where no bucket
    in time carries prompts at LEAST_PACE of the default pace. Requests would wait for their prompts without getting
    their tokens faster. Then the default pace applies.

    With several plans in flight every plan takes an equal share of the rows that decode, and each prompt is spread over
    several iterations: over one more for every row that decodes, over PROMPT_ITERATIONS at most. So plans are alike,
    and pipeline stages do not wait for each other.

    Decodes are never held back, so the target is missed where more rows decode than it allows.
    """

    def __init__(
        self,
        ladder: BucketLadder,
        *,
        max_rows: int,
        target_tpot: float,
        limit: int,
        batches: int = 1,
        slot_milliseconds: float = 0.0,
        window: int | None = None,
    ) -> None:
        """
        Args:
          max_rows / limit / batches: see `DefaultTokenBudget`.
          target_tpot: seconds between a request's tokens.
          slot_milliseconds: added milliseconds of an iteration per slot that it reads.
          window: slots that a decode reads at most; None for all of its request's.
        """
        if not target_tpot > 0:
            raise ValueError(f"target_tpot is {target_tpot}; it must be above 0 seconds")
        super().__init__(ladder, max_rows=max_rows, limit=limit, batches=batches)
        self._target_ms, self._slot_ms = 1000 * target_tpot / batches, slot_milliseconds
        self._max_rows, self._window = max_rows, window
        # Milliseconds of each bucket without the slots that its measurement read.
        self._empty_ms = tuple(
            accumulate((cost.milliseconds - slot_milliseconds * cost.slots_read for cost in ladder.costs), max)
        )

    def decode_budget(self, requests: RequestTable) -> int:
        """The limit, or a plan's share of the decodes where several plans are in flight."""
        if self._batches == 1:
            return self._limit
        decodes = len(_decoding(requests)) + requests.num_counted
        return self._bucket(max(-(-decodes // self._batches), 1))

    def prompt_budget(self, requests: RequestTable, plan: PlanBuilder, decode_budget: int) -> int:
        """Most tokens of the next iteration (see `paced`)."""
        if self._batches == 1:
            share, reads = plan.decodes, plan.slots_read(self._window)
        else:
            rows = PlanBuilder()
            rows.states = _decoding(requests)
            share = -(-(rows.decodes + requests.num_counted) // self._batches)
            reads = rows.slots_read(self._window) + requests.counted_slots
        prompts = sum(state.length for state in plan.prompts) + requests.waiting_tokens
        if (paced := self.paced(share, prompts, reads / self._batches)) is not None:
            return max(paced, decode_budget) if self._batches > 1 else paced
        return super().prompt_budget(requests, plan, decode_budget)

    def paced(self, decodes: int, prompt_tokens: int, reads: float) -> int | None:
        """Most tokens of an iteration in time: a bucket's or the limit; None if out of reach.

        Args:
          decodes: rows that decode in it.
          prompt_tokens: whole lengths of the prompts that wait or have begun, computed or not. So a prompt is done
            after PROMPT_ITERATIONS instead of losing a fraction of its rest with each.
          reads: slots that the decodes read.
        """
        if not decodes:
            return self._limit
        last = len(self._sizes) - 1
        if self._empty_ms[self._full] + self._slot_ms * reads * self._max_rows / decodes > self._target_ms:
            return None
        in_time = bisect_right(self._empty_ms, self._target_ms - self._slot_ms * reads)
        most = self._sizes[in_time - 1] if in_time else 0
        usual = bisect_left(self._sizes, self._fast_enough[min(bisect_left(self._sizes, decodes), last)])
        if most <= decodes or self._pace(in_time - 1, decodes) < LEAST_PACE * self._pace(usual, decodes):
            return None
        if self._batches == 1:
            return min(most, self._limit)
        return min(most, self._bucket(decodes - (-prompt_tokens // min(1 + decodes, PROMPT_ITERATIONS))))

    def _pace(self, index: int, decodes: int) -> float:
        """Prompt tokens a millisecond in a bucket beside these decodes."""
        return (self._sizes[index] - decodes) / self._costs_ms[index]

    def _bucket(self, tokens: int) -> int:
        """The bucket that holds this many tokens, within the limit."""
        return min(self._sizes[min(bisect_left(self._sizes, tokens), len(self._sizes) - 1)], self._limit)


def _decoding(requests: RequestTable) -> list[RequestState]:
    """The running requests that decode."""
    return [state for state in requests.running if state.length - state.computed <= 1]


def make_policy(
    ladder: BucketLadder,
    *,
    max_rows: int,
    batches: int = 1,
    token_budget: int | None = None,
    target_tpot: float | None = None,
    slot_milliseconds: float = 0.0,
    window: int | None = None,
    is_fixed: bool = False,
) -> TokenBudgetPolicy:
    """The policy for an engine's settings.

    Args:
      max_rows: most rows of one plan.
      batches: plans in flight that hold different rows.
      token_budget: most tokens of an iteration, if that is limited.
      target_tpot: seconds between a request's tokens, if there is a target.
      slot_milliseconds / window: see `ObjectiveTokenBudget`.
      is_fixed: use the token budget alone. That is for prompts that are cut at fixed places, or clients that see no
        token before the batch ends.
    """
    limit = ladder.limit(token_budget)
    if target_tpot is not None:
        return ObjectiveTokenBudget(
            ladder,
            max_rows=max_rows,
            target_tpot=target_tpot,
            limit=limit,
            batches=batches,
            slot_milliseconds=slot_milliseconds,
            window=window,
        )
    if is_fixed:
        return FixedTokenBudget(limit)
    return DefaultTokenBudget(ladder, max_rows=max_rows, limit=limit, batches=batches)
