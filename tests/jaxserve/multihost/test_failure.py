"""Of several symptoms the one that explains the others."""

import pytest

from jaxserve.multihost.failure import Symptom, SymptomKind, cause_of


def symptom(kind: SymptomKind, host: int, *, stage: int = 0, sequence: int = 5) -> Symptom:
    return Symptom(kind=kind, hosts=(host,), stages=(stage,), sequence=sequence, cause=kind.name)


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
        # Two hosts share a stage and wait for each other: nobody can tell which.
        ([symptom(SymptomKind.LATE, 3, stage=1), symptom(SymptomKind.LATE, 2, stage=1)], (2, 3), SymptomKind.LATE),
    ],
)
def test_the_cause(symptoms, hosts, kind) -> None:
    found = cause_of(symptoms)
    assert (found.hosts, found.kind) == (hosts, kind)


def test_a_message_names_all_that_is_known() -> None:
    late = Symptom(kind=SymptomKind.LATE, hosts=(2, 3), stages=(1,), sequence=57, cause="not done within 10 s")
    assert str(late) == "hosts 2, 3, stage 1, iteration 57: not done within 10 s"
    early = Symptom(kind=SymptomKind.RAISED, hosts=(1,), step="compiling", cause="ValueError: no")
    assert str(early) == "host 1, while compiling: ValueError: no"
