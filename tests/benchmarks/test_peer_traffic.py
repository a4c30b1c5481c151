"""Traffic, and the loops that serve it, with fake engines and a fake clock."""

import pytest

from benchmarks.peer_scripts import peer_traffic
from benchmarks.peer_scripts.peer_traffic import Traffic, serve_by_batches, serve_by_iterations


class Clock:
    """A clock that advances by hand and in sleep."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(peer_traffic, "time", made)
    return made


def load(prompts, outputs, arrivals, rows=2) -> dict:
    return {"prompts": prompts, "outputs": outputs, "arrivals": arrivals, "rows": rows}


def test_requests_are_taken_when_due(clock):
    traffic = Traffic(load([[1], [2], [3], [4]], [1] * 4, [0.0, 1.0, 1.0, 5.0]))
    clock.now += 50  # what an engine does before it begins does not count
    traffic.begin()
    assert traffic.take(4) == [0]
    assert traffic.take(4) == []
    traffic.wait()
    assert clock.now == 151.0
    assert traffic.take(1) == [1]
    assert traffic.take(4) == [2]
    assert traffic.coming
    clock.now += 100  # late: nobody waits for what has come already
    traffic.wait()
    assert clock.now == 251.0
    assert traffic.take(4) == [3]
    assert not traffic.coming


def test_tokens_have_times_and_answers_their_length(clock):
    traffic = Traffic(load([[1]], [2], [0.0]))
    traffic.begin()
    clock.now += 1.5
    assert not traffic.add(0, 7)
    clock.now += 0.5
    assert traffic.add(0, 8)
    assert traffic.add(0, 9)  # one too many is no part of the answer
    assert traffic.result() == {"tokens": [[7, 8]], "times": [[1.5, 2.0]]}


def test_rehearsal_has_other_prompts():
    made = Traffic.rehearsal(load([[1, 2], [3, 4], [5, 6]], [9, 9, 9], [0.0, 1.0, 2.0]))
    assert made.prompts == [[2, 1], [4, 3]]
    assert made.outputs == [peer_traffic.REHEARSAL] * 2
    assert made.arrivals == [0.0, 0.0]


def test_batches_hold_waiting_requests_to_their_end(clock):
    traffic = Traffic(load([[1], [2], [3], [4]], [3, 1, 2, 1], [0.0, 0.1, 0.2, 9.0]))
    seen = []

    def generate(requests):
        seen.append(list(requests))
        for _ in range(max(traffic.outputs[request] for request in requests)):
            clock.now += 1.0
            for request in requests:
                traffic.add(request, 5)

    serve_by_batches(traffic, generate)
    assert seen == [[0], [1, 2], [3]]
    assert [len(tokens) for tokens in traffic.tokens] == traffic.outputs
    assert traffic.times[1] == [4.0]  # it came while the first batch ran


class SummingEngine:
    """Answers with the sum of a sequence's tokens, so that every wrong or missing token shows."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.kept, self.batches = clock, {}, []

    def step(self, batch):
        self.batches.append([(token.sequence, token.position) for token in batch])
        self.clock.now += 1.0
        answers = []
        for token in batch:
            held = self.kept.setdefault(token.sequence, [])
            assert token.position == len(held)
            held.append(token.token)
            if token.wanted:
                answers.append(sum(held) % 97)
        return answers

    def forget(self, sequence):
        del self.kept[sequence]


def expected(prompt, count):
    held, made = list(prompt), []
    for _ in range(count):
        made.append(sum(held) % 97)
        held.append(made[-1])
    return made


def test_iterations_batch_decodes_then_prompts(clock):
    prompts, outputs = [[1, 2, 3], [4, 5, 6, 7, 8, 9], [10], [11, 12]], [4, 2, 3, 1]
    traffic = Traffic(load(prompts, outputs, [0.0, 0.5, 0.5, 30.0]))
    engine = SummingEngine(clock)
    serve_by_iterations(traffic, 4, engine.step, engine.forget)
    assert traffic.tokens == [expected(*each) for each in zip(prompts, outputs, strict=True)]
    assert engine.kept == {}
    assert max(len(batch) for batch in engine.batches) == 4
    assert engine.batches[0] == [(0, 0), (0, 1), (0, 2)]
    assert engine.batches[1] == [(0, 3), (1, 0), (1, 1), (1, 2)]  # a decode, and as much of a prompt as fits
    assert traffic.times[0] == [1.0, 2.0, 3.0, 4.0]  # a prompt of somebody else's stops nobody
    assert traffic.times[3] == [31.0]
    assert {sequence for batch in engine.batches for sequence, _ in batch} == {0, 1}
