"""`jaxserve plan` from the command line."""

from __future__ import annotations

import json
import re

import pytest

from server.commands import cli

ASKED = [
    "plan",
    "--model",
    "bloom-560m",
    "--topology",
    "h200:8",
    "--tensor",
    "4",
    "--buckets",
    "8,64",
    "--max-rows",
    "8",
]


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")


@pytest.fixture
def whole(tmp_path):
    path = tmp_path / "whole.toml"
    path.write_text('[axes]\nvocab = "none"\n')
    return path


def test_a_plan_is_printed(capsys):
    assert cli.main(ASKED) == 0
    text = capsys.readouterr().out
    assert text.startswith("bloom-560m (bloom, 0.559 G parameters, bfloat16) on h200:8 (8 devices): tensor 4, stages 1")
    assert "embed.tokens.table" in text


def test_a_plan_is_json_and_a_page(capsys, tmp_path, whole):
    assert cli.main([*ASKED, "--json", "--sharding", str(whole), "--html", str(tmp_path / "page.html")]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["spec"]["axes"]["vocab"] is None
    assert [bucket["tokens"] for bucket in told["buckets"]] == [8, 64]
    assert (tmp_path / "page.html").is_file()


def test_two_specs_are_compared(capsys, whole):
    assert cli.main([*ASKED, "--against", str(whole)]) == 0
    text = capsys.readouterr().out
    assert "whole.toml against default, differences only" in text
    assert "layers.*.up.kernel" not in text
    assert cli.main([*ASKED, "--sharding", str(whole), "--against", "default", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {"what": "[axes] vocab", "ours": "none", "theirs": "tensor"} in told["against"]


def test_an_impossible_spec_is_named_and_the_other_is_planned(capsys, tmp_path):
    spec = tmp_path / "padded.toml"
    spec.write_text("[pad]\nheads = true\nffn = true\n")
    asked = [*ASKED[:3], "--topology", "h200:8", "--tensor", "6", "--buckets", "8"]
    assert cli.main([*asked, "--against", str(spec)]) == 0
    told = capsys.readouterr()
    assert "default is not possible: layers.0.down.kernel: axis 'ffn' of size 4096 does not divide" in told.err
    assert "padded.toml is compared with nothing" in told.err
    assert "heads 16 padded to 18" in told.out
    assert cli.main([*asked, "--sharding", str(spec), "--against", "default"]) == 2
    assert "default is not possible: layers.0.down.kernel" in capsys.readouterr().err


def test_a_mesh_of_several_axes_is_planned_and_compared(capsys, tmp_path):
    spec = tmp_path / "square.toml"
    spec.write_text('[mesh]\nx = 2\ny = 4\n[axes]\nvocab = ["x", "y"]\nffn = ["x", "y"]\nheads = "x"\n')
    assert cli.main([*ASKED[:5], "--mesh", "x=2,y=4", "--buckets", "8", "--sharding", str(spec)]) == 0
    text = capsys.readouterr().out
    assert "x 2 x y 4, stages 1" in text
    assert "2 (x) " in text
    assert "8 (x*y) " in text
    assert cli.main([*ASKED, "--against", str(spec)]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["[axes]", "heads", "tensor", "x"] in rows
    assert cli.main([*ASKED, "--mesh", "tensor=2"]) == 2
    assert "tensor is 4, but the mesh is tensor=2; give one of the two" in capsys.readouterr().err


def test_unknown_collectives_have_no_rate(capsys, tmp_path):
    spec = tmp_path / "tokens.toml"
    spec.write_text('[activations]\ntokens = "tensor"\n')
    assert cli.main([*ASKED, "--against", str(spec)]) == 0
    rates = [line for line in capsys.readouterr().out.splitlines() if "tokens/s" in line]
    assert rates
    assert all(line.endswith("unknown") and "%" not in line for line in map(str.rstrip, rates))
    assert cli.main(["simulate", "--rate", "5", *ASKED[1:], "--sharding", str(spec)]) == 2
    assert "the speed of this sharding is unknown" in capsys.readouterr().err


@pytest.mark.long
def test_a_plan_is_compiled_for_cpus(capsys, tmp_path):
    """Without the compiler of the topology, collectives that no plan predicts are known."""
    (tmp_path / "config.json").write_text(
        '{"model_type": "gpt2", "n_layer": 1, "n_embd": 64, "n_head": 16, "vocab_size": 512, "n_positions": 64}'
    )
    spec = tmp_path / "tokens.toml"
    spec.write_text('[activations]\ntokens = "tensor"\n')
    asked = ["plan", "--model", str(tmp_path), "--topology", "v5e:2x2", "--tensor", "4", "--slots", "1024"]
    assert cli.main([*asked, "--buckets", "8", "--sharding", str(spec), "--compile", "cpu"]) == 0
    text = capsys.readouterr().out
    assert "Compiled for CPUs, bucket 8" in text
    assert re.search(r"all-gather +unknown +[1-9]", text)
    assert "attention" in text
    assert cli.main([*asked[:5], "--tensor", "16", "--topology", "v5e:4x4", "--compile", "cpu", "--json"]) == 2
    assert "jax has started with 8 CPU devices, and 16 are needed" in capsys.readouterr().err


def test_a_search_is_printed_and_drawn(capsys, tmp_path):
    plot = tmp_path / "frontier.svg"
    assert cli.main([*ASKED[:3], "--topology", "h200:2", "--buckets", "8", "--search", "--plot", str(plot)]) == 0
    told = capsys.readouterr()
    assert "The frontier" in told.out
    assert re.search(r"planned [1-9]\d* layouts in \d+\.\d s\n", told.err)
    assert plot.read_text().startswith("<?xml")
    assert cli.main([*ASKED[:3], "--topology", "h200:2", "--search", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["candidates"][0]["tokens_per_second"] > 0


def test_a_search_of_one_layout_has_no_empty_parts(capsys):
    assert cli.main([*ASKED[:3], "--topology", "h200:1", "--buckets", "8", "--search"]) == 0
    told = capsys.readouterr().out
    assert "h200:1: 1 way fits" in told
    assert "\n\n\n" not in told


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (["--model", "bloom-561m"], "did you mean bloom-560m?"),
        (["--topology", "h20:8"], "device 'h20' is not known; did you mean h200?"),
        (["--tensor", "16"], "tensor 16 x stages 1 are 16 devices; h200:8 has 8"),
        (["--tensor", "3"], "does not divide over mesh axis 'tensor' of size 3"),
        (["--sharding", "nowhere.toml"], "nowhere.toml cannot be read"),
        (["--plot", "x.png"], "--plot draws the result of --search"),
        (["--search", "--against", "default"], "leave out --against"),
        (["--search", "--compile", "cpu"], "leave out --compile"),
        (["--search", "--html", "x.html"], "leave out --html"),
        (["--replicas", "0"], "replicas is 0; it must be a whole number of at least 1"),
        (["--context", "0"], "--context is 0; it must be at least 1"),
        (["--stages", "25", "--tensor", "1", "--topology", "v5p:4x4x4"], "at most 24, the number of layers"),
    ],
)
def test_mistakes(capsys, changed, message):
    assert cli.main([*ASKED, *changed]) == 2
    assert message in capsys.readouterr().err
