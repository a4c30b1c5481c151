"""The judge of peers: its targets, its check of outputs, its turns and its environments, with peers made up here."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from jaxserve.bench import environments, judge, peer_gguf, peers
from jaxserve.bench.environments import Peer, PeerError
from jaxserve.bench.progress import Bars
from jaxserve.bench.step import Case

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
    ("case", "dtype", "against", "limit"),
    [
        (DECODE_1, "float32", "llama.cpp", 1.4),
        (DECODE_8, "float32", "llama.cpp", 1.3),
        (PREFILL, "float32", "llama.cpp", 1.0),
        (DECODE_1, "bfloat16", "transformers", 1.4),
        (DECODE_8, "bfloat16", "transformers", 1.15),
        (MIXED, "bfloat16", "llama.cpp", 1.0),
    ],
)
def test_targets(case, dtype, against, limit):
    found = judge.judge(case, dtype, {"jaxserve": 60.0, "transformers": 80.0, "llama.cpp": 50.0})
    assert found is not None
    assert (found.against, found.limit) == (against, limit)
    assert found.ratio == 60.0 / found.theirs
    assert found.reached == (found.ratio <= limit)


def test_nothing_is_judged_without_both_sides():
    assert judge.judge(DECODE_8, "float32", {"jaxserve": None, "transformers": 1.0}) is None
    assert judge.judge(DECODE_8, "float32", {"jaxserve": 1.0, "transformers": None}) is None
    assert judge.judge(DECODE_8, "bfloat16", {"jaxserve": 1.0, "llama.cpp": 1.0}) is None


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
    found = judge.agreement(OURS, [{"logprobs": logprobs, "likeliest": likeliest}], "float32")
    assert found.largest == pytest.approx(largest)
    assert found.mismatches == mismatches
    assert found.holds == (largest <= 0.01 and mismatches == 0)


def contender(engine: str, turns: list[str], milliseconds, **answer) -> peers.Contender:
    def run(job):
        turns.append(engine)
        if milliseconds is None:
            raise PeerError(f"{engine} fell over")
        return {"milliseconds": [milliseconds] * len(job["cases"]), "peak_rss": 100, **answer}

    return peers.Contender(engine=engine, dtype="float32", model=Path("model"), run=run)


def test_contenders_take_turns_and_one_that_fails_stops_nobody():
    turns: list[str] = []
    problems: list[str] = []
    with Bars() as bars:
        found = peers._measure(
            [
                contender("jaxserve", turns, [1.0, 2.0, 9.0], weights=10, pool=20),
                contender("broken", turns, None),
                contender("llama.cpp", turns, [4.0, 4.0, 4.0]),
            ],
            [DECODE_8],
            3,
            2,
            problems,
            bars,
        )
    assert turns == ["jaxserve", "broken", "llama.cpp"] * 2
    assert problems == ["broken fell over"] * 2
    assert found["jaxserve float32"].rounds == {DECODE_8: [2.0, 2.0]}
    assert found["jaxserve float32"].allowed_rss == 30 + peers.MEMORY_MARGIN
    assert found["broken float32"].median(DECODE_8) is None
    assert found["llama.cpp float32"].median(DECODE_8) == 4.0


def test_the_table_says_what_was_reached(capsys):
    group = [contender("jaxserve", [], []), contender("llama.cpp", [], [])]
    figures = {
        "jaxserve float32": peers.Figures(rounds={DECODE_8: [5.0], PREFILL: [3.0]}, peak_rss=2**20, allowed_rss=2**21),
        "llama.cpp float32": peers.Figures(rounds={DECODE_8: [4.0], PREFILL: [2.0]}, peak_rss=2**20),
    }
    verdicts = peers._print(Console(width=160), Path("bloom"), group, figures, [DECODE_8, PREFILL])
    assert [verdict["reached"] for verdict in verdicts] == [True, False]
    told = capsys.readouterr().out
    assert "1.25x" in told
    assert "missed" in told


def test_an_environment_is_made_once(tmp_path, monkeypatch):
    commands = []

    def fake(command, **settings):
        commands.append((command, settings["env"]["CMAKE_ARGS"]))
        Path(tmp_path / "made" / "x" / "bin").mkdir(parents=True, exist_ok=True)
        Path(tmp_path / "made" / "x" / "bin" / "python").touch()
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(environments.subprocess, "run", fake)
    peer = Peer(name="x", requirements=("y==1",), script="z.py", build={"CMAKE_ARGS": "-DA=B"})
    for _ in range(2):
        python = environments.ensure(peer, tmp_path / "made", lambda line: None)
    assert python == tmp_path / "made" / "x" / "bin" / "python"
    assert [command[1:3] for command, _ in commands] == [["-m", "venv"], ["-m", "pip"]]
    assert {flags for _, flags in commands} == {"-DA=B"}
    newer = Peer(name="x", requirements=("y==2",), script="z.py", build={"CMAKE_ARGS": ""})
    environments.ensure(newer, tmp_path / "made", lambda line: None)
    assert commands[-1][0][-1] == "y==2"
    assert len(commands) == 3


def test_a_failed_installation_is_told_with_its_log(tmp_path, monkeypatch):
    def fake(command, *, stdout, **settings):
        stdout.write("no compiler found\n")
        stdout.flush()
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr(environments.subprocess, "run", fake)
    with pytest.raises(PeerError, match=r"(?s)environment of x cannot be made.*x\.log.*no compiler found"):
        environments.ensure(Peer(name="x", requirements=(), script="z.py"), tmp_path, lambda line: None)
    assert not (tmp_path / "x" / "installed.json").exists()


BROKEN = "import sys; print('bad things', file=sys.stderr); sys.exit(3)"


def test_a_failed_run_is_told_with_what_it_said():
    with pytest.raises(PeerError, match=r"(?s)x ended with code 3:\nbad things"):
        environments.run_command([sys.executable, "-c", BROKEN], "x")
    assert environments.run_command([sys.executable, "-c", "print(1); print('{}')"], "x") == "{}"


def test_gguf_names_and_the_order_of_qkv():
    assert peer_gguf.rename("transformer.h.3.mlp.dense_4h_to_h.bias", peer_gguf.BLOOM_TOP, peer_gguf.BLOOM_LAYER) == (
        "blk.3.ffn_down.bias"
    )
    assert peer_gguf.rename("word_embeddings.weight", peer_gguf.BLOOM_TOP, peer_gguf.BLOOM_LAYER) == "token_embd.weight"
    assert peer_gguf.rename("lm_head.weight", peer_gguf.GPT2_TOP, peer_gguf.GPT2_LAYER) is None
    assert peer_gguf.rename("h.0.attn.bias", peer_gguf.GPT2_TOP, peer_gguf.GPT2_LAYER) is None
    fused = np.arange(2 * 3 * 2).reshape(12, 1)  # two heads of size two: q0 q0 k0 k0 v0 v0 q1 ...
    assert peer_gguf.part_qkv(fused, 2)[:, 0].tolist() == [0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11]


def test_every_peer_has_its_files():
    for peer in environments.PEERS.values():
        for script in filter(None, (peer.script, peer.converter)):
            assert Path(environments.__file__).with_name(script).exists()
        json.dumps(peer.requirements)
