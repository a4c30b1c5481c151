"""Defaults of requests from a checkpoint's generation_config.json: what is read, and where it holds."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxserve import models, weights
from jaxserve.config import EngineConfig
from jaxserve.engine import Engine
from jaxserve.errors import InvalidRequest
from jaxserve.generation import defaults
from jaxserve.generation.parsing import parse_request
from jaxserve.request import FinishReason
from jaxserve.sampling_params import SamplingParams
from tests.fixtures.tiny import BLOOM, CONFIG, opinionated


def written(folder: Path, **entries: Any) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(entries))
    return folder


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ({}, {}),
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.9}, {"temperature": 0.6, "top_p": 0.9}),
        ({"temperature": 1, "top_k": 50, "repetition_penalty": 1.05}, {"top_k": 50, "repetition_penalty": 1.05}),
        (
            {"max_new_tokens": 2048, "min_p": 0.1, "typical_p": 0.5},
            {"min_p": 0.1, "typical_p": 0.5, "max_tokens": 2048},
        ),
        ({"do_sample": False, "temperature": 0.6}, {"temperature": 0.0}),
        ({"do_sample": False}, {"temperature": 0.0}),
        ({"eos_token_id": [1, 2], "max_length": 20, "num_beams": 4, "top_k": None}, {}),
    ],
)
def test_known_parameters_are_read(tmp_path, entries, expected):
    read = defaults.read(written(tmp_path, **entries), EngineConfig())
    assert read == expected
    assert all(type(value) is type(getattr(SamplingParams(), name)) for name, value in read.items())
    assert defaults.read(tmp_path, EngineConfig(generation_config="off")) == {}


def test_without_the_file_there_are_none(tmp_path):
    assert defaults.read(tmp_path, EngineConfig()) == {}
    assert defaults.describe({}) is None


def test_they_are_told_in_one_line():
    told = defaults.describe({"temperature": 0.6, "top_p": 0.9, "max_tokens": 2048})
    assert told == "generation_config.json: temperature 0.6, top_p 0.9, max_tokens 2048 are the defaults of requests"
    assert defaults.describe({"top_k": 20}) == "generation_config.json: top_k 20 is the default of requests"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"temperature": "hot"}', r"temperature is 'hot'; it must be a finite number \(--generation-config off"),
        ('{"max_new_tokens": 0}', r"max_new_tokens is 0; it must be a whole number of at least 1"),
        ('{"top_p": 1.5}', r"top_p is 1.5; it must be above 0 and at most 1"),
        ("{", r"generation_config.json cannot be read"),
        ("[]", r"generation_config.json does not hold a JSON object"),
    ],
)
def test_wrong_files_are_refused(tmp_path, content, message):
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        defaults.read(tmp_path, EngineConfig())
    assert defaults.read(tmp_path, EngineConfig(generation_config="off")) == {}


def parsed(fields: dict[str, Any], **settings: Any) -> SamplingParams:
    return parse_request({"prompt_token_ids": [1] * 10} | fields, request_id="", tokenizer=None, **settings).sampling


def test_what_a_request_gives_wins():
    ours = {"temperature": 0.6, "top_p": 0.9, "max_tokens": 50}
    sampling = parsed({"temperature": 0, "top_k": None}, defaults=ours)
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens, sampling.top_k) == (0, 0.9, 50, 0)
    sampling = parsed({"temperature": None, "top_p": 1, "max_tokens": 3}, defaults=ours)
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens) == (0.6, 1, 3)


def test_a_default_limit_is_cut_to_the_context():
    ours = {"max_tokens": 50}
    assert parsed({}, defaults=ours, longest=30).max_tokens == 20
    assert parsed({}, defaults=ours, longest=100).max_tokens == 50
    assert parsed({}, defaults=ours, longest=5).max_tokens == 1
    assert parsed({"min_tokens": 30}, defaults=ours, longest=30).max_tokens == 30
    assert parsed({"max_tokens": 40}, defaults=ours, longest=30).max_tokens == 40
    assert parsed({}, defaults={"top_k": 3}, longest=30).max_tokens == 128
    with pytest.raises(InvalidRequest, match="is 60, more than max_tokens"):
        parsed({"min_tokens": 60}, defaults=ours)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """Of a checkpoint that recommends seven greedy tokens."""
    folder = tmp_path_factory.mktemp("checkpoint")
    weights.write_hf(folder, BLOOM, jax.tree.map(np.asarray, opinionated(1)))
    written(folder, do_sample=False, max_new_tokens=7, eos_token_id=[2])
    with Engine.from_checkpoint(folder, CONFIG) as started:
        yield started


PROMPT = [[5, 6, 7, 8]]


def test_python_has_them_where_no_sampling_is_given(engine):
    assert engine.request_defaults == {"temperature": 0.0, "max_tokens": 7}
    (answer,) = engine.generate(PROMPT)
    assert (len(answer.token_ids), answer.seed) == (7, None)
    (drawn,) = engine.generate(PROMPT, max_tokens=9, ignore_eos=True)
    assert len(drawn.token_ids) == 9
    assert drawn.seed is not None  # the temperature is SamplingParams' own
    (drawn,) = engine.generate({"prompt_token_ids": PROMPT[0], "max_tokens": 9})
    assert drawn.seed is not None
    assert engine.generate({"prompt_token_ids": PROMPT[0], "seed": None})[0].token_ids == answer.token_ids
    assert len(engine.beam_search(PROMPT[0], n=2)[0].token_ids) <= 7


def test_every_end_of_a_list_ends_a_text(engine, tmp_path):
    prompts = [[token] for token in range(10, 20)]
    whole = [answer.token_ids for answer in engine.generate(prompts, max_tokens=12, temperature=0, ignore_eos=True)]
    ends = sorted({whole[0][3], whole[1][3], whole[2][3]})
    weights.write_hf(tmp_path, BLOOM, jax.tree.map(np.asarray, opinionated(1)))
    with Engine.from_checkpoint(written(tmp_path, eos_token_id=ends), CONFIG) as other:
        answers = other.generate(prompts, max_tokens=12, temperature=0)
    ended = [answer for answer in answers if answer.finish_reason is FinishReason.EOS]
    assert len(ends) > 1
    assert {answer.token_ids[-1] for answer in ended} == set(ends)
    for answer, tokens in zip(answers, whole, strict=True):
        length = next((i for i, token in enumerate(tokens, 1) if token in ends), len(tokens))
        assert answer.token_ids == tokens[:length]


def test_the_eos_of_the_tokenizer_ends_a_text_too(tmp_path):
    weights.write_hf(tmp_path, BLOOM, models.build(BLOOM).init(0, np.float32))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<end>"}, "bos_token": "<go>"}')
    for vocabulary in ({"a": 0, "<end>": 5}, [["a", 0.5]]):
        added = [{"content": "<go>", "id": 7}, {"content": "<end>", "id": 5}]
        (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": added}))
        assert weights.read_config(tmp_path).eos_token_ids == (2, 5)
    assert weights.read_config(written(tmp_path, eos_token_id=[5, 9])).eos_token_ids == (5, 9)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "vocab.json").write_text('{"a": 0, "<end>": 4}')
    assert weights.read_config(tmp_path).eos_token_ids == (5, 9, 4)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<none>"}')
    assert weights.read_config(tmp_path).eos_token_ids == (5, 9)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(weights.CheckpointError, match=r"tokenizer_config.json is not JSON"):
        weights.read_config(tmp_path)
