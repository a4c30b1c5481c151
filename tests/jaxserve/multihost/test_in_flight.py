"""What a host says it waits for, from the moment that an iteration is launched."""

from jaxserve.multihost.in_flight import IterationTracker, OldestIteration


def test_tracker_stage_and_seconds() -> None:
    now = 10.0
    progress = IterationTracker(lambda: now)
    progress.first = 1
    assert progress.waiting() is None
    progress.begin(0)
    progress.begin(1)
    now = 12.0
    assert progress.waiting() == OldestIteration(0, 1, 2.0)
    progress.at(3)
    assert progress.waiting() == OldestIteration(0, 3, 2.0)
    progress.end()
    assert progress.waiting() == OldestIteration(1, 1, 0.0)
    progress.end()
    assert progress.waiting() is None
