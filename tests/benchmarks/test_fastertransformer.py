"""The baseline's batches: their iterations, and which requests wait."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import fastertransformer
from benchmarks.orca import SETUPS, fitted
from jaxserve.planning.cost import Roofline, Seconds
from jaxserve.simulate.virtual_clock import Arrival


class Counted(Roofline):
    """A roofline of one stage that takes a second an iteration and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[list[tuple[int, int]]] = []

    def __call__(self, chunks, bucket=0) -> list[Seconds]:
        self.asked.append(list(chunks))
        return [Seconds(1.0, 0.0, 0.0, 0.0)]


def batch(*sizes: tuple[int, int], time=0.0) -> list[Arrival]:
    return [Arrival(time, np.zeros(prompt, np.int32), output, output) for prompt, output in sizes]


def test_iterations_of_a_batch():
    assert fastertransformer.iterations(batch((5, 3))) == 3
    assert fastertransformer.iterations(batch((4, 10), (9, 2))) == 10  # max(0 + 10, 5 + 2)
    assert fastertransformer.iterations(batch((4, 1), (9, 2), (20, 1))) == 17  # the longest prompt crawls


def test_first_iteration_has_the_shortest_prompt():
    roofline = Counted()
    seconds = fastertransformer.BatchSeconds(roofline)
    assert seconds(batch((4, 3), (6, 2))) == 4.0
    # Then a token each at positions 4, 5, 6; who has finished stays to the end. Earlier positions are of other batches.
    assert roofline.asked == [[(0, 4)] * 2, *([(position, 1)] * 2 for position in range(7))]


def test_iterations_that_batches_share_are_asked_for_once():
    roofline = Counted()
    seconds = fastertransformer.BatchSeconds(roofline)
    for _ in range(2):
        assert seconds(batch((4, 3), (6, 2))) == 4.0
        assert seconds(batch((2, 3), (2, 2))) == 3.0
    assert len(roofline.asked) == 2 + 7


def test_seconds_are_those_of_the_iterations_one_by_one():
    setup, fit = SETUPS["175B"], fitted(overlapped=True)
    roofline, three = setup.roofline(fit), batch((40, 100), (300, 20), (512, 128))
    count = fastertransformer.iterations(three)
    works = [[(0, 40)] * 3, *([(position, 1)] * 3 for position in range(40, 40 + count - 1))]
    one_by_one = sum(stage.total for chunks in works for stage in roofline(chunks))
    assert fastertransformer.BatchSeconds(roofline)(three) == pytest.approx(one_by_one, rel=1e-9)


def test_no_request_joins_or_leaves_a_batch():
    coming = [*batch((4, 1), (4, 5)), *batch((4, 2), time=1.0)]
    outcomes = fastertransformer.run(coming, fastertransformer.BatchSeconds(Counted()), max_batch=8)
    assert [each.token_times[-1] for each in outcomes] == [5.0, 5.0, 7.0]
    assert [len(each.token_times) for each in outcomes] == [1, 5, 2]


def test_batch_holds_arrived_requests_up_to_its_limit():
    coming = [*batch((4, 1), (4, 1), (4, 1)), *batch((4, 1), time=10.0)]
    outcomes = fastertransformer.run(coming, fastertransformer.BatchSeconds(Counted()), max_batch=2)
    assert [each.token_times[-1] for each in outcomes] == [1.0, 1.0, 2.0, 11.0]
