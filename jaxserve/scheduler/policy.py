"""How many tokens an iteration should carry, from how busy the engine is: prompts against the time between tokens."""

from __future__ import annotations

from bisect import bisect_left, bisect_right

from jaxserve.scheduler.buckets import BucketLadder

# Iterations over which a prompt is spread while others decode. Simulated on Orca's trace (175B, 2 stages of 8 GPUs,
# docs/simulator.md), 8 to 16 differ by 2% at any load; 24 costs 5% where slots are short.
PROMPT_ITERATIONS = 12

# Without an objective: how many times as long as its decodes alone an iteration with prompts may take, and over how
# many iterations what waits may be spread. docs/simulator.md has what others come to, simulated and measured.
STRETCH, BACKLOG_ITERATIONS = 2.0, 8


class ObjectiveTokenBudget:
    """The token budget that an objective for the time between tokens and the load leave an iteration.

    Every batch in flight takes an equal share of the rows that decode, and each prompt that waits or has begun is
    spread over some iterations: over one where nobody decodes, over one more for every row that does, over
    PROMPT_ITERATIONS at most. So iterations grow with the load and no further, those in flight at the same time are
    alike (stages of a pipeline do not wait for each other), and no prompt delays the decodes much.

    The objective bounds it: the largest bucket with which a row gets its next token in time. Decodes are never held
    back for it, so with more rows than that bucket holds, or no bucket that is quick enough, it is missed.
    """

    def __init__(self, ladder: BucketLadder, *, target_tpot: float, limit: int, batches: int) -> None:
        """
        Args:
          target_tpot: seconds between a request's tokens.
          limit: most tokens of an iteration, whatever the objective (a result of `BucketLadder.limit`).
          batches: plans in flight that hold different rows.
        """
        if not target_tpot > 0:
            raise ValueError(f"target_tpot is {target_tpot}; it must be above 0 seconds")
        self._sizes = ladder.sizes
        self._limit = limit
        self._batches = batches
        in_time = bisect_right(ladder.prices, 1000 * target_tpot / batches)
        self._in_time = ladder.sizes[max(in_time - 1, 0)]

    def budget(self, decodes: int, prompt_tokens: int) -> int:
        """Most tokens of the next iteration: a bucket's, or the limit.

        Args:
          decodes: rows that decode, of all batches.
          prompt_tokens: whole lengths of the prompts that wait or have begun, however far they are: a prompt is to be
            through after PROMPT_ITERATIONS, not to lose that share of its rest with each.
        """
        share = -(-decodes // self._batches)
        wanted = share - (-prompt_tokens // min(1 + share, PROMPT_ITERATIONS))
        tokens = max(min(wanted, self._in_time), share, 1)
        return min(self._sizes[min(bisect_left(self._sizes, tokens), len(self._sizes) - 1)], self._limit)


class DefaultTokenBudget:
    """The token budget where nobody gave an objective: what prompts may cost those who decode.

    An iteration with prompts takes no longer than one in which every row decodes, or than STRETCH times what its own
    decodes alone would take, whichever is more: so nobody's tokens come slower than under a full house anyway, and
    where tokens beside the decodes are nearly free, as on an accelerator, all of them are taken. It takes longer only
    to have what waits through in BACKLOG_ITERATIONS, so that a queue does not grow because of it. Where nobody decodes
    nothing is held back.

    Everything is by the measured bucket costs, so there is nothing to set for a device.
    """

    def __init__(self, ladder: BucketLadder, *, max_rows: int, limit: int) -> None:
        """
        Args:
          max_rows: of one batch.
          limit: most tokens of an iteration (a result of `BucketLadder.limit`).
        """
        self._sizes, self._limit = ladder.sizes, limit
        sizes, prices, last = ladder.sizes, ladder.prices, len(ladder.sizes) - 1
        full = prices[min(bisect_left(sizes, max_rows), last)]
        # By the bucket that the decodes alone would take: the largest that is quick enough, and never that one itself.
        self._quick = tuple(
            sizes[min(max(bisect_right(prices, max(full, STRETCH * price)) - 1, index), last)]
            for index, price in enumerate(prices)
        )

    def budget(self, decodes: int, prompt_tokens: int) -> int:
        """Most tokens of the next iteration: a bucket's, or the limit.

        Args:
          decodes: rows of the iteration that decode.
          prompt_tokens: of the prompts that wait or have begun, those that are not computed yet.
        """
        if not decodes or not prompt_tokens:
            return self._limit
        sizes, last = self._sizes, len(self._sizes) - 1
        quick = self._quick[min(bisect_left(sizes, decodes), last)]
        wanted = max(decodes - (-prompt_tokens // BACKLOG_ITERATIONS), decodes + 1)
        return min(max(quick, sizes[min(bisect_left(sizes, wanted), last)]), self._limit)
