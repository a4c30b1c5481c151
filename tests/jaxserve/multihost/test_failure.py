"""Of several symptoms the one that explains the others."""

import time

import pytest

from jaxserve.multihost import control_pb2 as pb
from jaxserve.multihost.failure import Symptom, SymptomKind, cause_of
from jaxserve.multihost.failure_detector import FailureDetector, ReplicaIterations


def symptom(kind: SymptomKind, host: int, *, stage: int = 0, sequence: int = 5, replica: int | None = None) -> Symptom:
    replicas = () if replica is None else (replica,)
    return Symptom(kind=kind, hosts=(host,), replicas=replicas, stages=(stage,), sequence=sequence, cause=kind.name)


@pytest.mark.parametrize(
    ("symptoms", "hosts", "kind"),
    [
        # A dead host: its neighbour's collective throws, everybody is late.
        (
            [symptom(SymptomKind.DEVICE_ERROR, 0), symptom(SymptomKind.LATE, 2), symptom(SymptomKind.DISCONNECTED, 1)],
            (1,),
            SymptomKind.DISCONNECTED,
        ),
        ([symptom(SymptomKind.DEVICE_ERROR, 0), symptom(SymptomKind.RAISED, 1)], (1,), SymptomKind.RAISED),
        # It says what it threw, and ends.
        ([symptom(SymptomKind.DISCONNECTED, 1), symptom(SymptomKind.RAISED, 1)], (1,), SymptomKind.RAISED),
        # Host 1 has died; host 0's device fails for it, which host 0 says before it ends.
        (
            [
                symptom(SymptomKind.DEVICE_ERROR, 0),
                symptom(SymptomKind.DISCONNECTED, 0),
                symptom(SymptomKind.DISCONNECTED, 1),
            ],
            (1,),
            SymptomKind.DISCONNECTED,
        ),
        # Stage 1 is wedged in iteration 5; stage 0 is through with it and waits to hand over the next.
        ([symptom(SymptomKind.LATE, 0, sequence=6), symptom(SymptomKind.LATE, 1, stage=1)], (1,), SymptomKind.LATE),
        # Stage 0 is wedged; stage 1 waits for what it never gets.
        ([symptom(SymptomKind.LATE, 1, stage=1), symptom(SymptomKind.LATE, 0, stage=0)], (0,), SymptomKind.LATE),
        # Iteration 5 of another replica says nothing of this one's.
        ([symptom(SymptomKind.LATE, 1, replica=0), symptom(SymptomKind.LATE, 2, replica=1)], (1,), SymptomKind.LATE),
        # Two hosts share a stage and wait for each other: nobody can tell which.
        ([symptom(SymptomKind.LATE, 3, stage=1), symptom(SymptomKind.LATE, 2, stage=1)], (2, 3), SymptomKind.LATE),
    ],
)
def test_the_cause(symptoms, hosts, kind) -> None:
    found = cause_of(symptoms)
    assert (found.hosts, found.kind) == (hosts, kind)


def detector(hosts: int, *placed: dict[int, tuple[int, ...]]) -> FailureDetector:
    """A detector on host 0 of hosts that serve."""
    found = FailureDetector(range(1, hosts))
    found.replicas = [ReplicaIterations((index,), stages) for index, stages in enumerate(placed)]
    found.step = None
    for member in found.members.values():
        member.step = None
    return found


def test_a_lost_host_names_its_replicas() -> None:
    it = detector(3, {0: (0,), 1: (1,)}, {1: (0,), 2: (1,)})
    it.replicas[0].heard(1, pb.Unfinished(replica=0, sequence=9, stage=1))
    it.replicas[1].heard(2, pb.Unfinished(replica=1, sequence=7, stage=1))
    lost = {host: str(it.of(member, SymptomKind.DISCONNECTED, "gone")) for host, member in it.members.items()}
    assert lost == {1: "host 1, replicas 0, 1: gone", 2: "host 2, replica 1, stage 1, iteration 7: gone"}


def test_late_iterations_of_two_replicas_are_not_compared() -> None:
    """Replica 1 waits for its stage 0; replica 0 is behind by its numbers, and well."""
    it = detector(3, {0: (0,), 1: (1,)}, {1: (0,), 2: (1,)})
    it.deadline = 0.001
    it.replicas[1].answers.begin(50)
    it.replicas[0].heard(1, pb.Unfinished(replica=0, sequence=9, stage=1))
    it.replicas[1].heard(1, pb.Unfinished(replica=1, sequence=50, stage=0))
    it.replicas[1].heard(2, pb.Unfinished(replica=1, sequence=51, stage=1))
    time.sleep(0.01)
    (late,) = it.late()
    assert str(late) == "host 2, replica 1, stage 1, iteration 50: not done within 0.001 s"
    assert str(it.cause([late])) == "host 1, replica 1, stage 0, iteration 50: not done within 0.001 s"


def test_a_message_names_all_that_is_known() -> None:
    late = Symptom(kind=SymptomKind.LATE, hosts=(2, 3), stages=(1,), sequence=57, cause="not done within 10 s")
    assert str(late) == "hosts 2, 3, stage 1, iteration 57: not done within 10 s"
    early = Symptom(kind=SymptomKind.RAISED, hosts=(1,), step="compiling", cause="ValueError: no")
    assert str(early) == "host 1, while compiling: ValueError: no"
