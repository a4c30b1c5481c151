"""Token budget policies: how many tokens an iteration may carry, decodes against prompts.

The scheduler asks a policy twice for every plan: before it gathers decodes, and again before it admits requests and
fills the rest with prompts. To try another policy, write a class with these two methods and return it from
`make_policy`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import Protocol

from jaxserve.scheduler.buckets import BucketLadder
from jaxserve.scheduler.plan_builder import PlanBuilder
from jaxserve.scheduler.requests import RequestTable

# Iterations over which a prompt is spread while others decode. Simulated on Orca's trace (175B, 2 stages of 8 GPUs),
# 8 to 16 differ by 2% at any load; 24 costs 5% where slots are short.
PROMPT_ITERATIONS = 12

# Without a target: how many times as long as its decodes alone an iteration with prompts may take, and over how many
# iterations the waiting prompts may be spread. benchmarks/results/2026-11-23-simulator.md
# has the results of other values.
STRETCH, BACKLOG_ITERATIONS = 2.0, 8


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


class ObjectiveTokenBudget:
    """The token budget for a target time between tokens (TPOT).

    Every plan in flight takes an equal share of the rows that decode. Each prompt that waits or has begun is spread
    over several iterations: over one where no row decodes, over one more for every row that does, over
    PROMPT_ITERATIONS at most. So iterations grow with the load and no further, plans in flight are alike (pipeline
    stages do not wait for each other), and no prompt delays the decodes much.

    The target bounds the budget: the largest bucket with which a row gets its next token in time. Decodes are never
    held back, so the target is missed where more rows decode than that bucket holds, or where no bucket is fast enough.
    """

    def __init__(self, ladder: BucketLadder, *, target_tpot: float, limit: int, batches: int) -> None:
        """
        Args:
          target_tpot: seconds between a request's tokens.
          limit: most tokens of an iteration, whatever the target (a result of `BucketLadder.limit`).
          batches: plans in flight that hold different rows.
        """
        if not target_tpot > 0:
            raise ValueError(f"target_tpot is {target_tpot}; it must be above 0 seconds")
        self._sizes = ladder.sizes
        self._limit = limit
        self._batches = batches
        in_time = bisect_right(ladder.costs_ms, 1000 * target_tpot / batches)
        self._in_time = ladder.sizes[max(in_time - 1, 0)]

    def decode_budget(self, requests: RequestTable) -> int:
        """Most tokens of the next iteration (see `budget`)."""
        begun = [state.length for state in requests.running if state.length - state.computed > 1]
        return self.budget(len(requests.running) - len(begun), sum(begun) + requests.waiting_tokens)

    def prompt_budget(self, requests: RequestTable, plan: PlanBuilder, decode_budget: int) -> int:
        """The decode budget."""
        return decode_budget

    def budget(self, decodes: int, prompt_tokens: int) -> int:
        """Most tokens of the next iteration: a bucket's, or the limit.

        Args:
          decodes: rows that decode, of all plans.
          prompt_tokens: whole lengths of the prompts that wait or have begun, computed or not. So a prompt is done
            after PROMPT_ITERATIONS instead of losing a fraction of its rest with each.
        """
        share = -(-decodes // self._batches)
        wanted = share - (-prompt_tokens // min(1 + share, PROMPT_ITERATIONS))
        tokens = max(min(wanted, self._in_time), share, 1)
        return min(self._sizes[min(bisect_left(self._sizes, tokens), len(self._sizes) - 1)], self._limit)


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
        full = costs[min(bisect_left(sizes, max_rows), last)]
        # For each bucket that decodes alone may take: the largest bucket that is fast enough, and at least that bucket.
        self._fast_enough = tuple(
            sizes[min(max(bisect_right(costs, max(full, STRETCH * cost)) - 1, index), last)]
            for index, cost in enumerate(costs)
        )

    def decode_budget(self, requests: RequestTable) -> int:
        """The limit."""
        return self._limit

    def prompt_budget(self, requests: RequestTable, plan: PlanBuilder, decode_budget: int) -> int:
        """Most tokens of the next iteration (see `budget`).

        Deferred samples are not counted, because they have hardly anything left to compute.
        """
        decodes = len(plan.states)
        if self._batches > 1:  # an iteration delays the rows of all plans in flight, which have about equally many each
            decodes = max(decodes, -(-(len(requests.running) - len(plan.prompts)) // self._batches))
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


def make_policy(
    ladder: BucketLadder,
    *,
    max_rows: int,
    batches: int = 1,
    token_budget: int | None = None,
    target_tpot: float | None = None,
    is_fixed: bool = False,
) -> TokenBudgetPolicy:
    """The policy for an engine's settings.

    Args:
      max_rows: most rows of one plan.
      batches: plans in flight that hold different rows.
      token_budget: most tokens of an iteration, if that is limited.
      target_tpot: seconds between a request's tokens, if there is a target.
      is_fixed: use the token budget alone. That is for prompts that are cut at fixed places, or clients that see no
        token before the batch ends.
    """
    limit = ladder.limit(token_budget)
    if target_tpot is not None:
        return ObjectiveTokenBudget(ladder, target_tpot=target_tpot, limit=limit, batches=batches)
    if is_fixed:
        return FixedTokenBudget(limit)
    return DefaultTokenBudget(ladder, max_rows=max_rows, limit=limit, batches=batches)
