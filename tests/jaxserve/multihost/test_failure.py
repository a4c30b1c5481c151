"""Of several symptoms the one that explains the others."""

import pytest

from jaxserve.multihost.failure import Problem, Rank, cause_of


def problem(rank: Rank, host: int, *, stage: int = 0, sequence: int = 5) -> Problem:
    return Problem(rank=rank, hosts=(host,), stages=(stage,), sequence=sequence, cause=rank.name)


@pytest.mark.parametrize(
    ("symptoms", "hosts", "rank"),
    [
        # A dead host: its neighbour's collective throws, everybody is late.
        ([problem(Rank.DEVICE, 0), problem(Rank.LATE, 2), problem(Rank.GONE, 1)], (1,), Rank.GONE),
        ([problem(Rank.DEVICE, 0), problem(Rank.THREW, 1)], (1,), Rank.THREW),
        # It says what it threw, and ends.
        ([problem(Rank.GONE, 1), problem(Rank.THREW, 1)], (1,), Rank.THREW),
        # Host 1 has died; host 0's device fails for it, which host 0 says before it ends.
        ([problem(Rank.DEVICE, 0), problem(Rank.GONE, 0), problem(Rank.GONE, 1)], (1,), Rank.GONE),
        # Stage 1 is wedged in iteration 5; stage 0 is through with it and waits to hand over the next.
        ([problem(Rank.LATE, 0, sequence=6), problem(Rank.LATE, 1, stage=1)], (1,), Rank.LATE),
        # Stage 0 is wedged; stage 1 waits for what it never gets.
        ([problem(Rank.LATE, 1, stage=1), problem(Rank.LATE, 0, stage=0)], (0,), Rank.LATE),
        # Two hosts share a stage and wait for each other: nobody can tell which.
        ([problem(Rank.LATE, 3, stage=1), problem(Rank.LATE, 2, stage=1)], (2, 3), Rank.LATE),
    ],
)
def test_the_cause(symptoms, hosts, rank) -> None:
    found = cause_of(symptoms)
    assert (found.hosts, found.rank) == (hosts, rank)


def test_a_message_names_all_that_is_known() -> None:
    late = Problem(rank=Rank.LATE, hosts=(2, 3), stages=(1,), sequence=57, cause="not done within 10 s")
    assert str(late) == "hosts 2, 3, stage 1, iteration 57: not done within 10 s"
    early = Problem(rank=Rank.THREW, hosts=(1,), step="compiling", cause="ValueError: no")
    assert str(early) == "host 1, while compiling: ValueError: no"
