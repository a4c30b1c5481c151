"""The strict reading of a request's fields."""

from __future__ import annotations

import json

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from jaxserve.errors import InvalidRequest
from jaxserve.generation.parsing import MAX_STOP_LENGTH, parse_request, parse_sampling
from jaxserve.sampling_params import SAMPLING_PARAMS, Grammar, SamplingParams
from jaxserve.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    library = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1}))  # without a token for what it does not know
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    return Tokenizer(library)


def parse(fields, tokenizer=None):
    return parse_request(fields, request_id="r", tokenizer=tokenizer)


def test_defaults():
    request = parse({"prompt_token_ids": [5, 6]})
    assert request.prompt == (5, 6)
    sampling = request.sampling
    assert sampling == SamplingParams(seed=sampling.seed)
    assert (sampling.max_tokens, sampling.temperature, sampling.logprobs) == (128, 1.0, None)


def test_every_field():
    fields = {
        "prompt": "a b a",
        "max_tokens": 3,
        "temperature": 1,
        "top_p": 0.5,
        "top_k": 4,
        "min_p": 0,
        "typical_p": 1,
        "repetition_penalty": 2,
        "presence_penalty": -1,
        "frequency_penalty": 0.25,
        "logit_bias": {"7": -100, "12": 1.5},
        "seed": 2**64 - 1,
        "stop": ["x", "yz"],
        "stop_token_ids": [3, 3],
        "min_tokens": 2,
        "bad_words": ["b", "a b"],
        "ignore_eos": True,
        "logprobs": 0,
        "prompt_logprobs": 20,
        "grammar": {"type": "regex", "value": "a+"},
    }
    assert set(fields) - {"prompt"} == set(SAMPLING_PARAMS)
    library = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1}))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    request = parse_request(
        json.loads(json.dumps(fields)),
        request_id="r",
        tokenizer=Tokenizer(library),
        priority=2,
        arrival=1.5,
        cache_salt="s",
    )
    assert request.prompt == (0, 1, 0)
    assert (request.request_id, request.priority, request.arrival, request.cache_salt) == ("r", 2, 1.5, "s")
    assert request.sampling == SamplingParams(
        max_tokens=3,
        temperature=1.0,
        top_p=0.5,
        top_k=4,
        min_p=0.0,
        repetition_penalty=2.0,
        presence_penalty=-1.0,
        frequency_penalty=0.25,
        logit_bias=((7, -100.0), (12, 1.5)),
        seed=2**64 - 1,
        stop=("x", "yz"),
        stop_token_ids=(3, 3),
        min_tokens=2,
        bad_words=("b", "a b"),
        bad_word_tokens=((1,), (0, 1)),
        ignore_eos=True,
        logprobs=0,
        prompt_logprobs=20,
        grammar=Grammar(kind="regex", text="a+"),
    )
    assert all(isinstance(getattr(request.sampling, name), float) for name in ("temperature", "min_p"))


def test_one_stop_string_needs_no_list():
    assert parse_sampling({"stop": "END"}).stop == ("END",)


def test_null_is_not_given():
    sampling = parse_sampling(dict.fromkeys(SAMPLING_PARAMS))
    assert sampling == SamplingParams(seed=sampling.seed)
    assert parse({"prompt_token_ids": [1], "prompt": None}).prompt == (1,)


def test_a_seed_is_drawn_where_none_is_given():
    seeds = {parse_sampling({}).seed for _ in range(20)}
    assert len(seeds) == 20
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize(
    ("fields", "field", "says"),
    [
        ({"max_token": 3}, "max_token", "did you mean max_tokens?"),
        ({"prompt_ids": [3]}, "prompt_ids", "did you mean"),
        ({"zzz": 1}, "zzz", "not a field"),
        ({"zzz": None}, "zzz", "not a field"),
        ({"sample_index": 1}, "sample_index", "not a field"),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"max_tokens": 2.0}, "max_tokens", "2.0"),
        ({"max_tokens": True}, "max_tokens", "True"),
        ({"max_tokens": "3"}, "max_tokens", "'3'"),
        ({"temperature": "1"}, "temperature", "must be a number"),
        ({"temperature": True}, "temperature", "must be a number"),
        ({"temperature": -0.1}, "temperature", "at least 0"),
        ({"temperature": float("nan")}, "temperature", "finite"),
        ({"temperature": float("inf")}, "temperature", "finite"),
        ({"temperature": 10**400}, "temperature", "too large"),
        ({"top_p": 0}, "top_p", "above 0"),
        ({"top_p": 1.01}, "top_p", "at most 1"),
        ({"typical_p": 0}, "typical_p", "above 0"),
        ({"typical_p": 1.01}, "typical_p", "at most 1"),
        ({"seed": 2**64}, "seed", "from"),
        ({"seed": 1.5}, "seed", "whole number"),
        ({"ignore_eos": 1}, "ignore_eos", "true or false"),
        ({"stop": ""}, "stop", "non-empty"),
        ({"stop": [""]}, "stop", "non-empty"),
        ({"stop": [1]}, "stop", "str"),
        ({"stop": 1}, "stop", "a string or a list"),
        ({"stop": {"a": 1}}, "stop", "a string or a list"),
        ({"stop": ["a"] * 17}, "stop", "at most 16"),
        ({"stop": "a" * (MAX_STOP_LENGTH + 1)}, "stop", "at most"),
        ({"stop_token_ids": 3}, "stop_token_ids", "a list"),
        ({"stop_token_ids": "33"}, "stop_token_ids", "a list"),
        ({"stop_token_ids": [-1]}, "stop_token_ids", "-1"),
        ({"stop_token_ids": [True]}, "stop_token_ids", "True"),
        ({"logit_bias": [1]}, "logit_bias", "must map"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "'a'"),
        ({"logit_bias": {"-1": 1}}, "logit_bias", "'-1'"),
        ({"logit_bias": {"01": 1}}, "logit_bias", "'01'"),
        ({"logit_bias": {"1 ": 1}}, "logit_bias", "'1 '"),
        ({"logit_bias": {"٣": 1}}, "logit_bias", "'٣'"),
        ({"logit_bias": {"9999999999": 1}}, "logit_bias", "9999999999"),
        ({"logit_bias": {1: 1, "1": 2}}, "logit_bias", "twice"),
        ({"logit_bias": {"1": "2"}}, "logit_bias", "must be a number"),
        ({"logit_bias": {"1": 101}}, "logit_bias", "at most 100"),
        ({"logit_bias": {str(i): 1 for i in range(301)}}, "logit_bias", "at most 300"),
        ({"logprobs": 21}, "logprobs", "20"),
        ({"logprobs": True}, "logprobs", "True"),
        ({"prompt_logprobs": -1}, "prompt_logprobs", "from 0"),
        ({"prompt_token_ids": []}, "prompt_token_ids", "empty"),
        ({"prompt_token_ids": [1.0]}, "prompt_token_ids", "1.0"),
        ({"prompt_token_ids": [2**31]}, "prompt_token_ids", "2147483648"),
        ({"prompt_token_ids": "12"}, "prompt_token_ids", "a list"),
        ({"prompt_token_ids": None}, "prompt", "missing"),
        ({"prompt": "a"}, "prompt", "both"),
    ],
)
def test_mistakes_are_named(fields, field, says):
    with pytest.raises(InvalidRequest) as error:
        parse({"prompt_token_ids": [1]} | fields)
    assert error.value.field == field
    assert str(error.value).startswith(f"{field}: ") or field == "prompt"
    assert says in str(error.value)
    assert len(str(error.value)) < 300


@pytest.mark.parametrize(
    ("prompt", "says"), [("", "empty"), (["a"], "must be a string"), (3, "must be a string"), ("\ud83d", "tokenised")]
)
def test_prompts_that_are_no_text(tokenizer, prompt, says):
    with pytest.raises(InvalidRequest, match=says) as error:
        parse({"prompt": prompt}, tokenizer)
    assert error.value.field == "prompt"


def test_a_prompt_of_no_tokens(tokenizer):
    with pytest.raises(InvalidRequest, match="no token"):
        parse({"prompt": "   "}, tokenizer)


def test_text_needs_a_tokenizer():
    with pytest.raises(InvalidRequest, match="prompt_token_ids"):
        parse({"prompt": "a"})


def test_long_values_are_not_repeated_at_length():
    with pytest.raises(InvalidRequest) as error:
        parse({"prompt_token_ids": [1], "temperature": "x" * 10_000})
    assert len(str(error.value)) < 200


@pytest.mark.parametrize("value", [10**400, -(10**400), float("inf"), float("nan"), "1", True, None])
def test_parameters_made_by_hand_are_held_to_the_same(value):
    with pytest.raises(InvalidRequest, match="temperature"):
        SamplingParams(temperature=value)


def spelling(*tokens: str) -> Tokenizer:
    """A tokenizer of these tokens, the longest of which is found first; a space is a letter like any other."""
    model = models.BPE({token: i for i, token in enumerate(tokens)}, _merges(tokens))
    return Tokenizer(tokenizers.Tokenizer(model))


def _merges(tokens):
    return [(token[:1], token[1:]) for token in sorted(tokens, key=len) if len(token) > 1]


def test_bad_words_with_and_without_leading_space():
    tokenizer = spelling(" ", "a", "b", " a", "ab")
    parsed = parse_request({"prompt": "ab", "bad_words": ["a", " ab", "ba"]}, request_id="r", tokenizer=tokenizer)
    ids = [tuple(tokenizer.encode(text)) for text in ("a", " a", "ab", " ab", "ba", " ba")]
    assert parsed.sampling.bad_word_tokens == tuple(dict.fromkeys(ids))
    assert parsed.sampling.bad_words == ("a", " ab", "ba")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([" "], "holds ' ', for which the tokenizer has no token"),
        ([""], "every entry must be a non-empty str"),
        (["a"] * 65, "has 65 entries; at most 64 are allowed"),
        (["ab" * 200], "have [0-9]+ tokens or more; at most 256 are allowed"),
        (["a" * 2000], "has 2000 characters; at most 1024 are allowed"),
        (7, "must be a string or a list of strings"),
    ],
)
def test_bad_words_that_cannot_be_served_are_refused(given, message):
    with pytest.raises(InvalidRequest, match=message) as error:
        parse_request({"prompt": "a", "bad_words": given}, request_id="r", tokenizer=spelling(" ", "a", "b"))
    assert error.value.field == "bad_words"


def test_bad_words_are_tokenised_until_there_are_too_many(monkeypatch):
    encode, seen = Tokenizer.encode, []
    monkeypatch.setattr(Tokenizer, "encode", lambda *args, **more: seen.append(1) or encode(*args, **more))
    fields = {"prompt": "a", "bad_words": ["ab" * 60 + "a" * i for i in range(64)]}
    with pytest.raises(InvalidRequest, match="at most 256 are allowed"):
        parse_request(fields, request_id="r", tokenizer=spelling(" ", "a", "b"))
    assert len(seen) < 5


def test_bad_words_need_a_tokenizer():
    with pytest.raises(InvalidRequest, match="bad_words: need a tokenizer"):
        parse({"prompt_token_ids": [1], "bad_words": ["a"]})


def test_more_tokens_cannot_be_asked_for_than_may_be_generated():
    with pytest.raises(InvalidRequest, match=r"min_tokens: is 5, more than max_tokens \(4\)"):
        parse_sampling({"min_tokens": 5, "max_tokens": 4})
    with pytest.raises(InvalidRequest, match="min_tokens: is -1"):
        parse_sampling({"min_tokens": -1})
