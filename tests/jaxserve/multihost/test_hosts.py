"""Real groups: processes that each have a device of their own, one jax job, and the answers of a single process."""

import json
import os
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import models, weights
from jaxserve.engine import Engine
from jaxserve.multihost import flight_recorder, flight_replay
from jaxserve.request import FinishReason
from jaxserve.startup import silent
from server.commands import cli
from tests.fixtures.texts import check_texts, constrained, printable_tokenizer
from tests.fixtures.traffic import Answers, traffic
from tests.jaxserve.multihost.processes import group, make_certificates
from tests.jaxserve.multihost.real_host import ABORTED, CONSTRAINED, REQUESTS, as_json, config_of, requests, run

pytestmark = pytest.mark.processes

REAL = "tests.jaxserve.multihost.real_host"
MODEL = {
    "model_type": "bloom",
    "vocab_size": 104,
    "hidden_size": 32,
    "n_layer": 3,
    "n_head": 4,
    "eos_token_id": 2,
}
FIRST = "transformer.h.0.mlp.dense_h_to_4h.weight"  # a tensor of the first stage
Outcome = dict[str, Any]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """Random weights, large enough that the model prefers some tokens to others."""
    config = models.parse_config(MODEL)
    tree = models.build(config).init(0, jnp.float32)
    path = tmp_path_factory.mktemp("model")
    weights.write_hf(path, config, jax.tree.map(lambda leaf: leaf * 4 if leaf.ndim > 1 else leaf, tree))
    (path / "tokenizer.json").write_text(printable_tokenizer().to_json())
    return path


@pytest.fixture(scope="module")
def alone(model) -> Outcome:
    """What one process answers."""
    engine = Engine.from_checkpoint(model, config_of({}))
    return as_json(run(engine, requests()))


@pytest.fixture(scope="module")
def serve(model, tmp_path_factory):
    """Runs a group of so many hosts, once for all tests that ask for the same."""

    @cache
    def start(hosts: int, tensor: int, stages: int, links: str, told: str = "{}") -> Outcome:
        folder = tmp_path_factory.mktemp("hosts")
        each = {"model": str(model), "tensor": tensor, "stages": stages, "links": links} | json.loads(told)
        devices = each.get("devices", tensor * stages * each.get("replicas", 1) // hosts)
        flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}"
        with group(REAL, [each] * hosts, folder, JAX_PLATFORMS="cpu", XLA_FLAGS=flags) as running:
            outcome = running[0].until(lambda line: "answers" in line)
            outcome["steps"] = [
                [line["told"] for line in host.lines + host.rest() if "told" in line] for host in running
            ]
            assert [host.code() for host in running] == [0] * hosts
        return outcome

    return start


def check_same(outcome: Outcome, alone: Outcome) -> None:
    assert outcome["preemptions"] > 0
    assert outcome["cached"] > 0
    reasons = outcome["answers"]["reasons"]
    assert all(reasons[name] in ("aborted", alone["reasons"][name]) for name in ABORTED)
    check_answers(outcome, alone)


def check_answers(outcome: Outcome, alone: Outcome) -> None:
    answers = outcome["answers"]
    assert outcome["compiled"] == 0
    assert outcome["used"] == 0
    different = []
    for name, expected in alone["tokens"].items():
        found = answers["tokens"][name]
        if name in ABORTED:  # as many as there was time for
            count = min(len(expected), len(found))
            expected, found = expected[:count], found[:count]
        if found != expected:
            different.append(name)
        same = next((i for i, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b), len(expected))
        np.testing.assert_allclose(answers["logprobs"][name][:same], alone["logprobs"][name][:same], atol=1e-4)
        if name not in ABORTED:
            np.testing.assert_allclose(answers["prompt_logprobs"][name], alone["prompt_logprobs"][name], atol=1e-4)
    assert len(different) <= REQUESTS // 40  # a draw or a choice within a hair of the next


def test_two_hosts_a_stage_each(serve, alone) -> None:
    outcome = serve(2, 1, 2, "direct")
    check_same(outcome, alone)
    assert "host 0: links between hosts: direct (probed)" in outcome["steps"][0]


def test_four_hosts_two_for_each_stage(serve, alone) -> None:
    outcome = serve(4, 2, 2, "bridge")
    check_same(outcome, alone)
    assert "host 0: links between hosts: bridge (asked for)" in outcome["steps"][0]


@pytest.mark.parametrize("layout", [(2, 1, 2, "direct"), (4, 2, 2, "bridge")])
def test_texts_are_held_to_their_grammars(serve, layout) -> None:
    given, answers = serve(*layout)["answers"], Answers()
    answers.tokens = given["tokens"]
    answers.reasons = {name: FinishReason(reason) for name, reason in given["reasons"].items()}
    check_texts(answers, constrained(CONSTRAINED, traffic(REQUESTS)[-1][0]))


def test_a_byte_that_differs_on_one_host_ends_the_start(model, tmp_path) -> None:
    """The last byte of a tensor, of which the fingerprint knows the beginning only, and which host 0 alone uses."""
    shutil.copytree(model, tmp_path / "copy")
    file = tmp_path / "copy" / "model.safetensors"
    content = bytearray(file.read_bytes())
    start, end = json.loads(content[8 : 8 + content[0] + 256 * content[1]])[FIRST]["data_offsets"]
    assert end - start > 8192
    content[8 + content[0] + 256 * content[1] + end - 1] ^= 1
    file.write_bytes(content)
    assert weights.fingerprint(tmp_path / "copy") == weights.fingerprint(model)
    each = {"tensor": 1, "stages": 2}
    hosts = [each | {"model": str(model)}, each | {"model": str(tmp_path / "copy")}]
    with group(REAL, hosts, tmp_path, JAX_PLATFORMS="cpu") as running:
        assert all(host.code() for host in running)
        for host in running:
            assert "host 1: its weight files have other bytes than those of host 0" in host.errors.read_text()


@pytest.mark.parametrize(("hosts", "tensor", "stages"), [(3, 1, 3), (4, 2, 2)])
def test_three_and_four_hosts_choose_their_links(serve, alone, hosts, tensor, stages) -> None:
    outcome = serve(hosts, tensor, stages, "auto")
    check_same(outcome, alone)
    assert "host 0: links between hosts: direct (probed)" in outcome["steps"][0]


@pytest.mark.parametrize(
    ("hosts", "tensor", "stages", "replicas", "links"),
    [
        (2, 2, 1, 2, "none"),  # a replica a host
        (2, 1, 2, 3, "direct (probed)"),  # on host 0, on both, on host 1
        pytest.param(
            *(3, 1, 3, 2, "bridge (replicas 0 and 1 both link stages of host 1 to other hosts)"),
            marks=pytest.mark.weekly,
        ),
        (4, 2, 1, 2, "none"),  # on two hosts each, of which host 0 is one or none
    ],
)
def test_replicas_answer_as_one_process(serve, alone, model, hosts, tensor, stages, replicas, links) -> None:
    outcome = serve(hosts, tensor, stages, "auto", json.dumps({"replicas": replicas}))
    check_answers(outcome, alone)
    assert len(outcome["iterations"]) == replicas
    assert all(count > 20 for count in outcome["iterations"])
    told = [line.partition("links between hosts: ")[2] for line in outcome["steps"][0] if "links between" in line]
    assert told[:1] == ([] if links == "none" else [links])
    named = [Path(record).stem.rpartition("-replica-")[2] for record in outcome["records"]]
    assert named == [str(index) for index in range(replicas)]
    recording = flight_recorder.read(Path(outcome["records"][-1]))
    assert recording.replica == replicas - 1
    found = flight_replay.replay(recording, model, cache=None, progress=silent)
    assert found.iterations == len(recording.entries) == outcome["iterations"][-1]
    assert len(found.differences) <= REQUESTS // 40


def test_every_step_of_every_host_is_told(serve) -> None:
    steps = serve(2, 1, 2, "direct")["steps"][0]
    for line in ("host 1: joined", "host 1: reading weights", "host 1: linking stages", "host 1: ready"):
        assert line in steps
    assert steps.index("host 1: joined") < steps.index("host 1: ready")


def test_a_host_reads_its_own_part_of_the_weights(serve, model) -> None:
    """Stages and slices: together the hosts read the file once, but for what two stages or two slices share."""
    total = (model / "model.safetensors").stat().st_size / 2**20
    outcome = serve(4, 2, 2, "bridge")
    told = [line for line in outcome["steps"][0] if "MiB of weights read" in line]
    read = [float(line.split(": ")[1].split(" of ")[0]) for line in told]
    assert len(read) == 4
    assert all(part < 0.6 * total for part in read)
    assert sum(read) < 1.5 * total


@pytest.mark.parametrize(("hosts", "stages", "links"), [(2, 2, "direct"), (4, 2, "bridge")])
def test_a_flight_record_runs_again_on_one_device(serve, model, hosts, stages, links, capfd) -> None:
    outcome = serve(hosts, hosts // stages, stages, links)
    recording = flight_recorder.read(Path(outcome["records"][0]))
    found = flight_replay.replay(recording, model, cache=None, progress=silent)
    assert found.iterations == len(recording.entries) > 100
    assert found.unanswered == 0
    assert found.requests >= REQUESTS - len(ABORTED)
    assert len(found.differences) <= REQUESTS // 40
    # One token of the record is changed: it is found, and named.
    entry = next(entry for entry in recording.entries if 1 in entry.plan.chunks.samples)
    at = list(entry.plan.chunks.samples).index(1)
    entry.tokens[at] = (entry.tokens[at] + 1) % MODEL["vocab_size"]
    changed = Path(outcome["records"][0]).with_name("changed.flight")
    changed.write_bytes(recording.SerializeToString())
    assert cli.main(["replay", str(changed), "--model", str(model), "--compilation-cache", "off"]) == 1
    assert f"iteration {entry.plan.sequence}, request " in capfd.readouterr().err


@pytest.mark.parametrize(("part", "slots"), [("rows", 192), ("slots", 96)])
def test_a_record_of_a_pool_in_parts_runs_again_on_one_device(serve, alone, model, tmp_path, part, slots) -> None:
    file = tmp_path / "parts.toml"
    file.write_text(f'mesh.context = 2\npool.{part} = "context"\n')
    outcome = serve(2, 1, 1, "auto", json.dumps({"sharding": str(file), "devices": 1, "slots": slots}))
    check_answers(outcome, alone)
    recording = flight_recorder.read(Path(outcome["records"][0]))
    found = flight_replay.replay(recording, model, cache=None, progress=silent)
    assert found.iterations == len(recording.entries) > 100
    assert found.requests >= REQUESTS - len(ABORTED)
    assert len(found.differences) <= REQUESTS // 40


def test_a_record_that_begins_in_the_middle_runs_again(serve, model) -> None:
    outcome = serve(2, 1, 2, "direct")
    recording = flight_recorder.read(Path(outcome["records"][0]))
    about = type(recording)()
    about.CopyFrom(recording)
    del about.entries[:], about.rows[:]
    clock = iter(range(10**6))
    late = flight_recorder.FlightRecorder(about, 4, seconds=60.0, folder=Path(), clock=lambda: float(next(clock)))
    for entry in recording.entries:  # a second apart: the last minute's remain
        late.launched(entry.plan)
        tokens, logprobs = np.array(entry.tokens, np.int32), np.array(entry.logprobs, np.float32)
        late.landed(flight_replay.IterationResult(tokens=tokens, logprobs=logprobs))
    cut = late.recording("the last minute")
    assert 50 < len(cut.entries) < len(recording.entries)
    assert cut.rows
    found = flight_replay.replay(cut, model, cache=None, progress=silent)
    assert found.tokens > 50
    assert not found.differences


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("hosts", "tensor", "stages", "links"),
    [
        (2, 2, 1, "auto"),
        (2, 1, 2, "direct"),
        (2, 1, 2, "bridge"),
        (3, 1, 3, "bridge"),
        (4, 2, 2, "bridge"),
    ],
)
def test_every_layout_answers_as_one_process(serve, alone, hosts, tensor, stages, links) -> None:
    outcome = serve(hosts, tensor, stages, links)
    check_same(outcome, alone)


@pytest.mark.exhaustive
def test_drafts_travel_with_the_plan(serve, alone) -> None:
    outcome = serve(2, 1, 2, "auto", json.dumps({"speculate": "ngram"}))
    check_same(outcome, alone)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make certificates")
@pytest.mark.exhaustive
def test_hosts_that_show_each_other_certificates(serve, alone, tmp_path) -> None:
    make_certificates(tmp_path)
    outcome = serve(2, 2, 1, "auto", json.dumps({"secrets": str(tmp_path)}))
    check_same(outcome, alone)
