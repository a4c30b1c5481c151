"""What a configuration comes to before anything is compiled."""

from __future__ import annotations

import pytest

from jaxserve.config import EngineConfig
from jaxserve.runner.layout import bucket_sizes


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        ({"token_budget": 64}, (2, 3, 5, 8, 16, 32, 64)),
        ({"token_budget": 64, "target_tpot": 0.1}, (2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64)),
        ({"buckets": (8, 64), "target_tpot": 0.1}, (8, 64)),
        ({"deterministic": True, "slot_policy": "reserve"}, (256,)),
    ],
)
def test_the_token_counts_that_are_compiled(settings, sizes):
    assert bucket_sizes(EngineConfig(max_rows=8, **settings)) == sizes
