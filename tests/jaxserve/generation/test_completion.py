"""Completions from events: what is text, what is a token, and where a stop string ends both."""

from __future__ import annotations

import json
import math

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from jaxserve.errors import InvalidRequest
from jaxserve.generation.completion import Assembler, Delta
from jaxserve.request import Alternatives, FinishReason, Request, TokenEvent
from jaxserve.sampling_params import SamplingParams
from jaxserve.text.tokenizer import Tokenizer

# Tokens are the strings they stand for; text is what they spell.
VOCAB = ["</s>", "a", "b", "c", "ab", "bc", "abc", "ca", " ", "<0xF0>", "<0x9F>", "<0x99>", "<0x82>", "EN", "END", "D"]
ID = {token: i for i, token in enumerate(VOCAB)}
SMILE = ["<0xF0>", "<0x9F>", "<0x99>", "<0x82>"]
EOS = ID["</s>"]


@pytest.fixture(scope="module")
def tokenizer():
    return spelling()


def spelling():
    library = tokenizers.Tokenizer(models.WordLevel(ID, unk_token="</s>"))
    library.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    library.add_special_tokens(["</s>"])
    return Tokenizer(library)


def ids(*tokens):
    return tuple(ID[token] for token in tokens)


def request(prompt=(1,), **sampling):
    return Request(request_id="r", prompt=prompt, sampling=SamplingParams(**sampling))


def assemble(tokenizer, tokens, finish=FinishReason.LENGTH, split=1, **sampling):
    """Runs tokens through an assembler, so many an event, as the engine would: to the end or to a stop string."""
    assembler = Assembler(request(**sampling), tokenizer, (EOS,))
    deltas = []
    for start in range(0, len(tokens), split):
        part = tuple(tokens[start : start + split])
        last = start + split >= len(tokens)
        logprobs = tuple(-0.25 * (start + i) for i in range(len(part)))
        top = tuple(Alternatives((token, 0), (-0.5, -1.0)) for token in part) if sampling.get("logprobs") else ()
        deltas.append(assembler.push(TokenEvent("r", part, logprobs, top, (), finish if last else None)))
        if assembler.finished:
            break
    return assembler, deltas


def test_text_tokens_and_usage(tokenizer):
    assembler, deltas = assemble(tokenizer, ids("a", "bc", " "))
    completion = assembler.completion()
    assert (completion.text, completion.token_ids) == ("abc ", ids("a", "bc", " "))
    assert completion.finish_reason is FinishReason.LENGTH
    assert [delta.text for delta in deltas] == ["a", "bc", " "]
    assert [delta.finish_reason for delta in deltas] == [None, None, FinishReason.LENGTH]
    assert completion.prompt_tokens == 1
    assert completion.logprobs is None
    assert all(delta.logprobs == () for delta in deltas)


@pytest.mark.parametrize("split", [1, 2, 5])
def test_end_of_sequence_is_a_token_and_no_text(tokenizer, split):
    assembler, deltas = assemble(tokenizer, [*ids("a", "b"), EOS], FinishReason.EOS, split)
    completion = assembler.completion()
    assert (completion.text, completion.token_ids) == ("ab", (*ids("a", "b"), EOS))
    assert completion.finish_reason is FinishReason.EOS
    assert deltas[-1].finish_reason is FinishReason.EOS


def test_stop_token_is_a_token_and_no_text(tokenizer):
    assembler, _ = assemble(tokenizer, ids("a", "b"), FinishReason.STOP, stop_token_ids=ids("b"))
    assert (assembler.completion().text, assembler.completion().token_ids) == ("a", ids("a", "b"))


def test_an_end_of_sequence_that_is_ignored_ends_nothing(tokenizer):
    assembler, _ = assemble(tokenizer, [*ids("a"), EOS, *ids("b")], ignore_eos=True)
    assert (assembler.completion().text, assembler.completion().token_ids) == ("ab", (*ids("a"), EOS, *ids("b")))


def test_a_character_is_given_whole(tokenizer):
    assembler, deltas = assemble(tokenizer, ids("a", *SMILE, "b"))
    assert [delta.text for delta in deltas] == ["a", "", "", "", "🙂", "b"]
    assert assembler.completion().text == "a🙂b"


def test_an_unfinished_character_ends_as_replacement(tokenizer):
    assembler, _ = assemble(tokenizer, ids("a", *SMILE[:3]))
    assert assembler.completion().text.rstrip("\ufffd") == "a"
    assert assembler.completion().text != "a"


def test_a_stop_string_across_tokens(tokenizer):
    assembler, deltas = assemble(tokenizer, ids("a", "EN", "c", "EN", "D", "b"), stop=("END",), logprobs=1)
    completion = assembler.completion()
    assert completion.text == "aENc"
    assert completion.token_ids == ids("a", "EN", "c", "EN", "D")  # the token that completed it is the last one
    assert completion.logprobs == tuple(-0.25 * i for i in range(5))
    assert completion.top_logprobs is not None
    assert len(completion.top_logprobs) == 5
    assert completion.finish_reason is FinishReason.STOP
    assert [delta.text for delta in deltas] == ["a", "", "ENc", "", ""]
    assert assembler.finished


def test_a_stop_string_within_an_event_cuts_the_rest(tokenizer):
    assembler, (delta,) = assemble(tokenizer, ids("a", "END", "b"), split=3, stop=("END",), logprobs=0)
    assert delta == Delta("a", ids("a", "END"), (0.0, -0.25), (), (), FinishReason.STOP)
    assert assembler.push(TokenEvent("r", ids("b"), finish_reason=FinishReason.ABORTED)) == Delta()
    assert assembler.completion().finish_reason is FinishReason.STOP
    assert assembler.completion().top_logprobs is None


def test_text_held_back_comes_at_the_end(tokenizer):
    for finish, tokens in ((FinishReason.LENGTH, ids("a", "EN")), (FinishReason.EOS, (*ids("a", "EN"), EOS))):
        assembler, deltas = assemble(tokenizer, tokens, finish, stop=("END",))
        assert [delta.text for delta in deltas][:2] in (["a", "EN"], ["a", ""])
        assert assembler.completion().text == "aEN"
        assert assembler.completion().finish_reason is finish


def test_a_request_that_is_aborted_keeps_what_it_has(tokenizer):
    assembler = Assembler(request(stop=("END",)), tokenizer, (EOS,))
    assembler.push(TokenEvent("r", ids("a", "EN")))
    assert not assembler.finished
    delta = assembler.push(TokenEvent("r", finish_reason=FinishReason.ABORTED))
    assert (delta.text, delta.finish_reason) == ("EN", FinishReason.ABORTED)
    assert assembler.completion().text == "aEN"


def first_stop(text, stops):
    """The reference: reading on character by character, the text before the first stop string that is complete."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))], end
    return text, None


some_text = st.text(st.sampled_from("abc"), min_size=1, max_size=5)


@settings(max_examples=400, deadline=None)
@given(
    tokens=st.lists(st.sampled_from(VOCAB[1:8]), min_size=1, max_size=14),
    stops=st.lists(some_text, min_size=1, max_size=3),
    split=st.integers(1, 5),
)
def test_stop_strings_whatever_the_pieces(tokens, stops, split):
    assembler, deltas = assemble(spelling(), ids(*tokens), split=split, stop=tuple(stops))
    completion = assembler.completion()
    expected, end = first_stop("".join(tokens), stops)
    assert completion.text == "".join(delta.text for delta in deltas) == expected
    assert completion.token_ids == sum((delta.token_ids for delta in deltas), ())
    if end is None:
        assert completion.finish_reason is FinishReason.LENGTH
        assert completion.token_ids == ids(*tokens)
    else:
        assert completion.finish_reason is FinishReason.STOP
        spelled = ["".join(VOCAB[i] for i in completion.token_ids[:used]) for used in range(len(tokens) + 1)]
        assert len(spelled[len(completion.token_ids)]) >= end > len(spelled[len(completion.token_ids) - 1])
    for used in range(1, len(deltas)):  # nothing is held that cannot become a stop string
        read, out = "".join(tokens[: used * split]), "".join(delta.text for delta in deltas[:used])
        assert read.startswith(out)
        assert any(stop.startswith(read[len(out) :]) and stop != read[len(out) :] for stop in stops)


def test_prompt_logprobs_begin_with_nothing(tokenizer):
    assembler = Assembler(request(prompt=(1, 2, 3), prompt_logprobs=1), tokenizer)
    first, second = Alternatives((5,), (-0.5,)), Alternatives((6,), (-0.25,))
    delta = assembler.push(TokenEvent("r", prompt_logprobs=((-1.0, first),), cached_tokens=2))
    assert delta.prompt_logprobs == ((-1.0, first),)
    assembler.push(TokenEvent("r", ids("a"), (-2.0,), (), ((-3.0, second),), FinishReason.LENGTH))
    completion = assembler.completion()
    assert completion.prompt_logprobs == (None, -1.0, -3.0)
    assert completion.prompt_top_logprobs == (None, first, second)
    assert completion.cached_tokens == 2
    assert completion.logprobs is None


@pytest.mark.parametrize("stop", [(), ("ca",)])
def test_an_event_by_token_completes_the_same(tokenizer, stop):
    asked = request(prompt=(1, 2), stop=stop, logprobs=1, prompt_logprobs=0)
    tokens, scored = ids("a", "bc", "a", "b"), (-0.5, -0.25, 0.0, -1.0)
    tops = tuple(Alternatives((token,), (-0.5,)) for token in tokens)
    event = TokenEvent(
        *("r", tokens, scored, tops, ((-2.0, None),), FinishReason.LENGTH), cached_tokens=1, embedding=(1.0,)
    )
    whole, parts = (Assembler(asked, tokenizer, (EOS,)) for _ in range(2))
    whole.push(event)
    texts = [parts.push(each).text for each in event.by_token()]
    assert texts == (["a", "b", "", ""] if stop else ["a", "bc", "a", "b"])
    assert parts.completion() == whole.completion()
    first = TokenEvent("r", ids("a"), started=1.0)
    assert first.by_token() == [first]


def test_lines(tokenizer):
    assembler, _ = assemble(tokenizer, ids("a", "b"), logprobs=1, seed=2**63 + 1)
    line = json.loads(json.dumps(assembler.completion().to_json(), allow_nan=False))
    assert line == {
        "id": "r",
        "text": "ab",
        "token_ids": list(ids("a", "b")),
        "finish_reason": "length",
        "seed": 2**63 + 1,
        "logprobs": [0.0, -0.25],
        "top_logprobs": [{"1": -0.5, "0": -1.0}, {"2": -0.5, "0": -1.0}],
    }
    assembler, _ = assemble(tokenizer, ids("a"), temperature=0.0, seed=5, prompt_logprobs=0)
    assert assembler.completion().to_json() == {
        "id": "r",
        "text": "a",
        "token_ids": [1],
        "finish_reason": "length",
        "prompt_logprobs": [None],
    }


def test_lines_hold_no_number_that_json_lacks(tokenizer):
    assembler = Assembler(request(logprobs=1, prompt_logprobs=1), tokenizer)
    none = Alternatives((3,), (-math.inf,))
    assembler.push(TokenEvent("r", (1,), (math.nan,), (none,), ((-math.inf, none),), FinishReason.LENGTH))
    line = json.loads(json.dumps(assembler.completion().to_json(), allow_nan=False))
    assert line["logprobs"] == [None]
    assert line["top_logprobs"] == [{"3": None}]
    assert line["prompt_logprobs"] == [None, None]
    assert line["prompt_top_logprobs"] == [None, {"3": None}]


def test_errors(tokenizer):
    assembler = Assembler(request(), tokenizer)
    assembler.push(TokenEvent("r", finish_reason=FinishReason.ERROR, error="out of luck"))
    assert assembler.completion().error == "out of luck"
    assert assembler.completion().to_json() == {"id": "r", "error": "out of luck"}


def test_without_a_tokenizer_there_are_tokens_alone():
    assembler, deltas = assemble(None, (7, 9))
    assert assembler.completion().text == ""
    assert assembler.completion().token_ids == (7, 9)
    assert [delta.token_ids for delta in deltas] == [(7,), (9,)]
    with pytest.raises(InvalidRequest, match="stop_token_ids"):
        Assembler(request(stop=("END",)), None)


@pytest.mark.parametrize("split", [1, 2, 6])
def test_stop_strings_are_not_looked_for_before_enough_tokens(tokenizer, split):
    tokens = ids("a", "END", "b", "EN", "D", "c")
    for least, text in ((0, "a"), (1, "a"), (2, "aENDb"), (4, "aENDb"), (5, "aENDbENDc")):
        assembler, deltas = assemble(tokenizer, tokens, split=split, stop=("END",), min_tokens=least)
        assert assembler.completion().text == text == "".join(delta.text for delta in deltas)
        stopped = assembler.completion().finish_reason is FinishReason.STOP
        assert stopped == (least < 5)


def test_a_stop_string_that_begins_early_and_ends_late_counts(tokenizer):
    assembler, _ = assemble(tokenizer, ids("a", "EN", "D", "b"), stop=("END",), min_tokens=2)
    assert assembler.completion().text == "a"
