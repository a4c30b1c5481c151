"""Counting different answers, of an engine that is made up."""

from types import SimpleNamespace

from benchmarks import deterministic
from benchmarks.deterministic import Mode
from jaxserve.config import EngineConfig
from jaxserve.request import FinishReason, TokenEvent


class Echo:
    """Answers at once; the logprob of one request in `every` is another in its last bit."""

    def __init__(self, every: int | None) -> None:
        self.config = EngineConfig(max_rows=4)
        self.model_config = SimpleNamespace(vocab_size=50)
        self.every, self.requests = every, []

    def submit(self, request, sink) -> None:
        self.requests.append(request)
        asked = len([each for each in self.requests if each.request_id.isdecimal()])
        low = self.every and request.request_id.isdecimal() and asked % self.every == 0
        logprob = -0.5 - 2**-24 if low else -0.5
        sink([TokenEvent(request.request_id, token_ids=(7,), logprobs=(logprob,))])
        sink([TokenEvent(request.request_id, (8,), (-1.0,), finish_reason=FinishReason.LENGTH)])


def asked(every: int | None, runs: int = 30) -> tuple[Mode, Echo]:
    mode, engine = Mode(name=""), Echo(every)
    deterministic.ask(engine, mode, runs, [0, 1])  # pyright: ignore[reportArgumentType]
    return mode, engine


def test_answers_that_are_the_same_to_the_bit_are_one() -> None:
    mode, engine = asked(None)
    assert mode.answers == {((7, 8), (-0.5, -1.0)): 30}
    prompts = {each.prompt for each in engine.requests if each.request_id.isdecimal()}
    assert len(prompts) == 1
    assert len(engine.requests) > 50  # the others


def test_a_logprob_that_differs_in_its_last_bit_is_another_answer_of_the_same_tokens() -> None:
    mode, _ = asked(10)
    assert sorted(mode.answers.values()) == [3, 27]
    assert mode.unique_tokens == 1


def test_each_round_has_a_rate_and_other_company() -> None:
    mode, engine = asked(None)
    first = len(engine.requests)
    deterministic.ask(engine, mode, 10, [0, 2])  # pyright: ignore[reportArgumentType]
    assert len(mode.rates) == len(mode.processor) == 2
    assert sum(mode.answers.values()) == 40
    others = [each.prompt for each in engine.requests if not each.request_id.isdecimal()]
    assert len(set(others)) == len(others)
    assert first < len(engine.requests)
