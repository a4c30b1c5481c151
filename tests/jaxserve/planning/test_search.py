"""Searches over all mesh axes: what is tried, how it is ranked, and why layouts lose."""

from __future__ import annotations

import dataclasses
import io
import json
import re
from collections import Counter

import pytest
from rich.console import Console

from jaxserve import models
from jaxserve.planning import collectives, search_report
from jaxserve.planning.deployment import model_of
from jaxserve.planning.predict import predict
from jaxserve.planning.search import SearchResult, frontier, search
from jaxserve.planning.search_space import layouts, tensor_layouts
from sharding import specs
from tests.jaxserve.planning.questions import BLOOM, LLAMA, MIXTRAL, named, question


def searched(deployment, tried=layouts) -> SearchResult:
    return search(deployment, tried(deployment))


def printed(result: SearchResult) -> str:
    out = Console(file=io.StringIO(), width=250)
    search_report.show(result, out)
    return out.file.getvalue()  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def found() -> SearchResult:
    return searched(question(BLOOM, topology="h200:6", slots=None), tensor_layouts)


@pytest.fixture(scope="module")
def wide() -> SearchResult:
    """All axes, of a model whose weights are most of the work."""
    return searched(named("llama-3-8b", "v5e:2x4", max_rows=64))


def test_a_search_tries_every_way(found):
    labels = {each.label for each in found.candidates}
    assert labels == {"1 x 1 x 6", "1 x 2 x 3", "2 x 1 x 3", "3 x 1 x 2", "3 x 2 x 1", "6 x 1 x 1"}
    assert not found.left_out
    assert {each.rules for each in found.candidates if each.label == "2 x 1 x 3"} >= {
        "",
        "heads none",
        "vocab none, ffn none",
    }
    padded = {each.rules for each in found.candidates if each.label == "3 x 1 x 2"}
    assert "heads padded, vocab padded, ffn padded" in padded
    speeds = [each.tokens_per_second for each in found.candidates]
    assert speeds == sorted(speeds, reverse=True)


def test_a_search_plans_each_layout_once(monkeypatch):
    """The model is built once, and once more for each padding of it."""
    deployment, counted, paddings = question(BLOOM, topology="h200:6", slots=None), [], Counter()
    tried, build, plan = list(layouts(deployment)), models.build, predict

    def planned(candidate):
        counted.append(candidate)
        return plan(candidate)

    def built(config, padded=None):
        paddings.update([padded and tuple(padded.items())])
        return build(config, padded)

    monkeypatch.setattr("jaxserve.planning.search.predict", planned)
    monkeypatch.setattr(models, "build", built)
    model_of.cache_clear()
    search(deployment, tried)
    assert counted == [each.deployment for each in tried]
    assert paddings[None] == 1
    assert paddings.total() <= 1 + len(tried)


def test_a_search_tries_every_axis():
    tried = {each.rules: each.deployment for each in layouts(question(MIXTRAL, topology="v5e:2x2", slots=None))}
    axes = {rules: deployment.engine.stage_axes for rules, deployment in tried.items()}
    assert axes["heads over 2"] == {"second": 2, "tensor": 2}
    assert axes["experts over 2"] == {"expert": 2, "tensor": 2}
    assert axes["weights gathered over 4"] == {"fsdp": 4, "tensor": 1}
    assert axes["activations by tokens"] == {"tensor": 4}
    spec = tried["heads over 2"].spec
    assert (spec.rules["heads"], spec.rules["ffn"]) == ("tensor", ("tensor", "second"))
    spec = tried["experts over 2"].spec
    assert (spec.rules["expert"], spec.rules["ffn"]) == ("expert", "tensor")
    assert {"by expert" in rules for rules in tried} == {True, False}
    for rules in ("heads over 2", "experts over 2", "weights gathered over 4"):
        predict(tried[rules])  # all are possible
    by_pool = {
        "rows over 4": ({"attn": 4, "tensor": 1}, {"rows": "attn"}),
        "heads over 2, slots over 2": ({"context": 2, "tensor": 2}, {"slots": "context"}),
        "rows over 2, slots over 2": ({"attn": 2, "context": 2, "tensor": 1}, {"rows": "attn", "slots": "context"}),
        "heads over 2, rows over 2, experts over 2": ({"attn": 2, "tensor": 2}, {"rows": "attn"}),
    }
    for rules, (mesh, pool) in by_pool.items():
        spec = tried[rules].spec
        assert (axes[rules], spec.pool) == (mesh, pool)
        predict(tried[rules])
    assert spec.rules["expert"] == "attn"
    assert spec.rules["ffn"] == "tensor"
    assert spec.parameters["layers.*.out.kernel"] == {"heads": ("tensor", "attn")}
    assert not any("experts" in each.rules for each in layouts(question(LLAMA, topology="v5e:2x2")))


@pytest.mark.long
def test_pools_are_split_where_that_is_faster():
    """8 KV heads over 64 devices are copies; contexts over some of them are not, nor requests."""
    for context, rows, expected in ((131_071, 1, "slots over"), (8191, 32, "rows over")):
        deployment = dataclasses.replace(named("llama-3.1-70b", "v6e:8x8", max_rows=rows), context=context)
        found = search(
            deployment, [each for each in layouts(deployment) if each.deployment.engine.stage_devices == 64]
        ).candidates
        assert expected in found[0].rules
        plain = next(each for each in found if each.rules == "kv heads each 8 times")
        assert plain.points[-1].milliseconds > 1.2 * found[0].points[-1].milliseconds


def test_what_a_backend_refuses_is_told():
    """Other attention than the GPU kernels' would not be as fast as the cost model says."""
    deployment = question(LLAMA, topology="h200:4", attention="auto", dtype="bfloat16", slots=None)
    found = searched(deployment)
    refused = "attention backend 'gpu' cannot serve: slots of a block on several devices; xla and tpu serve these"
    assert found.left_out[refused].count("4 x 1 x 1") == 3  # slots over 2 beside heads or rows, and over 4
    assert not any("slots" in each.rules for each in found.candidates)
    assert any("rows" in each.rules for each in found.candidates)
    assert refused.partition(";")[0] in printed(found)


def test_buckets_are_whole_parts_of_tokens():
    for each in layouts(question(BLOOM, topology="v5e:2x4", max_rows=6)):
        if each.rules == "activations by tokens":
            assert all(size % each.deployment.engine.tensor == 0 for size in each.deployment.buckets)


def test_what_is_spent_adds_up(wide):
    for each in wide.candidates:
        assert sum(each.spent().values()) == pytest.approx(1e3 * 8 / each.tokens_per_second)
    best = wide.candidates[0]
    assert search_report.why(best, best) == ""


def test_losers_say_why(wide):
    best, by_rules = wide.candidates[0], {}
    for each in wide.candidates:
        by_rules.setdefault((each.label, each.rules), each)
    assert search_report.why(by_rules["2 x 1 x 4", "vocab none"], by_rules["2 x 1 x 4", ""]).startswith("head +")
    assert search_report.why(by_rules["8 x 1 x 1", "ffn none"], best).startswith("matmul +")
    assert search_report.why(by_rules["8 x 1 x 1", ""], by_rules["4 x 1 x 2", ""]).startswith("collectives +")
    assert search_report.why(by_rules["1 x 8 x 1", ""], by_rules["1 x 2 x 4", ""]).startswith("waiting +")
    text = printed(wide)
    assert "matmul: copies or padding of weights" in text
    assert re.search(r"[0-9]+ +the weights do not fit +not possible +1 x 1 x 8", text)


def test_unknown_collectives_are_no_advantage(wide):
    best = wide.candidates[0].tokens_per_second
    unknown = wide.unranked + wide.slower
    assert {re.sub(r"\d+", "N", each.rules) for each in unknown} == {"activations by tokens", "weights gathered over N"}
    assert not any(each.is_bound for each in wide.candidates)
    assert all(each.tokens_per_second >= best for each in wide.unranked)
    assert all(each.tokens_per_second < best for each in wide.slower)
    # The gathers are in the bound: each device gets the other 7 parts of every layer's weights.
    (gathered,) = (each for each in wide.slower if (each.label, each.rules) == ("8 x 1 x 1", "weights gathered over 8"))
    (stage,) = gathered.plan.stages
    layers = sum(
        part.nbytes * part.count
        for part in stage.parameters
        if part.name.startswith("layers.") and part.shape != part.local
    )
    assert stage.load.collectives is not None
    assert sum(each.sent(1, 1) for each in stage.load.collectives) == pytest.approx(7 * layers)
    assert sum(each.sent(64, 64) for each in stage.load.collectives) == pytest.approx(7 * layers)
    assert gathered.spent()["collectives"] > 10 * wide.candidates[0].spent()["matmul"]


def test_unknown_speed_is_not_ranked():
    spec = dataclasses.replace(
        specs.default("bloom"), rules={**dict.fromkeys(specs.default("bloom").rules), "embed": "tensor"}
    )
    result = searched(question(BLOOM, spec, topology="v5p:2x2x2", slots=None), tensor_layouts)
    assert {each.engine.tensor for each in result.candidates} == {1}
    assert {each.engine.tensor for each in result.unranked + result.slower} == {2, 4, 8}
    text = printed(result)
    assert "Not ranked" in text or "even without unknown collectives" in text
    deployment = question(BLOOM, spec, topology="v5p:2x2x2", slots=None)
    only = [each for each in tensor_layouts(deployment) if each.deployment.engine.tensor == 2]
    with pytest.raises(ValueError, match="2 x collectives unknown"):
        search(deployment, only)


def test_nothing_beats_the_frontier(found):
    points = [point for each in found.candidates for point in each.points]
    edge = [point for _, point in frontier(found.candidates)]
    for _, latency, speed in edge:
        assert not any(other.milliseconds < latency and other.tokens_per_second > speed for other in points)
    assert max(point.tokens_per_second for point in points) == edge[-1].tokens_per_second
    assert min(point.milliseconds for point in points) == edge[0].milliseconds


def test_a_search_is_told_and_drawn(found, tmp_path):
    assert re.search(r"1 +\d x \d x \d", printed(found))
    search_report.plot(found.candidates, "a title", tmp_path / "plots" / "frontier.png")
    assert (tmp_path / "plots" / "frontier.png").read_bytes().startswith(b"\x89PNG")
    told = json.loads(json.dumps(search_report.result_json(found)))
    assert told["candidates"][0]["more_than_first"]["matmul"] == 0
    assert told["candidates"][0]["spec"]["axes"]["heads"] == "tensor"


def test_narrow_terminals_show_all_figures(found):
    out = Console(file=io.StringIO(), width=80)
    search_report.show(found, out)
    words = out.file.getvalue().split()
    assert {f"{each.points[-1].tokens_per_second:,.0f}" for each in found.candidates[:20]} <= set(words)
    assert "…" not in "".join(words)


def test_what_does_not_fit_is_told():
    deployment = question(BLOOM | {"hidden_size": 8192, "n_layer": 40, "n_head": 64}, topology="v5e:2x2", slots=None)
    with pytest.raises(ValueError, match=r"bloom does not fit on v5e:2x2 in any way: \d+ x the weights do not fit"):
        searched(deployment)


def test_gathers_are_those_of_the_compiled_program():
    """docs/sharding.md shows the collectives of this program, compiled for v6e."""
    base = specs.default("bloom")
    spec = dataclasses.replace(
        base,
        rules={**base.rules, "embed": "fsdp"},
        parameters={"*norm*": {"embed": None}},
        gather=("fsdp",),
        activations={"embed": None},
    )
    (stage,) = predict(named("bloom-560m", "v6e:2x4", spec, mesh="fsdp=4,tensor=2", slots=8192, buckets=(256,))).stages
    found = collectives.gathers(stage.parameters, spec.gather, stage.load.mesh)
    assert {(each.what.removeprefix("layers.*."), each.times, each.carried(256, 16)) for each in found} == {
        ("qkv.kernel", 24, 3 * 2**20),
        ("out.kernel", 24, 2**20),
        ("up.kernel", 24, 4 * 2**20),
        ("down.kernel", 24, 4 * 2**20),
        ("out.bias", 24, 4096),
        ("down.bias", 24, 4096),
    }
    assert {(each.kind, each.group, each.over) for each in found} == {("all-gather", 4, ("fsdp",))}
