"""Outcomes in a table, against those that keep every token's time."""

from __future__ import annotations

import numpy as np
import pytest

from jaxserve.config import EngineConfig
from jaxserve.scheduler.buckets import BucketCost
from jaxserve.scheduler.cache_groups import CacheGroups
from jaxserve.simulate import workload as load
from jaxserve.simulate.outcome import GapCounts, Outcome
from jaxserve.simulate.system import SimulatedEngine
from jaxserve.simulate.virtual_clock import arrivals


@pytest.mark.parametrize("max_tokens", [None, 40])
@pytest.mark.parametrize("replicas", [1, 3])
def test_the_table_has_what_the_times_of_all_tokens_say(replicas, max_tokens):
    costs = tuple(BucketCost(size=n, compile_seconds=0.0, milliseconds=10.0 + n) for n in (2, 8, 32))
    made = SimulatedEngine(
        config=EngineConfig(max_rows=4, buckets=(2, 8, 32)),
        seconds=lambda plan: [0.01 + 0.001 * plan.bucket + 1e-6 * plan.num_rows],
        costs=costs,
        slots=256,
        groups=CacheGroups(block_size=4, max_context=64, n_rows=4, most_tokens=32),
        replicas=replicas,
    )
    settings = {"prompt": load.Range.parse("1:40"), "output": load.Range.parse("1:20"), "vocab_size": 3}
    coming = arrivals(load.poisson(load.uniform(requests=150, seed=1, **settings), rate=90.0, seed=1))
    coming = [each._replace(max_tokens=max_tokens or each.output) for each in coming]
    coming[7] = coming[7]._replace(prompt=np.zeros(80, np.int32))  # too long: refused
    made.serve(coming, outcomes := list[Outcome]())
    table = made.serve(coming).outcomes
    assert len(table) == len(outcomes) == 150
    for short, whole in zip(table, outcomes, strict=True):
        names = ("arrival", "prompt_tokens", "tokens", "error")
        assert [getattr(short, name) for name in names] == [getattr(whole, name) for name in names]
        if whole.tokens:
            assert (short.first_token, short.tpot, short.end) == (whole.first_token, whole.tpot, whole.end)
    assert list(table)[7].error is not None
    gaps = np.concatenate([np.diff(each.token_times) for each in outcomes if each.tokens > 1])
    for percent in (50, 95, 99):
        exact = float(np.percentile(gaps, percent, method="inverted_cdf"))
        assert table.gaps.percentile(percent) == pytest.approx(exact, rel=0.0007)


def test_gaps_are_counted_within_their_classes():
    counts, draw = GapCounts(), np.random.default_rng(1).lognormal(-3, 1, 5000)
    assert counts.percentile(50) is None
    for gap in draw:
        counts.count(gap)
    counts.add(0.0, 5001)  # tokens that come together
    assert counts.percentile(50) == pytest.approx(0.0, abs=1e-12)
    assert counts.percentile(75) == pytest.approx(np.percentile(draw, 50), rel=0.002)
    assert counts.percentile(100) == pytest.approx(draw.max(), rel=0.0007)
