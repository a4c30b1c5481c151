"""The bucket ladder: the compiled token counts, their costs, and the choice among them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import ceil, inf, log2

MAX_DEFAULT_BUCKETS = 8  # each costs a compilation at start; an objective adds one between each two
# Limits of the default buckets: tokens, seconds of an iteration, and what a token must save for a larger one.
LARGEST_DEFAULT, LONGEST_DEFAULT, LEAST_SAVING = 8192, 0.25, 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketCost:
    """One compiled token count and what was measured for it.

    Attributes:
      size: tokens the program carries, padding included.
      compile_seconds: time to compile it.
      milliseconds: time of one iteration.
      slots_read: slots of earlier tokens that the measured iteration read.
    """

    size: int
    compile_seconds: float
    milliseconds: float
    slots_read: int = 0

    @property
    def tokens_per_second(self) -> float:
        """Throughput of a bucket without padding."""
        return 1000.0 * self.size / self.milliseconds


class BucketLadder:
    """Compiled token counts in ascending order, with their measured costs.

    Attributes:
      costs_ms: milliseconds of each bucket. They never fall: if a larger bucket measured faster, that is noise.
    """

    def __init__(self, costs: Sequence[BucketCost]) -> None:
        if not costs:
            raise ValueError("the bucket ladder is empty; give at least one bucket")
        self.costs = tuple(costs)
        self.sizes = tuple(cost.size for cost in costs)
        if self.sizes[0] < 1 or any(a >= b for a, b in zip(self.sizes, self.sizes[1:], strict=False)):
            raise ValueError(f"bucket sizes are {self.sizes}; they must be at least 1 and ascend without repeats")
        for cost in costs:
            if not cost.milliseconds > 0:
                raise ValueError(f"bucket {cost.size} costs {cost.milliseconds} ms; a cost must be above 0")
        self.costs_ms = tuple(accumulate((cost.milliseconds for cost in costs), max))

    @property
    def largest(self) -> int:
        """Tokens of the largest bucket."""
        return self.sizes[-1]

    def cost(self, size: int) -> float:
        """Milliseconds of one iteration in bucket `size`; ValueError if there is no such bucket."""
        index = bisect_left(self.sizes, size)
        if index == len(self.sizes) or self.sizes[index] != size:
            raise ValueError(f"there is no bucket of {size} tokens; the ladder is {self.sizes}")
        return self.costs[index].milliseconds

    def limit(self, budget: int | None) -> int:
        """Most tokens of an iteration: the largest bucket within the budget, or the budget."""
        if budget is None:
            return self.largest
        index = bisect_right(self.sizes, budget)
        return self.sizes[index - 1] if index else budget

    def pick(self, decodes: int, prompt_tokens: int, budget: int, rows: int | None = None) -> int:
        """The bucket for `decodes` decodes, which `prompt_tokens` ready prompt tokens may fill up.

        There are two ways. Either the smallest bucket that holds everything takes it at once, with padding. Or the
        largest bucket that can be filled exactly comes first, and the rest follows by the same rule. The cheaper way
        wins. The cost of a way is the sum of its buckets' costs, less the worth of the decodes that it carries. A
        decode is worth its share of an iteration in which all `rows` decode (default: one row more than `decodes`).

        `decodes` is at most `budget`, and `budget` is a result of `limit`.
        """
        sizes, cost = self.sizes, self.costs_ms
        top = max(bisect_right(sizes, budget) - 1, 0)
        left = decodes + prompt_tokens
        holds_all = bisect_left(sizes, left)
        if not prompt_tokens:
            return sizes[min(holds_all, top)]
        fills = min(bisect_right(sizes, left) - 1, top)
        if fills < 0 or sizes[fills] <= decodes:
            return sizes[min(holds_all, top)]
        if sizes[fills] == left or left >= 2 * sizes[top]:
            return sizes[fills]
        rows = max(rows or 0, decodes + 1)
        share = cost[min(bisect_left(sizes, rows), len(sizes) - 1)] / rows
        worth = min(decodes * share, cost[bisect_left(sizes, decodes)])
        together = cost[holds_all] - worth if holds_all <= top else inf
        apart = 0.0
        step = fills
        while apart < together:
            apart += cost[step] - worth
            left -= sizes[step] - decodes
            if left <= decodes:
                break
            last = bisect_left(sizes, left)
            step = min(bisect_right(sizes, left) - 1, top)
            at_once = cost[last] - worth if last <= top else inf
            if step < 0 or sizes[step] <= decodes or apart + at_once < together:
                apart += at_once
                break
        return sizes[fills] if apart < together else sizes[holds_all]


def prompt_rate(costs: Sequence[BucketCost]) -> float:
    """Most prompt tokens a second, at these costs."""
    return max(cost.tokens_per_second for cost in costs)


def decode_seconds(costs: Sequence[BucketCost], max_rows: int) -> float:
    """Seconds of an iteration in which all rows decode, at these costs."""
    return next((cost for cost in costs if cost.size >= max_rows), costs[-1]).milliseconds / 1000


def seconds_of_work(costs: Sequence[BucketCost], max_rows: int, *, prompt_tokens: float, answer_tokens: float) -> float:
    """Seconds that prompts and answers take with all rows in use, at these costs."""
    return prompt_tokens / prompt_rate(costs) + answer_tokens * decode_seconds(costs, max_rows) / max_rows


def default_sizes(
    max_rows: int, token_budget: int | None, *, objective: bool = False, doublings: int = 0
) -> tuple[int, ...]:
    """The bucket sizes to measure when none are given: two geometric series.

    There are at most MAX_DEFAULT_BUCKETS. One is `max_rows`, so that a full batch of decodes has no padding. Larger
    ones, up to the token budget if there is one, serve prompts. Smaller ones serve low load; there are at least two if
    `max_rows` is large enough.

    With an objective for the time between tokens, iterations are as large as the objective allows. One more size half
    way between each two keeps what it allows from being wasted.

    Args:
      doublings: larger sizes to add, each twice the one before (see `doublings_that_pay`).
    """
    top = token_budget or max(256, 4 * max_rows)
    rows = min(max_rows, top)
    halvings = int(log2(rows))
    above = min(ceil(log2(top / rows)), MAX_DEFAULT_BUCKETS - 1 - min(halvings, 2))
    below = min(halvings, MAX_DEFAULT_BUCKETS - 1 - above)
    sizes = {rows, top}
    sizes.update(_rounded(rows * (top / rows) ** (step / above)) for step in range(1, above))
    sizes.update(_rounded(rows ** (step / (below + 1))) for step in range(1, below + 1))
    sizes.update(top << step for step in range(1, doublings + 1))
    if objective:
        sizes.update((low + high) // 2 for low, high in pairwise(sorted(sizes)))
    return tuple(sorted(sizes))


def doublings_that_pay(top: int, seconds: Callable[[int], float]) -> int:
    """How often to double the largest bucket while a token gets cheaper by LEAST_SAVING.

    Large iterations share the reading of the weights and the overhead of layers among more tokens. Once arithmetic is
    most of an iteration, a larger one only makes others wait longer, so none takes more than LONGEST_DEFAULT seconds.

    Args:
      top: the largest bucket so far.
      seconds: of an iteration with this many prompt tokens.
    """
    doublings = 0
    while 2 * top <= LARGEST_DEFAULT:
        once, twice = seconds(top), seconds(2 * top)
        if twice > min(2 * (1 - LEAST_SAVING) * once, LONGEST_DEFAULT):
            break
        top, doublings = 2 * top, doublings + 1
    return doublings


def _rounded(size: float) -> int:
    """A whole number near `size`; from 16 on a multiple of 8, which suits matrix units."""
    return round(size) if size < 16 else 8 * round(size / 8)
