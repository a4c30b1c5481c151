"""What is drafted from the text itself."""

from random import Random

import pytest

from jaxserve.scheduler.ngrams import NgramIndex


@pytest.mark.parametrize(
    ("tokens", "most", "found"),
    [
        ([1, 2, 3, 4, 1, 2], 2, [3, 4]),
        ([1, 2, 3, 4, 1, 2], 9, [3, 4, 1, 2, 3, 4, 1, 2, 3]),  # past the end it goes on as it began
        ([5, 5, 5], 3, [5, 5, 5]),
        ([1, 2, 7, 3, 1, 2, 8, 3, 1, 2], 1, [8]),  # equal matches: the latest
        ([9, 1, 2, 7, 3, 1, 2, 8, 9, 1, 2], 1, [7]),  # but the longest first
        ([1, 2, 3, 2, 1], 3, []),  # no pair twice
        ([1, 1], 3, []),
        ([1], 3, []),
    ],
)
def test_what_followed_the_longest_match_is_drafted(tokens, most, found):
    assert NgramIndex(tokens).propose(most) == found


def test_an_index_follows_its_sequence():
    draw = Random(0)
    tokens: list[int] = []
    index = NgramIndex(tokens)
    for _ in range(300):
        tokens += [draw.randrange(3) for _ in range(draw.randint(1, 4))]
        assert index.propose(5) == NgramIndex(list(tokens)).propose(5)
