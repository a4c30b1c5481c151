"""How plans are told: tables, JSON, differences, search, page."""

from __future__ import annotations

import dataclasses
import io
import json
import re

import pytest
from rich.console import Console

from jaxserve.planning import comparison, plan_page, plan_report
from jaxserve.planning.compiled import CompiledStage, with_compiled
from jaxserve.planning.hlo import CollectiveOp
from jaxserve.planning.predict import predict
from sharding import specs
from tests.jaxserve.planning.questions import BLOOM, LLAMA, MIXTRAL, named, question

SPEC = specs.default("bloom")
WINDOWS = {"use_sliding_window": True, "sliding_window": 256, "max_window_layers": 1}
WHOLE = dataclasses.replace(SPEC, rules={**SPEC.rules, "vocab": None})


def printed(show, *arguments) -> str:
    out = Console(file=io.StringIO(), width=200)
    show(*arguments, out)
    return out.file.getvalue()  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def plan():
    return predict(question(BLOOM, tensor=4, stages=2))


def test_a_plan_is_told_as_tables(plan):
    text = printed(plan_report.show, plan)
    assert re.search(r"layers\.\*\.qkv\.kernel +2 +heads, embed +\(tensor, -\) +384 x 128 +96 x 128 +48\.00 KiB", text)
    assert re.search(r"0 +0-3 +0-0 ", text)
    assert "8,192 slots in blocks of 64, float32, fit: 4 requests of 2,048 tokens" in text
    assert re.search(r"1 +layers\.\*\.down +all-reduce +4 \(tensor\) +1 +1 +4\.00 KiB", text)
    assert re.search(r"Roofline: 57% of 7[67] TFLOP/s \(float32\)", text)
    assert "Bottleneck with 4 rows decoding" in text


def test_repeated_and_padded_axes_are_told():
    plan = predict(question(LLAMA | {"vocab_size": 1023}, tensor=4))
    assert plan.padding == {"kv_heads": (2, 4), "vocab": (1023, 1024)}
    assert plan_report.padding(plan) == {
        "kv heads": "2, held as 4: each twice, +1.00 MiB on each device",
        "vocab": "1,023 padded to 1,024, 0.098% more",
    }
    whole = predict(question(LLAMA, tensor=2))
    found = {each.what: each.theirs for each in comparison.differences(whole, plan)}
    assert found["kv heads"] == plan_report.padding(plan)["kv heads"]


def test_active_parameters_are_told():
    assert " 0.95 M" not in plan_report.headline(predict(question(LLAMA)))
    told = plan_report.headline(predict(question(MIXTRAL)))
    assert re.search(r"mixtral, [\d.]+ G parameters, [\d.]+ G active, float32", told)


def test_a_plan_is_json(plan):
    told = json.loads(json.dumps(plan_report.plan_json(plan)))
    assert told["slots"] == 8192
    assert told["stages"][1]["collectives"][-1]["kind"] == "all-gather"
    assert told["stages"][0]["parameters"][0]["axes"] == ["embed"]
    assert set(told["buckets"][0]["stages"][0]) == {"compute", "memory", "links", "overhead"}
    assert "compiled" not in told


def compiled(*surprises: str) -> CompiledStage:
    found = (CollectiveOp("all-reduce", "f32[8,128]", 4096, 3),)
    return CompiledStage(
        bucket=8,
        seconds=1.0,
        arguments=4,
        temporaries=2,
        total=6,
        collectives=found,
        sent=24576,
        sent_under_compute=8192,
        surprises=surprises,
    )


def test_a_compiled_program_stands_next_to_the_prediction(plan):
    text = printed(plan_report.compiled(plan, [compiled(), compiled()]).show)
    assert re.search(r"0 +all-reduce +3 +3", text)
    assert re.search(r"1 +all-gather +1 +0", text)
    assert "stage 0: 3 x all-reduce of f32[8,128], 4.00 KiB each" in text
    assert "stage 0: a device sends 24.00 KiB, 33% of it while it multiplies or attends" in text
    assert "Nothing unexpected" in text
    out = Console(file=io.StringIO(), width=200, force_terminal=True, highlight=False, color_system="standard")
    plan_report.compiled(plan, [compiled("2 x copy of the pool as u16[4]"), compiled()]).show(out)
    assert "\x1b[31munexpected in stage 0: 2 x copy of the pool as u16[4]\x1b[0m" in out.file.getvalue()  # type: ignore[attr-defined]


def test_two_specs_are_told_by_their_differences():
    ours, theirs = (predict(question(BLOOM, spec, tensor=4)) for spec in (SPEC, WHOLE))
    found = {each.what: each for each in comparison.differences(ours, theirs)}
    assert found["[axes] vocab"] == comparison.PlanDifference("[axes] vocab", "tensor", "none")
    assert found["stage 0: all-gather after head"].theirs is None
    assert found["embed.tokens.table"].change == "+300.0%"
    assert "layers.*.up.kernel" not in found
    assert theirs.parts(theirs.buckets[0]).collectives < ours.parts(ours.buckets[0]).collectives
    assert theirs.parts(theirs.buckets[0]).attention == ours.parts(ours.buckets[0]).attention
    assert sum(ours.parts(ours.buckets[0])) == pytest.approx(ours.buckets[0].milliseconds / 1e3)
    text = printed(comparison.section(list(found.values()), ("default", "my.toml")).show)
    assert re.search(r"\[axes\] vocab +tensor +none", text)
    assert not comparison.differences(ours, ours)
    assert "default and same.toml give the same plan" in printed(comparison.section([], ("default", "same.toml")).show)


def test_milliseconds_are_told_by_part():
    asked = named("bloom-176b", "a100-80g:2x8", tensor=16, max_rows=32, buckets=(256,), slots=32_000)
    plans = [predict(dataclasses.replace(asked, context=context)) for context in (1024, 512)]
    found = {each.what: each for each in comparison.differences(*plans)}
    assert float(found["bucket 256: ms of attention"].theirs) < float(found["bucket 256: ms of attention"].ours)
    same = ("matmul", "head", "collectives", "sampling")
    assert not {f"bucket 256: ms of {part}" for part in same} & set(found)


def test_sampling_is_a_part_of_its_own(undecided):
    """Of as many rows as decode, whatever the sharding, and the same where collectives are unknown."""
    plans = [predict(named("bloom-560m", "v6e:2x2", tensor=4, max_rows=rows, buckets=(32,))) for rows in (16, 32)]
    one, other = (1e3 * plan.sampling(plan.buckets[-1]) for plan in plans)
    device = plans[0].deployment.topology.device
    assert one == pytest.approx(1e3 * 3 * 16 * 4 * 250_880 / device.bandwidth / 0.57)
    assert other == pytest.approx(2 * one)
    found = {each.what: each for each in comparison.differences(*plans)}
    assert found["bucket 32: ms of sampling"].change == "+100.0%"
    for plan in (plans[0], undecided):
        (bucket,) = plan.buckets
        told = printed(plan_report.by_part(plan).show)
        assert re.search(rf"starts +sampling *\n *{bucket.tokens} .* {1e3 * plan.sampling(bucket):.2f} *\n", told)
        assert plan_report.plan_json(plan)["buckets"][0]["sampling"] == 1e3 * plan.sampling(bucket) > 0


def test_memory_is_told_as_bars():
    plan = predict(named("bloom-176b", "a100-80g:2x8", tensor=16, max_rows=32, buckets=(256,)))
    small = predict(named("bloom-176b", "a100-80g:2x8", tensor=16, max_rows=32, buckets=(256,), slots=32_000))
    rows = comparison.memory((plan, small), ("all", "few")).rows
    assert [row[:2] for row in rows] == [("all", "0"), ("few", "0")]
    bars = [row[2] for row in rows]
    assert [len(bar) for bar in bars] == [60, 60]
    assert bars[0].count("w") == bars[1].count("w") == 16  # 20.5 of 79.2 GiB
    assert bars[0].count("p") == pytest.approx(60 * 52.3 / 79.2, abs=1)
    assert bars[1].count(".") == pytest.approx(60 * (1 - (20.5 + 7.5) / 79.2), abs=1)


def test_a_rule_that_no_parameter_follows_is_no_difference():
    for entries, told in ((BLOOM, False), (LLAMA, True)):  # where each head has its own keys, none is on kv_heads
        default = specs.default(entries["model_type"])
        changed = dataclasses.replace(default, rules={**default.rules, "kv_heads": "tensor", "vocab": None})
        before, after = (predict(question(entries, spec, tensor=4)) for spec in (default, changed))
        named = {each.what for each in comparison.differences(before, after)}
        assert ("[axes] kv_heads" in named) is told
        assert "[axes] vocab" in named


@pytest.fixture(scope="module")
def undecided():
    return predict(question(BLOOM, dataclasses.replace(SPEC, activations={"tokens": "tensor"}), tensor=4))


def test_unknown_speed_is_no_number(undecided):
    text = printed(plan_report.show, undecided)
    assert re.search(r"8 +4 +4( +unknown){7}", text)
    assert "Speed unknown" in text
    known = predict(question(BLOOM, tensor=4))
    found = {each.what: each for each in comparison.differences(known, undecided)}
    for what in (
        "bucket 8: tokens/s",
        "bucket 8: ms",
        "bucket 8: all-reduce",
        "stage 0: all-reduce after layers.*.out",
    ):
        assert (found[what].theirs, found[what].change) == ("unknown", ""), what
    assert json.loads(json.dumps(plan_report.plan_json(undecided)))["buckets"][0]["tokens_per_second"] is None


def test_unknown_bytes_are_no_number():
    rules = {**dict.fromkeys(SPEC.rules), "embed": "tensor"}
    plan = predict(question(BLOOM, dataclasses.replace(SPEC, rules=rules, activations={"tokens": "tensor"}), tensor=4))
    text = printed(plan_report.show, plan)
    assert re.search(r"0 +0-3 +0-1 .* unknown .*%", text)
    assert "Activations: the compiler decides which weights it makes whole; " in text
    rows = [row for row in plan_report.compiled(plan, [compiled()]).rows if row[0] == "0"][:2]
    assert [(row[2], row[4]) for row in rows] == [("unknown", ""), ("unknown", "")]
    known = predict(question(BLOOM, tensor=4))
    found = {each.what: each for each in comparison.differences(known, plan)}
    assert (found["stage 0: activations"].theirs, found["stage 0: activations"].change) == ("unknown", "")


def test_compiled_collectives_replace_unknown_ones(undecided):
    plan = with_compiled(undecided, [compiled()], overlap=False)
    (bucket,) = plan.buckets
    assert bucket.milliseconds is not None
    sent = plan.stages[0].load.collectives
    assert sent is not None
    assert sent[0].sent(bucket.tokens, 4) == 3 * 2 * 4096 * 3 / 4
    assert with_compiled(plan, [compiled("more")], overlap=False) == plan  # what is known stays


def test_compiled_overlap_shortens_the_time_on_links(undecided):
    told = "as if no collective ran while the device multiplies"
    for before in (predict(question(BLOOM, tensor=4)), undecided):
        alone, plan = (with_compiled(before, [compiled()], overlap=overlap) for overlap in (False, True))
        assert plan.overlapped == (1 / 3,)
        (one,), (other,) = alone.buckets[-1].stages, plan.buckets[-1].stages
        assert other == one._replace(links=one.links * 2 / 3)
        parts = plan.parts(plan.buckets[-1])
        assert parts is not None
        assert sum(parts) == pytest.approx(other.total)
        assert told in printed(plan_report.show, alone)
        assert told not in (text := printed(plan_report.show, plan))
        assert "of bucket 8, 33% of the bytes of collectives are sent while the device multiplies" in text
        assert plan_report.plan_json(plan)["overlapped"] == [1 / 3]
    (_, *others) = printed(plan_report.show, predict(question(BLOOM))).split("Roofline")
    assert told not in "".join(others)


def test_a_page_holds_everything(plan):
    told = plan_report.plan_json(plan)
    named = dataclasses.replace(plan, deployment=dataclasses.replace(plan.deployment, name="</script><b>"))
    text = plan_page.page(named, told, [plan_report.collectives(plan)])
    assert "<h1>&lt;/script&gt;&lt;b&gt; (bloom, " in text
    assert "%%" not in text
    assert not re.search(r"(src|href)=", text)
    embedded = re.search(r'<script type="application/json" id="plan">(.*?)</script>', text, re.DOTALL)
    assert embedded is not None
    data = json.loads(embedded[1])
    assert data.pop("tables")[0]["rows"][0][:3] == ["0", "embed", "all-reduce"]
    assert data.pop("lines")[-1] == "pad: vocab"
    assert data == json.loads(json.dumps(told))


def test_layers_with_a_window_are_told_apart():
    plan = predict(question(LLAMA | {"model_type": "qwen2", **WINDOWS}, max_rows=2, max_context=512))
    blocks = plan.groups.blocks(plan.slots // plan.block_size)[1]
    assert f"\n{blocks * plan.block_size:,} slots in layers with a window of 256\n" in printed(plan_report.show, plan)


def test_stages_that_differ_alike_are_told_once():
    before = predict(question(BLOOM | {"n_layer": 8}, tensor=2, stages=4, layers_per_stage=(2, 1, 2, 3)))
    after = dataclasses.replace(before.deployment, engine=dataclasses.replace(before.deployment.engine, slots=4096))
    found = {each.what: each for each in comparison.differences(before, predict(after))}
    assert [what for what in found if what.endswith(": pool")] == [
        "stages 0, 2: pool",
        "stage 1: pool",
        "stage 3: pool",
    ]
    assert found["slots"].theirs == "4,096"
    more = predict(
        dataclasses.replace(before.deployment, engine=dataclasses.replace(before.deployment.engine, max_rows=8))
    )
    assert "stages 1-2: state" in {each.what for each in comparison.differences(before, more)}


def test_another_layout_is_a_difference():
    plans = [predict(question(LLAMA, tensor=tensor)) for tensor in (1, 2)]
    (found,) = (each for each in comparison.differences(*plans) if each.what == "layout")
    assert (found.ours, found.theirs) == ("tensor 1, stages 1", "tensor 2, stages 1")


def test_collectives_are_compared_by_kind():
    before, after = (predict(question(BLOOM, spec, tensor=4)) for spec in (SPEC, WHOLE))
    found = {each.what: each for each in comparison.differences(before, after)}
    told = found["bucket 8: all-reduce"]  # 2 a layer of 128 float32 for 8 tokens, and that of the look-up
    assert (told.ours, told.theirs, told.change) == ("5, 20.00 KiB in all", "4, 16.00 KiB in all", "-20.0%")
    assert (found["bucket 8: all-gather"].ours, found["bucket 8: all-gather"].theirs) == ("1, 16.00 KiB in all", None)
