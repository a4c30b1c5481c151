"""What a host says it waits for, from the moment that an iteration is launched."""

from jaxserve.multihost.progress import Progress, Waiting


def test_an_iteration_is_in_the_first_stage_here_until_another_is_waited_for() -> None:
    now = 10.0
    progress = Progress(lambda: now)
    progress.first = 1
    assert progress.waiting() is None
    progress.begin(0)
    progress.begin(1)
    now = 12.0
    assert progress.waiting() == Waiting(0, 1, 2.0)
    progress.at(3)
    assert progress.waiting() == Waiting(0, 3, 2.0)
    progress.end()
    assert progress.waiting() == Waiting(1, 1, 0.0)
    progress.end()
    assert progress.waiting() is None
