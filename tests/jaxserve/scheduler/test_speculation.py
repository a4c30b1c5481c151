"""Speculative decoding: how likely drafts come true, and how many pay."""

import pytest

from jaxserve.config import EngineConfig
from jaxserve.scheduler.cache_groups import CacheGroups
from jaxserve.scheduler.speculation import DraftCandidate, RequestDrafts, Speculation
from jaxserve.simulate.system import SimulatedEngine
from tests.jaxserve.scheduler.drafts import Script, ladder


def test_a_guess_is_judged_once_by_what_came() -> None:
    tokens = [1, 2]
    drafts = RequestDrafts(tokens, Script(tokens, {2: (5, 6, 7), 3: (8,), 6: (9, 9)}), 3)
    for _ in range(2):
        assert (drafts.refresh(), drafts.latest, drafts.acceptance) == (3, (5, 6, 7), 0.5)
    tokens.append(5)  # one came true, nothing is known of the others
    assert (drafts.refresh(), drafts.latest, drafts.acceptance) == (1, (8,), 0.5 + 0.5 / 8)
    tokens += [1, 1, 1]  # a miss, and what follows a miss says nothing
    assert (drafts.refresh(), drafts.latest) == (2, (9, 9))
    assert drafts.acceptance == (0.5 + 0.5 / 8) * 7 / 8


def test_model_drafts_are_retried_after_a_pause() -> None:
    tokens = [1, 2]
    drafts = RequestDrafts(tokens, None, 3)
    assert (drafts.refresh(), drafts.acceptance, drafts.computed) == (3, 0.5, 0)
    drafts.set_draft([5, 6, 7])  # its keys of 1, 2, 5 and 6 are there
    assert drafts.computed == 4
    tokens += [5, 9]
    assert drafts.refresh() == 3
    assert drafts.acceptance == (0.5 + 0.5 / 8) * 7 / 8
    assert drafts.computed == 3
    drafts.set_draft([1, 1, 1])
    tokens += [1, 1, 1, 4]
    assert drafts.refresh() == 3
    assert drafts.computed == 6  # the last of them it drafted but did not compute
    drafts.acceptance = 0.1
    for _ in range(64):
        tokens.append(0)
        drafts.refresh()
    assert 0.3 < drafts.acceptance < 0.5


@pytest.mark.parametrize(
    ("candidates", "rows", "budget", "waits", "lengths"),
    [
        ([DraftCandidate(7, 0.9)], 1, 8, True, [3]),  # 3.44 tokens in 14 ms, not 5.7 in 31
        ([DraftCandidate(2, 0.9)], 1, 8, True, [2]),
        ([DraftCandidate(7, 0.05)], 1, 8, True, [0]),  # 1.05 in 12 ms against 1 in 10
        ([DraftCandidate(7, 0.15)], 1, 8, True, [0]),
        ([DraftCandidate(7, 0.15)], 1, 8, False, [1]),  # 1.15 in 11: what is launched ahead need not wait
        ([DraftCandidate(7, 0.9, reach=0.0)], 1, 8, True, [0]),
        ([DraftCandidate(0, 0.9)], 1, 8, True, [0]),
        ([DraftCandidate(7, 0.9)], 1, 2, True, [1]),  # the budget ends it
        ([DraftCandidate(7, 0.9), DraftCandidate(7, 0.5)], 2, 8, True, [2, 0]),
        ([DraftCandidate(1, 0.9), DraftCandidate(7, 0.5)], 2, 8, True, [1, 1]),
        ([DraftCandidate(7, 0.99)] * 4, 4, 8, True, [0] * 4),  # twice the tokens for more than twice the time
    ],
)
def test_draft_count_maximizes_tokens_per_ms(candidates, rows, budget, waits, lengths):
    made = Speculation(ladder({1: 10, 2: 11, 4: 13, 8: 30}), most=7, max_points=8, waits=waits)
    assert made.lengths(candidates, rows, budget) == lengths


def test_a_full_iteration_is_not_even_looked_at() -> None:
    made = Speculation(ladder({1: 10, 8: 30}), most=7, max_points=6, waits=True)
    assert made.fits(5, 8)
    assert not made.fits(6, 8)
    assert not made.fits(3, 3)


@pytest.mark.parametrize(("price", "lengths"), [(0.1, [3]), (6.0, [3]), (6.6, [1]), (9.0, [0])])
def test_a_models_time_is_part_of_the_price(price, lengths) -> None:
    class Model:
        def cost_ms(self, rows: int) -> float:
            assert rows == 1
            return price

        def draft(self, wanted):
            raise AssertionError

    costs = ladder({1: 10, 2: 11, 4: 13, 8: 30})
    made = Speculation(costs, most=7, max_points=8, waits=True, drafter=Model())
    assert made.lengths([DraftCandidate(7, 0.9)], 1, 8) == lengths


def test_what_cannot_go_together_is_refused() -> None:
    with pytest.raises(ValueError, match="speculate is ngram; with deterministic it must be None"):
        EngineConfig(deterministic=True, slot_policy="reserve", speculate="ngram")
    with pytest.raises(ValueError, match="speculate_tokens is 0"):
        EngineConfig(speculate="ngram", speculate_tokens=0)
    with pytest.raises(ValueError, match="the simulator has no text"):
        SimulatedEngine(
            config=EngineConfig(speculate="ngram"),
            seconds=lambda plan: [1.0],
            costs=(),
            slots=8,
            groups=CacheGroups(block_size=4, max_context=8, n_rows=4, most_tokens=4),
        )
