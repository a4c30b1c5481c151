"""Several replicas behind one engine: who gets a request, and that nobody notices which one did."""

import threading
from collections import Counter

import jax
import numpy as np
import pytest

from jaxserve.engine import Engine
from jaxserve.errors import QueueFull
from jaxserve.request import FinishReason, Request
from jaxserve.sampling_params import SamplingParams
from tests.fixtures.tiny import make_engine, opinionated
from tests.fixtures.traffic import Answers, run, traffic


@pytest.fixture
def three(params) -> Engine:
    return make_engine(params, replicas=3, slots=320)


def ask(name: str, prompt: tuple[int, ...] = (5, 6, 7), max_tokens: int = 20, **changes) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return Request(request_id=name, prompt=prompt, sampling=sampling, **changes)


def holders(engine: Engine, *names: str) -> list[int]:
    """Which replica has each of the requests."""
    return [next(r.index for r in engine._loops if r.holds(name)) for name in names]


def finish(engine: Engine) -> None:
    while engine.step():
        pass


@pytest.mark.long
def test_each_replica_has_devices_of_its_own(params) -> None:
    engine = make_engine(params, replicas=3, stages=2)
    held = [
        {
            device
            for stage in replica.pipeline.stages
            for leaf in jax.tree.leaves(stage.params)
            for device in leaf.devices()
        }
        for replica in engine._loops
    ]
    assert held == [set(jax.devices()[first : first + 2]) for first in (0, 2, 4)]
    assert engine.report.replicas == 3
    one = make_engine(params, stages=2)
    assert engine.report.weight_bytes == 3 * one.report.weight_bytes
    assert engine.report.pool_bytes == 3 * one.report.pool_bytes
    assert engine.load().slots_total == 3 * engine.report.slots == 3 * one.report.slots


def test_the_same_answers_whoever_gives_them(params, three) -> None:
    arrivals = traffic(30)
    expected, answers = run(make_engine(params), arrivals), run(three, arrivals)
    different = [name for name, tokens in expected.tokens.items() if answers.tokens[name] != tokens]
    assert len(different) <= 1
    for name in expected.tokens.keys() - set(different):
        np.testing.assert_allclose(answers.logprobs[name], expected.logprobs[name], atol=1e-4)
        assert answers.reasons[name] == expected.reasons[name]
    load = three.load()
    assert load.compiled_after_ready == 0
    assert load.slots_used == 0
    assert load.generated_tokens == sum(map(len, answers.tokens.values()))
    assert len(three.loads()) == 3
    assert all(each.iterations > 0 for each in three.loads())
    assert [replica.outstanding_tokens for replica in three._loops] == [0, 0, 0]


def test_a_request_goes_where_the_least_is_left_to_compute(three) -> None:
    three.submit(ask("long", max_tokens=60), Answers())
    three.submit(ask("short", max_tokens=10), Answers())
    three.submit(ask("middle", max_tokens=30), Answers())
    three.submit(ask("second short", max_tokens=10), Answers())
    assert holders(three, "long", "short", "middle", "second short") == [0, 1, 2, 1]
    for _ in range(50):  # what is computed is owed no more
        three.step()
    three.submit(ask("late", max_tokens=30), Answers())
    assert holders(three, "long", "late") == [0, 1]
    three.submit(ask("later", max_tokens=5), Answers())
    assert holders(three, "later") == [2]
    finish(three)
    assert three.load().running == 0


def test_routing_weighs_prefix_against_load(three) -> None:
    prefix = tuple(range(3, 43))
    three.submit(ask("nobody's", prompt=(96,), max_tokens=10), Answers())
    three.submit(ask("first", prompt=(*prefix, 50)), Answers())
    assert holders(three, "nobody's", "first") == [0, 1]
    finish(three)
    cached = three.load().cached_tokens
    names = [f"like it {index}" for index in range(4)]
    for index, name in enumerate(names):
        three.submit(ask(name, prompt=(*prefix, 60 + index), max_tokens=25), Answers())
    # Forty tokens of prefix outweigh one request that may take 26 more, not two.
    assert holders(three, *names) == [1, 1, 0, 2]
    finish(three)
    assert three.load().cached_tokens == cached + 2 * 40
    three.submit(ask("another's", prompt=(*prefix, 60), cache_salt="other"), Answers())
    three.submit(ask("nobody's again", prompt=(96,), max_tokens=30), Answers())
    assert holders(three, "another's", "nobody's again") == [0, 1]


def test_requests_end_where_they_run(three) -> None:
    answers = Answers()
    for index in range(6):
        three.submit(ask(str(index), max_tokens=50), answers)
    assert Counter(holders(three, *map(str, range(6)))) == {0: 2, 1: 2, 2: 2}
    three.step()
    three.abort("3")
    three.abort("nobody")
    finish(three)
    assert answers.reasons.pop("3") is FinishReason.ABORTED
    assert set(answers.reasons.values()) == {FinishReason.LENGTH}
    assert three.load().slots_used == 0


def test_the_queue_is_bounded_over_all_replicas(params) -> None:
    engine = make_engine(params, replicas=2, max_queued_requests=3)
    for index in range(3):
        engine.submit(ask(str(index)), Answers())
    with pytest.raises(QueueFull, match="3 requests are waiting"):
        engine.submit(ask("3"), Answers())
    with pytest.raises(ValueError, match="'1', which names a request that is alive"):
        engine.submit(ask("1"), Answers())


def test_new_weights_reach_all_replicas(params, three) -> None:
    other = opinionated(1)
    with three:
        before = three.generate([[5, 6, 7]] * 3, max_tokens=4, temperature=0.0, logprobs=0)
        three.update_params(other)
        after = three.generate([[5, 6, 7]] * 3, max_tokens=4, temperature=0.0, logprobs=0)
    assert all(replica.load().iterations for replica in three._loops)
    (expected,) = make_engine(other).generate([[5, 6, 7]], max_tokens=4, temperature=0.0, logprobs=0)
    for old, new in zip(before, after, strict=True):
        np.testing.assert_allclose(new.logprobs, expected.logprobs, atol=1e-4)
        assert np.abs(np.subtract(old.logprobs, expected.logprobs)).max() > 1e-2


def test_a_replica_that_fails_ends_its_own_requests_only(three, monkeypatch, caplog) -> None:
    broken = three._loops[1].pipeline
    monkeypatch.setattr(broken, "launch", lambda *_: (_ for _ in ()).throw(RuntimeError("device lost")))
    answers, done = Answers(), threading.Event()

    def sink(events) -> None:
        answers(events)
        if len(answers.reasons) == 3:
            done.set()

    for name in "abc":
        three.submit(ask(name), sink)
    with three:
        assert done.wait(60)
        assert not three.is_healthy
        assert answers.reasons == {
            "a": FinishReason.LENGTH,
            "b": FinishReason.ERROR,
            "c": FinishReason.LENGTH,
        }
        later = three.generate([[9, 8]] * 4, max_tokens=3, ignore_eos=True)
        assert [len(each.token_ids) for each in later] == [3] * 4
    assert "replica 1 failed" in caplog.text


def test_a_sink_may_submit(three) -> None:
    """From the replica's own thread, while others submit from theirs."""
    ended, lock, all_done = [], threading.Lock(), threading.Event()

    def sink(events) -> None:
        for event in events:
            if event.finish_reason is not None:
                name, left = event.request_id.split("/")
                if int(left):
                    three.submit(ask(f"{name}/{int(left) - 1}", max_tokens=2), sink)
                with lock:
                    ended.append(event.request_id)
                    if len(ended) == 40:
                        all_done.set()

    with three:
        threads = [
            threading.Thread(target=lambda n=n: [three.submit(ask(f"{n}-{i}/3", max_tokens=2), sink) for i in range(2)])
            for n in range(5)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all_done.wait(60)
    assert len(set(ended)) == 40
    assert [replica.outstanding_tokens for replica in three._loops] == [0, 0, 0]
