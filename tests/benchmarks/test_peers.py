"""The comparison with peers: figures, checks of outputs and turns, with fake peers."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from benchmarks import engines, jobs, peer_results, peers
from benchmarks.environments import PeerError
from jaxserve.config import EngineConfig
from jaxserve.simulate import workload as load
from jaxserve.simulate.workload import Range
from server.commands.bench.step import Case

DECODE_1, DECODE_8 = Case(decodes=1, context=100), Case(decodes=8, context=100)
PREFILL, MIXED = Case(prompt=256), Case(decodes=8, context=100, prompt=120)


def test_case_names():
    assert [case.name for case in (DECODE_1, DECODE_8, PREFILL, MIXED)] == [
        "decode 1 row at 100",
        "decode 8 rows at 100",
        "prefill 256",
        "8 decodes + 120 prompt tokens",
    ]
    assert [case.rows for case in (DECODE_1, DECODE_8, PREFILL, MIXED)] == [1, 8, 1, 9]
    assert [case.tokens for case in (DECODE_1, DECODE_8, PREFILL, MIXED)] == [1, 8, 256, 128]


@pytest.mark.parametrize(
    ("values", "higher", "best"),
    [
        ({"jaxserve": 25.0, "a": 50.0, "b": 100.0}, True, ("b", 0.25)),
        ({"jaxserve": 25.0, "a": 50.0, "b": 100.0}, False, ("a", 0.5)),
        ({"jaxserve": 25.0, "a": None, "b": 100.0}, False, ("b", 0.25)),
        ({"jaxserve": None, "a": 1.0}, True, None),
        ({"jaxserve": 1.0, "a": None}, True, None),
        ({"jaxserve": 1.0}, True, None),
    ],
)
def test_figures_are_set_against_the_best_peer(values, higher, best):
    assert peer_results.against_best(values, higher=higher) == best


OURS = [{"tokens": [5, 6, 7, 8], "logprobs": [-1.0, -2.0, -3.0], "gaps": [0.5, 0.001]}]


@pytest.mark.parametrize(
    ("logprobs", "likeliest", "largest", "mismatches"),
    [
        ([-1.0, -2.0, -3.0], [6, 7, 8], 0.0, 0),
        ([-1.0, -2.005, -3.0], [1, 7, 8], 0.005, 0),  # what the prompt's tokens would have been does not matter
        ([-1.0, -2.0, -3.0], [6, 7, 9], 0.0, 0),  # two tokens about as likely: rounding decides
        ([-1.0, -2.0, -3.0], [6, 9, 8], 0.0, 1),
        ([-1.5, -2.0, -3.0], [6, 7, 8], 0.5, 0),
    ],
)
def test_agreement(logprobs, likeliest, largest, mismatches):
    found = peer_results.agreement(OURS, [{"logprobs": logprobs, "likeliest": likeliest}], "float32")
    assert found.largest == pytest.approx(largest)
    assert found.mismatches == mismatches
    assert found.holds == (largest <= 0.01 and mismatches == 0)


def test_peer_without_logprobs_is_checked_by_tokens():
    found = peer_results.agreement(OURS, [{"logprobs": None, "likeliest": [0, 7, 8]}], "float32")
    assert (found.largest, found.mismatches, found.holds) == (None, 0, True)
    assert not peer_results.agreement(OURS, [{"logprobs": None, "likeliest": [0, 1, 8]}], "float32").holds


def test_openings_are_compared_request_by_request():
    assert peer_results.same_openings([[1, 2, 3, 4, 5], [6]], [[1, 2, 3, 4, 9], [7]]) == 0.5


class Fake:
    """An engine that answers every kind of job.

    A decode takes `milliseconds`, a token of a load as many seconds. The kind of job that `broken` names fails.
    """

    def __init__(self, engine: str, milliseconds: float, *, broken: str = "", token: int = 7) -> None:
        self.engine, self.milliseconds, self.broken, self.token = engine, milliseconds, broken, token
        self.jobs: list[dict] = []

    def __call__(self, job: dict) -> dict:
        self.jobs.append(job)
        if self.broken and self.broken in job:
            raise PeerError(f"{self.engine} fell over")
        if "prompts" in job:
            return {"completions": [{"tokens": [5, 6], "logprobs": [-1.0], "gaps": [0.5]}]}
        if "sequences" in job:
            return {"scores": [{"logprobs": [-1.0], "likeliest": [6]}], "version": self.engine}
        told = {"peak_rss": 100, "settings": ["found"]}
        if "cases" in job:
            extra = {"weights": 10, "pool": 20} if self.engine == "jaxserve" else {}
            times = [None if case["prompt"] else [self.milliseconds] * 3 for case in job["cases"]]
            return {"milliseconds": times, **told, **extra}
        load = job["load"]
        tokens = [[self.token] * count for count in load["outputs"]]
        times = [
            [arrival + self.milliseconds * (at + 1) for at in range(len(each))]
            for arrival, each in zip(load["arrivals"], tokens, strict=True)
        ]
        return {"tokens": tokens, "times": times, **told}

    @property
    def contender(self) -> engines.Contender:
        return engines.Contender(
            engine=self.engine, shape="bloom", dtype="float32", model=Path("model"), vocab_size=50, run=self
        )

    def kinds(self) -> list[str]:
        names = ("prompts", "sequences", "cases", "load")
        return [next(name for name in names if name in job) for job in self.jobs]


SCOPE = peers.Scope(
    cases=(DECODE_8, PREFILL),
    steps=3,
    rounds=2,
    workload=lambda vocab_size: load.uniform(
        requests=5, prompt=Range(low=2, high=4), output=Range(low=1, high=6), vocab_size=vocab_size, seed=0
    ),
    loads=(0.5, 1.2),
    load_rounds=1,
    seed=0,
)


def measure(monkeypatch, tmp_path, fakes, *, resume=False, scope=SCOPE) -> tuple[int, dict]:
    monkeypatch.setattr(peers, "gather", lambda *rest: [fake.contender for fake in fakes])
    code = peers.measure(
        [Path("bloom")],
        [],
        ["float32"],
        scope,
        EngineConfig(max_rows=3),
        env_dir=tmp_path,
        out=tmp_path,
        resume=resume,
        console=Console(width=200),
    )
    return code, json.loads((tmp_path / "peers.json").read_text())


def test_engines_take_turns_and_failures_stop_no_other(monkeypatch, tmp_path, capsys):
    ours, theirs = Fake("jaxserve", 4.0), Fake("llama.cpp", 5.0)
    broken = Fake("transformers", 9.0, broken="cases")
    code, found = measure(monkeypatch, tmp_path, [ours, broken, theirs])
    assert code == 1
    assert [problem for problem in found["problems"] if "fell over" in problem] == [
        "transformers, bloom, float32, steps: transformers fell over"
    ] * 2
    assert ours.kinds() == ["prompts", "cases", "cases", "load", "load", "load"]
    assert theirs.kinds() == ["sequences", "cases", "cases", "load", "load"]
    assert broken.kinds() == theirs.kinds()
    assert theirs.jobs[1]["settings"] is None
    assert theirs.jobs[2]["settings"] == ["found"]
    assert theirs.jobs[4]["settings"] == ["found"]
    # Everybody gets the same requests at the same times, at most three at once.
    for at, mine in enumerate(ours.jobs[4:]):
        assert mine["load"] == theirs.jobs[3 + at]["load"] == broken.jobs[3 + at]["load"]
        assert mine["load"]["rows"] == 3
    assert [job["capacity"] for job in ours.jobs[3:]] == [True, False, False]
    gaps = [np.diff([0.0, *job["load"]["arrivals"]]).mean() for job in theirs.jobs[3:]]
    assert gaps[0] == pytest.approx(gaps[1] * 1.2 / 0.5)

    ratios = {(entry.get("load"), entry.get("case", entry.get("metric"))): entry for entry in found["ratios"]}
    assert ratios[None, DECODE_8.name]["ratio"] == 1.25
    assert (None, PREFILL.name) not in ratios  # no engine has such a step
    assert ratios[1.2, "time between tokens p95, ms"]["ratio"] == pytest.approx(0.8)
    assert "1.25x" in capsys.readouterr().out


@pytest.mark.parametrize(("capacity", "target"), [(True, None), (False, 0.06)])
def test_capacity_is_measured_without_an_objective(monkeypatch, capacity, target):
    served = []
    monkeypatch.setattr(jobs, "serve", lambda model, load, config, progress: served.append(config) or {})
    config = dataclasses.asdict(EngineConfig(target_tpot=0.06, token_budget=64))
    job = {"model": "model", "dtype": "float32", "config": config, "load": {}, "capacity": capacity}
    jobs.run_job(json.loads(json.dumps(job)), lambda *_: None)
    assert [(each.target_tpot, each.token_budget) for each in served] == [(target, 64)]


def test_interrupted_run_resumes(monkeypatch, tmp_path):
    ours, theirs = Fake("jaxserve", 4.0), Fake("llama.cpp", 5.0)
    stopped = Fake("llama.cpp", 5.0)

    def stop(job):
        if "load" in job:
            raise KeyboardInterrupt
        return Fake.__call__(stopped, job)

    monkeypatch.setattr(Fake, "contender", property(lambda self: replaced(self, stop if self is stopped else self)))
    code, found = measure(monkeypatch, tmp_path, [ours, stopped])
    assert code == 1
    assert found["problems"] == ["interrupted: the tables hold the results so far"]
    before = len(ours.jobs)
    code, found = measure(monkeypatch, tmp_path, [ours, theirs], resume=True)
    assert (code, found["problems"]) == (0, [])
    assert theirs.kinds() == ["load", "load"]
    assert len(ours.jobs) == before + 1  # the second load
    with pytest.raises(ValueError, match="other settings; leave --resume out"):
        measure(monkeypatch, tmp_path, [ours], resume=True, scope=dataclasses.replace(SCOPE, seed=1))


def replaced(fake: Fake, run) -> engines.Contender:
    return engines.Contender(
        engine=fake.engine, shape="bloom", dtype="float32", model=Path("model"), vocab_size=50, run=run
    )


def test_engine_with_other_outputs_is_left_out(monkeypatch, tmp_path):
    theirs = Fake("llama.cpp", 5.0, token=8)
    far = peer_results.Agreement(largest=9.0, mismatches=0, tolerance=0.1)
    monkeypatch.setattr(peer_results, "agreement", lambda *rest: far)
    code, found = measure(monkeypatch, tmp_path, [Fake("jaxserve", 4.0), theirs])
    assert code == 1
    assert theirs.kinds() == ["sequences"]
    assert "its outputs are not ours: Agreement(largest=9.0" in found["problems"][0]


def test_other_answers_under_load_are_a_problem(monkeypatch, tmp_path):
    code, found = measure(monkeypatch, tmp_path, [Fake("jaxserve", 4.0), Fake("llama.cpp", 5.0, token=8)])
    assert code == 1
    assert found["problems"] == [
        f"llama.cpp, bloom, float32, load {share}: only 0% of its answers begin as ours do" for share in (0.5, 1.2)
    ]
