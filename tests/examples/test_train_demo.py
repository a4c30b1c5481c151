"""The demo model as shipped, and the script that makes it."""

import itertools
import json
import math
import re
import struct
import zlib
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer

from examples.train_demo import corpus, evaluate, train
from examples.train_demo.baselines import KneserNey
from examples.train_demo.sequences import mean_loss, next_token_losses, sample
from jaxserve.demo import DEMO_MODEL
from jaxserve.models import build
from jaxserve.weights import load, read_config

# The opening of Pride and Prejudice, whose first chapter is held out.
HELD_OUT = """It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in \
want of a wife.
However little known the feelings or views of such a man may be on his first entering a neighbourhood, this truth is \
so well fixed in the minds of the surrounding families, that he is considered the rightful property of some one or \
other of their daughters.
"My dear Mr. Bennet," said his lady to him one day, "have you heard that Netherfield Park is let at last?"
Mr. Bennet replied that he had not.
"But it is," returned she; "for Mrs. Long has just been here, and she told me all about it."
Mr. Bennet made no answer.
"Do you not want to know who has taken it?" cried his wife impatiently.
"You want to tell me, and I have no objection to hearing it."
This was invitation enough.
"Why, my dear, you must know, Mrs. Long says that Netherfield is taken by a young man of large fortune from the north \
of England; that he came down on Monday in a chaise and four to see the place, and was so much delighted with it, that \
he agreed with Mr. Morris immediately; that he is to take possession before Michaelmas, and some of his servants are \
to be in the house by the end of next week."
"""


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))


@pytest.fixture(scope="module")
def demo():
    model = build(read_config(DEMO_MODEL))
    return model, load(DEMO_MODEL, model, jnp.dtype(jnp.float32))


def card_figures():
    """(predictor -> (perplexity per token, per word), share of words that are words)"""
    text = (DEMO_MODEL / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([\w -]+) \| ([\d.]+) \| ([\d.]+) \|$", text, re.MULTILINE)
    share = re.search(r"^([\d.]+)% of the words it generates are words", text, re.MULTILINE)
    assert share
    return {name: (float(token), float(word)) for name, token, word in rows}, float(share[1]) / 100


def test_the_model_is_small_enough_for_the_wheel():
    sizes = {name: (DEMO_MODEL / name).stat().st_size for name in train.FILES}
    assert sum(sizes.values()) < 12e6, sizes


def test_the_config_and_the_tokenizer_agree(tokenizer):
    config = read_config(DEMO_MODEL)
    entries = json.loads((DEMO_MODEL / "config.json").read_text())
    end = tokenizer.token_to_id("</s>")
    assert config.vocab_size == tokenizer.get_vocab_size()
    assert config.eos_token_ids == (end,)
    assert entries["bos_token_id"] == entries["eos_token_id"] == entries["pad_token_id"] == end
    assert config.num_heads == 6  # no power of two: ALiBi's second rule is in use


@pytest.mark.parametrize("text", [HELD_OUT, "naïve £20,000 — 日本 🙂\n\n  two", "</s", ""])
def test_the_tokenizer_gives_back_what_it_got(tokenizer, text):
    tokens = tokenizer.encode(text).ids
    assert tokenizer.decode(tokens) == text
    assert tokenizer.token_to_id("</s>") not in tokens


def test_the_card_states_what_was_promised():
    perplexity, words = card_figures()
    assert set(perplexity) == {"unigram", "trigram", "5-gram", "this model"}
    for column in (0, 1):
        assert perplexity["this model"][column] < 0.8 * perplexity["trigram"][column]
        assert perplexity["this model"][column] < perplexity["5-gram"][column] < perplexity["unigram"][column]
    assert words >= 0.95


def test_held_out_text_is_predicted_better_than_a_trigram_does(demo, tokenizer):
    model, params = demo
    tokens = np.array([tokenizer.token_to_id("</s>"), *tokenizer.encode(HELD_OUT).ids], np.int32)
    perplexity, _ = card_figures()
    assert math.exp(mean_loss(model, params, tokens)) < perplexity["trigram"][0]


def test_a_cold_sample_depends_on_its_own_prompt_alone(demo, tokenizer):
    """Close to temperature zero neither the seed nor the other rows matter."""
    model, params = demo
    prompts = [tokenizer.encode(text).ids for text in ("It is a truth", "Mr. Darcy said that he")]
    together = sample(model, params, prompts, count=6, temperature=1e-4, seed=0)
    assert together == [sample(model, params, [p], count=6, temperature=1e-4, seed=1)[0] for p in prompts]


@pytest.fixture(scope="module")
def documents():
    """Six short documents of nonsense with paragraphs as long as the prompts need."""
    rng = np.random.default_rng(0)
    words = ["the", "lady", "said", "that", "he", "was", "glad", "to", "see", "her", "in", "Bath", "with", "Emma"]
    return ["\n".join(" ".join(rng.choice(words, 120)) for _ in range(4)) for _ in range(6)]


RECIPE = train.Recipe(
    vocab_size=300, hidden_size=24, num_layers=1, num_heads=3, sequence=16, batch=2, steps=3, warmup=1
)


def test_mean_loss_is_the_mean_over_overlapping_windows():
    model = build(train.parse_config(train.model_entries(RECIPE, train.train_tokenizer([], 257))))
    params = train.initial_params(model, 0)
    losses = jax.jit(partial(next_token_losses, model))
    stream = np.random.default_rng(0).integers(0, 4, 21).astype(np.int32)
    whole = losses(params, stream[None])
    assert mean_loss(model, params, stream, window=64) == pytest.approx(float(whole.mean()), rel=1e-5)
    rows = losses(params, np.stack([stream[start : start + 9] for start in (0, 4, 8, 12)]))
    halves = np.concatenate([rows[0], rows[1:, 4:].reshape(-1)])
    assert mean_loss(model, params, stream, window=8) == pytest.approx(float(halves.mean()), rel=1e-5)


@pytest.fixture(scope="module")
def made(documents, tmp_path_factory):
    """The directory that the script writes for the little recipe."""
    path = tmp_path_factory.mktemp("made")
    train.make(RECIPE, documents, frozenset(["the", "lady"]), path, None)
    return path


@pytest.mark.bench
def test_the_script_writes_a_model_that_loads(made):
    assert sorted(path.name for path in made.iterdir()) == sorted(train.FILES)
    model = build(read_config(made))
    params = load(made, model, jnp.dtype(jnp.float32))
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(params))
    assert "| this model |" in (made / "README.md").read_text()


@pytest.mark.bench
def test_a_run_that_was_stopped_gives_the_same_files(made, documents, tmp_path, monkeypatch, capsys):
    checkpoint, words = tmp_path / "run.npz", frozenset(["the", "lady"])
    all_batches = train.batches

    def two_batches(*arguments):
        yield from itertools.islice(all_batches(*arguments), 2)
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "SAVE_EVERY", 1)
    with monkeypatch.context() as patch:
        patch.setattr(train, "batches", two_batches)
        with pytest.raises(KeyboardInterrupt):
            train.make(RECIPE, documents, words, tmp_path / "out", checkpoint)
    assert "step 2/3  loss" in capsys.readouterr().err
    train.make(RECIPE, documents, words, tmp_path / "out", checkpoint)
    assert "step 1/3" not in capsys.readouterr().err
    for name in train.FILES:
        assert (made / name).read_bytes() == (tmp_path / "out" / name).read_bytes(), name
    with pytest.raises(ValueError, match="other settings or text"):
        train.make(RECIPE, documents[1:], words, tmp_path / "out", checkpoint)


def test_a_text_too_short_is_refused(tmp_path):
    with pytest.raises(corpus.CorpusError, match="at least 4"):
        corpus.split(["one", "two"])
    stream = np.zeros(40, np.int32)
    with pytest.raises(corpus.CorpusError, match="the training text has 40 tokens"):
        next(train.batches(stream, RECIPE, 0))
    with pytest.raises(corpus.CorpusError, match=r"missing\.txt cannot be read"):
        corpus.read_documents(tmp_path / "missing.txt")


def test_the_split_holds_contiguous_chapters_out():
    parts = corpus.split([str(i) for i in range(100)])
    assert parts.validation == ["36", "76"]
    assert parts.test == ["37", "38", "77", "78"]
    assert len(parts.train) == 94
    assert corpus.split(list("abcd")) == corpus.Split(train=["a"], validation=["b"], test=["c", "d"])


def test_a_text_file_is_read_by_form_feeds(tmp_path):
    (tmp_path / "corpus.txt").write_text("one\ntwo\n\f\nthree\n\f\n", encoding="utf-8")
    assert corpus.read_documents(tmp_path / "corpus.txt") == ["one\ntwo", "three"]


def test_chapters_are_taken_out_of_a_novels_lines():
    novel = ["TITLE", "", "CHAPTER I", "", "One _two_", "three.", "", "* * *", "Four.", "Chapter 2", "Five.", ""]
    found = corpus.chapters([*novel, "FINIS", "", "A NOTE ON THE TEXT", "Six."])
    assert found == ["One two three.\nFour.", "Five."]


def r_record(lines, kind=16):
    """A character vector as R stores it, version 3."""
    strings = b"".join(struct.pack(">2i", 9, len(s.encode())) + s.encode() for s in lines)
    record = b"X\n" + struct.pack(">4i", 3, 0, 0, 5) + b"UTF-8" + struct.pack(">2i", kind, len(lines)) + strings
    return struct.pack(">i", len(record)) + zlib.compress(record)


def test_r_character_vectors_are_read():
    assert corpus.read_character_vectors(r_record(["a", "", "é"]) + r_record(["b"])) == [["a", "", "é"], ["b"]]
    with pytest.raises(corpus.CorpusError, match="something else"):
        corpus.read_character_vectors(r_record(["a"], kind=19))
    with pytest.raises(corpus.CorpusError, match="damaged"):
        corpus.read_character_vectors(r_record(["a"])[:-8])


def test_a_missing_package_tool_is_named(monkeypatch):
    monkeypatch.setattr(corpus.shutil, "which", lambda name: None)
    with pytest.raises(corpus.CorpusError, match=r"apt-get was not found.*--corpus"):
        corpus.fetch_novels()


@pytest.mark.parametrize("order", [1, 2, 3])
def test_kneser_ney_probabilities_sum_to_one(order):
    stream = np.random.default_rng(1).integers(0, 5, 200)
    model = KneserNey(stream % 4, 5, order)  # token 4 is never seen
    for context in itertools.product(range(5), repeat=2):
        found = [model.probabilities(np.array([*context, token]))[-1] for token in range(5)]
        assert sum(found) == pytest.approx(1)
        assert min(found) > 0


def test_kneser_ney_learns_what_a_longer_context_tells():
    stream = np.array([0, 1, 2, 0, 3, 4] * 50)
    losses = [KneserNey(stream, 5, order).loss(stream) for order in (1, 2, 3)]
    assert losses[0] > losses[1] > losses[2]


def test_what_counts_as_a_word():
    lexicon = evaluate.Lexicon.of(["house", "don't", "Bath"], ["Emma saw. She saw Emma's mother; she"])
    known = [
        word for word in evaluate.words_of("House, don't HOUSES Emma emma's Bath's bath she") if lexicon.knows(word)
    ]
    assert known == ["House", "don't", "Emma", "Bath's"]
    assert lexicon.share(["house flib", "house"]) == pytest.approx(2 / 3)
    assert evaluate.whole_words("a whole wo") == "a whole "
    assert evaluate.whole_words("It ended.") == "It ended."
