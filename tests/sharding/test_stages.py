"""Which layers each stage owns."""

import pytest

from sharding.stages import split


def test_layers_are_cut_as_evenly_as_can_be():
    assert split(7) == (range(7),)
    assert split(7, 3) == (range(3), range(3, 5), range(5, 7))
    assert split(8, 8) == tuple(range(i, i + 1) for i in range(8))
    for stages in range(1, 71):
        parts = split(70, stages)
        assert [i for part in parts for i in part] == list(range(70))
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_or_as_wanted():
    assert split(70, 3, (20, 25, 25)) == (range(20), range(20, 45), range(45, 70))


@pytest.mark.parametrize(
    ("stages", "layers_per_stage", "message"),
    [
        (0, None, r"stages is 0; it must be at least 1 and at most 4, the number of layers"),
        (5, None, r"stages is 5; .* so that each stage has one"),
        (2, (1, 2, 1), r"layers_per_stage is 1,2,1, which is 3 stages; stages is 2"),
        (3, (2, 0, 2), r"layers_per_stage is 2,0,2; stage 1 has no layer"),
        (2, (2, 3), r"layers_per_stage is 2,3, which is 5 layers; the model has 4"),
    ],
)
def test_what_cannot_be_is_refused_in_words(stages, layers_per_stage, message):
    with pytest.raises(ValueError, match=message):
        split(4, stages, layers_per_stage)
