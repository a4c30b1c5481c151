"""`jaxserve.plan`: what it takes, what it gives, and how a notebook shows it."""

from __future__ import annotations

import dataclasses
import html
import json
import re

import pytest

import jaxserve
from jaxserve.planning import comparison, plan_report
from jaxserve.planning.planner import ImpossibleSpec
from sharding import specs

ASKED = {"model": "bloom-560m", "topology": "h200:8", "buckets": (8, 64), "max_rows": 8}
WHOLE = '[axes]\nvocab = "none"\n'
SPEC = specs.default("bloom")


def plan(**changes):
    return jaxserve.plan(**ASKED | changes)


@pytest.fixture(scope="module")
def result():
    return plan(tensor=4)


def test_a_spec_is_a_file_its_contents_or_a_spec(tmp_path):
    file = tmp_path / "whole.toml"
    file.write_text(WHOLE)
    rules = dataclasses.replace(SPEC, rules={**SPEC.rules, "vocab": None})
    found = [plan(tensor=4, spec=spec) for spec in (file, str(file), {"axes": {"vocab": "none"}}, rules)]
    assert [each.name for each in found] == ["whole.toml", "whole.toml", "spec", "spec"]
    assert all(comparison.differences(found[0].plan, each.plan) == [] for each in found)
    assert comparison.differences(plan(tensor=4).plan, found[0].plan)


def test_a_mesh_is_a_dict_or_in_the_spec(tmp_path):
    file = tmp_path / "square.toml"
    file.write_text('[mesh]\nx = 2\ntensor = 2\nstage = 2\n[axes]\nffn = ["x", "tensor"]\n')
    rules = {"axes": {"ffn": ["x", "tensor"]}}
    found = [plan(spec=file), plan(spec=rules | {"mesh": {"x": 2, "tensor": 2, "stage": 2}})]
    found.append(plan(spec=rules, mesh={"x": 2, "tensor": 2}, stages=2))
    for each in found:
        assert each.plan.deployment.engine.stage_axes == {"x": 2, "tensor": 2}
        assert len(each.plan.stages) == 2
    other = plan(tensor=4, stages=1, against=file).against
    assert other is not None
    assert other.plan.stages == found[0].plan.stages
    with pytest.raises(ValueError, match="tensor is 4, but the mesh is x=2,tensor=2"):
        plan(tensor=4, mesh={"x": 2, "tensor": 2})


def test_any_two_results_are_compared(result):
    other = plan(tensor=8)
    compared = plan(tensor=4, against=other)
    assert {each.what for each in compared.differences} >= {"slots", "stage 0: weights"}
    assert compared.differences == result.compared_with(other).differences
    assert compared.names == ("tensor 4, stages 1", "tensor 8, stages 1")  # both have the default spec
    assert plan(tensor=4, against={"axes": {"ffn": "none"}}).names == ("default", "other")
    assert result.differences == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "bloom-561m"}, "did you mean bloom-560m?"),
        ({"topology": "h20:8"}, "did you mean h200?"),
        ({"topology": None}, "topology 'None': device 'none' is not known"),
        ({"tensor": 3}, "does not divide over mesh axis 'tensor' of size 3"),
        ({"spec": {"axes": {"vocb": "none"}}}, r"spec: \[axes\] names unknown logical axis 'vocb'"),
        ({"spec": {"mesh": {"x": 0}}}, r"spec: \[mesh\] x is 0; it must be a whole number of at least 1"),
        ({"spec": {"mesh": 4}}, r"spec: mesh is 4; write a section \[mesh\]"),
        ({"mesh": 16}, "mesh is '16'; write names and sizes"),
        ({"buckets": 64}, "buckets is 64; it must be a list"),
        ({"buckets": "64"}, "buckets is '64'; it must be a list"),
        ({"spec": None}, "spec is None; it must be 'default', a TOML file"),
        ({"sharding": "my.toml"}, "sharding is called spec here: write spec='my.toml'"),
        ({"spec": "nowhere.toml"}, "nowhere.toml cannot be read"),
        ({"against": {"axes": {"vocb": "none"}}}, "names unknown logical axis 'vocb'"),
        ({"compile": "gpu"}, "compile is 'gpu'; it must be 'topology', 'cpu' or None"),
        ({"context": 0}, "context is 0; it must be a whole number of at least 1"),
        ({"context": "1k"}, "context is '1k'; it must be a whole number of at least 1"),
    ],
)
def test_mistakes_are_told_as_by_the_command(changes, message):
    with pytest.raises(ValueError, match=message):
        plan(**changes)


def test_the_impossible_of_two_specs_is_named():
    padded = {"pad": {"heads": True, "ffn": True}}
    for spec, against, name, is_ours in (("default", padded, "default", True), (padded, "default", "default", False)):
        with pytest.raises(ImpossibleSpec, match=f"{name} is not possible: layers.0.down.kernel") as told:
            plan(tensor=6, spec=spec, against=against)
        assert told.value.is_ours is is_ours


def embedded(page: str) -> dict:
    found = re.search(r'<script type="application/json" id="plan">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_a_notebook_shows_the_page_in_a_frame(result, tmp_path):
    compared = result.compared_with(plan(tensor=4, spec={"axes": {"vocab": "none"}}))
    frame = re.fullmatch(r'<iframe srcdoc="([^"]*)" onload="[^"]*" style="[^"]*"></iframe>', compared._repr_html_())
    assert frame is not None
    page = html.unescape(frame[1])
    compared.save(tmp_path / "new" / "plan.html")
    assert (tmp_path / "new" / "plan.html").read_text() == page == compared.page()
    data = embedded(page)
    assert data["against_plan"]["labels"] == ["default", "spec"]
    assert [table["title"] for table in data["tables"]] == [
        "The same ms by part, all stages",
        "Collectives",
        "Collectives by kind, bucket 64",
        "spec against default, differences only",
    ]


def test_collectives_are_told_by_kind(result):
    # 49 all-reduces of 1,024 bfloat16 for 64 tokens, and the logits of 8 rows in float32 over 250,880 tokens.
    rows = [("all-reduce", "49", "6.12 MiB"), ("all-gather", "1", "7.66 MiB")]
    assert (plan_report.by_kind(result.plan).rows, plan_report.by_kind(result.plan).notes) == (rows, [])
    assert plan_report.by_kind(plan().plan).notes == ["No collectives"]
    first, second = plan(tensor=4, stages=2).plan.stages
    part = dataclasses.replace(second, load=dataclasses.replace(second.load, collectives=None))
    unknown = plan_report.by_kind(dataclasses.replace(result.plan, stages=(first, part)))
    assert (unknown.rows, unknown.notes) == ([], ["Unknown"])


def test_a_result_is_told_in_two_lines(result):
    first, second = repr(result).splitlines()
    assert first.startswith("bloom-560m (bloom, ")
    assert second.startswith("Bottleneck with 8 rows decoding")
