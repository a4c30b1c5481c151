"""The ladder chosen by dynamic programming, against all ladders there are."""

from __future__ import annotations

import itertools
import random

import pytest

from jaxserve.simulate.ladder import best_ladder


def total(ladder, sizes, cost) -> float:
    return sum(count * cost(min(b for b in ladder if b >= size)) for size, count in sizes.items())


def cost(tokens: int) -> float:
    return 20.0 + tokens


@pytest.mark.parametrize("seed", range(20))
def test_no_other_ladder_is_cheaper(seed):
    draw = random.Random(seed)
    sizes = {draw.randint(1, 200): draw.randint(1, 50) for _ in range(7)}
    for count in range(1, 5):
        found = best_ladder(sizes, cost, count)
        assert len(found) <= count
        assert found[-1] == max(sizes)
        others = [
            (*chosen, max(sizes))
            for length in range(count)
            for chosen in itertools.combinations(sorted(sizes)[:-1], length)
        ]
        assert total(found, sizes, cost) == min(total(other, sizes, cost) for other in others)


def test_no_more_buckets_than_there_are_sizes():
    assert best_ladder({4: 1, 9: 3}, cost, 8) == (4, 9)


def test_a_hand_made_case():
    # Two in 8 and ten in 100 leave 16 and 90 padded: one of them has to be chosen, and 90 comes far more often.
    assert best_ladder({8: 2, 16: 1, 90: 50, 100: 10}, cost, 3) == (16, 90, 100)


def test_an_empty_ladder_is_refused():
    with pytest.raises(ValueError, match="0 sizes and 3 buckets make no ladder"):
        best_ladder({}, cost, 3)
