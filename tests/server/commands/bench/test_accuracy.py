"""The accuracy benchmark on a passage, with bounds that a wrong scale or axis would break."""

import json

import jax
import numpy as np
import pytest

from jaxserve.demo import DEMO_MODEL
from jaxserve.text.tokenizer import Tokenizer
from server.commands import cli
from server.commands.bench import accuracy
from server.commands.bench.accuracy import GENERATED, Answers
from tests.examples.test_train_demo import HELD_OUT


@pytest.mark.bench
def test_fewer_bits_change_little(tmp_path, capsys):
    text = tmp_path / "text"
    text.write_text(2 * HELD_OUT, encoding="utf-8")
    command = ["accuracy", "--quick", "--text", str(text), "--out", str(tmp_path), "--max-rows", "4", "--buckets", "64"]
    command += ["--compilation-cache", str(jax.config.jax_compilation_cache_dir)]
    assert cli.main(["bench", *command]) == 0
    assert "wholly equal" in capsys.readouterr().out
    rows = {row["name"]: row for row in json.loads((tmp_path / "accuracy.json").read_text())["rows"]}
    assert set(rows) == set(accuracy.VARIANTS)
    full = rows["full width"]
    assert (full["moved"], full["agreement"], full["equal"]) == (0, 1, 1)
    fewer = {"float8 weights": (0.03, 0.1, 0.2), "int4 weights": (0.05, 0.25, 0.02)}
    for name in rows.keys() - {"full width"}:
        perplexity, moved, agreement = fewer.get(name, (0.02, 0.03, 0.5))
        assert rows[name]["perplexity"] == pytest.approx(full["perplexity"], rel=perplexity)
        assert 0 < rows[name]["moved"] < moved
        assert rows[name]["agreement"] > agreement
    assert rows["int8 keys and values"]["slot_bytes"] == full["slot_bytes"] * (32 + 4) / (4 * 32)  # heads of 32


def test_a_text_too_short_is_refused(tmp_path, capsys):
    (tmp_path / "text").write_text("It is a truth")
    assert cli.main(["bench", "accuracy", "--text", str(tmp_path / "text")]) == 2
    assert "the text has 4 tokens; at least 512 are needed" in capsys.readouterr().err


def test_agreement_counts_tokens_before_the_first_that_differs():
    def answers(losses, *continuations):
        return Answers(losses=np.array(losses), continuations=list(continuations), dtype="float32", memory=(8, 2.0))

    same = tuple(range(GENERATED))
    late, early = (*same[:-16], *[0] * 16), (99, *same[1:])
    _, row = accuracy.compare({"a": answers([1.0, 2.0], same, same), "b": answers([1.5, 1.5], late, early)})
    assert row.perplexity == pytest.approx(np.exp(1.5))
    assert (row.moved, row.agreement, row.equal) == (0.5, (GENERATED - 16) / (2 * GENERATED), 0)
    _, row = accuracy.compare({"a": answers([1.0], same), "b": answers([1.0], same)})
    assert (row.agreement, row.equal) == (1, 1)


def test_default_text_is_the_held_out_chapters():
    """Its size is the one that the demo model's card names, less the end of each chapter."""
    documents = accuracy._documents(accuracy._HELD_OUT)
    tokenizer = Tokenizer.from_directory(DEMO_MODEL)
    assert tokenizer is not None
    assert HELD_OUT.splitlines()[0] in "".join(documents)
    assert sum(len(tokenizer.encode(document)) for document in documents) + len(documents) == 41_936
