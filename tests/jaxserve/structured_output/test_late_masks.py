"""A mask that is late delays its own request only, and the layers run before it is known."""

import threading

import pytest

from jaxserve.iteration import IterationPlan
from jaxserve.request import FinishReason, Request
from jaxserve.sampling_params import SamplingParams
from jaxserve.structured_output import masks
from tests.fixtures.texts import CASES, printable_tokenizer, request_of
from tests.fixtures.tiny import make_engine
from tests.fixtures.traffic import Answers, run, traffic

TOKENIZER = printable_tokenizer()
WAIT_SECONDS = 120.0


def test_the_layers_run_before_the_mask_is_known(params) -> None:
    """The next iteration is launched before this one's token is read, and sampled afterwards."""
    engine = make_engine(params, tokenizer=TOKENIZER)
    pipeline, order = engine._loops[0].pipeline, []
    launch, sample, take = pipeline.launch, pipeline._enqueue_sampling, pipeline._take_oldest

    def spy_launch(plan, packed):
        order.append(("launch", plan.sequence))
        launch(plan, packed)

    def spy_sample(*args):
        assert pipeline._unsampled is not None
        order.append(("sample", pipeline._unsampled.plan.sequence))
        sample(*args)

    def spy_take():
        plan, result = take()
        order.append(("take", plan.sequence))
        return plan, result

    pipeline.launch, pipeline._enqueue_sampling, pipeline._take_oldest = spy_launch, spy_sample, spy_take
    run(engine, [(0, request_of("a", "regex"))])
    when = {step: index for index, step in enumerate(order)}
    last = max(sequence for _, sequence in order)
    assert last >= 5
    for sequence in range(1, last):
        assert when["launch", sequence] < when["take", sequence - 1] < when["sample", sequence]


class Held:
    """GrammarMasks of texts after the first token are computed when a test says so."""

    def __init__(self, monkeypatch) -> None:
        self.begun, self.may_end = threading.Semaphore(0), threading.Event()
        look = masks.GrammarState.update_mask

        def slowly(text):
            self.begun.release()
            assert self.may_end.wait(WAIT_SECONDS)
            look(text)

        monkeypatch.setattr(masks.GrammarState, "update_mask", slowly)


@pytest.mark.parametrize("stages", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_late_mask_delays_its_own_request_only(params, alone, monkeypatch, stages) -> None:
    held, engine = Held(monkeypatch), make_engine(params, tokenizer=TOKENIZER, stages=stages)
    answers, plain = Answers(), [request for _, request in traffic(12)]
    plans: list[IterationPlan] = []
    engine.record(lambda record: plans.append(record.plan))
    try:
        engine.submit(request_of("late", "json_schema"), answers)
        for request in plain:
            engine.submit(request, answers)
        while len(answers.reasons) < len(plain):
            assert engine.step()
        assert held.begun.acquire(timeout=WAIT_SECONDS)
        assert len(answers.tokens["late"]) == 1, "the first mask comes with the grammar"
        (row,) = {each.row for plan in plans for each in plan.admissions if each.request_id == "late"}
        starts = [chunk.start for plan in plans for chunk in plan.chunks if chunk.row == row and chunk.samples]
        assert len(starts) > len(set(starts)), "its last token is computed again"
        assert all(answers.tokens[r.request_id] == alone.tokens[r.request_id] for r in plain)
    finally:
        held.may_end.set()
    while engine.step():
        pass
    assert answers.reasons["late"] is FinishReason.EOS
    assert CASES["json_schema"].judge(TOKENIZER.decode(answers.tokens["late"]))
    assert engine.load().slots_used == 0


def test_a_late_last_token_is_chosen_later(params, monkeypatch) -> None:
    """At its limit a request is as good as gone; a late mask brings it back."""
    held, engine = Held(monkeypatch), make_engine(params, tokenizer=TOKENIZER, max_rows=2)
    answers = Answers()
    try:
        engine.submit(request_of("late", "json_schema", max_tokens=2), answers)
        for number in range(6):
            sampling = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)
            engine.submit(Request(request_id=str(number), prompt=(9, number + 3), sampling=sampling), answers)
        while len(answers.reasons) < 6:
            assert engine.step()
        assert "late" not in answers.reasons
    finally:
        held.may_end.set()
    while engine.step():
        pass
    assert (len(answers.tokens["late"]), answers.reasons["late"]) == (2, FinishReason.LENGTH)


def test_an_abort_while_the_mask_is_late(params, monkeypatch) -> None:
    held, engine = Held(monkeypatch), make_engine(params, tokenizer=TOKENIZER)
    answers = Answers()
    sampling = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
    try:
        engine.submit(request_of("late", "json_schema"), answers)
        engine.submit(Request(request_id="plain", prompt=(9, 3), sampling=sampling), answers)
        while not held.begun.acquire(blocking=False):
            assert engine.step()
        engine.abort("late")
        while len(answers.reasons) < 2:
            assert engine.step()
    finally:
        held.may_end.set()
    while engine.step():
        pass
    assert answers.reasons == {"late": FinishReason.ABORTED, "plain": FinishReason.LENGTH}
    again = run(engine, [(0, request_of("late", "json_schema"))])
    assert CASES["json_schema"].judge(TOKENIZER.decode(again.tokens["late"]))


def test_weights_are_replaced_after_a_late_stop(params) -> None:
    """A plan whose choice of tokens waits for masks is under way when its last request ends."""
    engine = make_engine(params, tokenizer=TOKENIZER)
    answers = Answers()
    engine.submit(request_of("a", "choice"), answers)
    while not answers.reasons:
        engine.step()
    engine.update_params(params)
    again = run(engine, [(0, request_of("a", "choice"))])
    assert again.tokens == answers.tokens
