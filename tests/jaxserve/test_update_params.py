"""Weights given to an engine in memory, and replaced while it serves."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import pytest

from jaxserve import models, startup
from jaxserve.engine import Engine
from jaxserve.multihost.in_flight import IterationTracker
from jaxserve.multihost.master import MasterPipeline
from jaxserve.request import Request
from jaxserve.sampling_params import SamplingParams
from tests.fixtures.tiny import BLOOM, CONFIG, make_engine
from tests.fixtures.traffic import Answers, run


def test_update_params_changes_answers_and_forgets_prefixes(params) -> None:
    engine = make_engine(params)
    prompt = tuple(range(5, 30))
    ask = partial(Request, prompt=prompt, sampling=SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))
    before = run(engine, [(0, ask(request_id="a"))]).logprobs["a"]
    other = models.build(BLOOM).init(1, jnp.float32)
    engine.update_params(other)
    cached = engine.load().cached_tokens
    after = run(engine, [(0, ask(request_id="b"))]).logprobs["b"]
    assert engine.load().cached_tokens == cached
    assert after == run(make_engine(other), [(0, ask(request_id="c"))]).logprobs["c"]
    assert after != before
    engine.submit(ask(request_id="d"), Answers())
    engine.step()
    with pytest.raises(RuntimeError, match="1 requests are alive"):
        engine.update_params(params)


def test_shared_over_hosts_is_not_replaced(params) -> None:
    engine = make_engine(params)
    (replica,) = engine._loops
    iterations = SimpleNamespace(local=IterationTracker())
    hosts: Any = SimpleNamespace(iterations=iterations, done=None, report_error=None)
    replica.pipeline = MasterPipeline(replica.pipeline.stages, [], hosts, lambda: None)
    engine.submit(Request(request_id="a", prompt=(5,), sampling=SamplingParams(max_tokens=2)), Answers())
    with pytest.raises(ValueError, match="several hosts share the model, so its weights cannot be replaced"):
        engine.update_params(params)
    with pytest.raises(ValueError, match="a timeline shows the stages of one host"):
        engine.timeline()


def test_a_wrong_tree_is_named(params) -> None:
    with pytest.raises(ValueError, match=r"embed.*has .*; the model has"):
        Engine.from_params(BLOOM, {**params, "embed": {"other": jnp.zeros(3)}}, CONFIG)
    assert startup.check_tree(params, params) is None
