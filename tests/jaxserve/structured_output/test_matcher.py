"""Grammars compiled and followed: every text is what the grammar describes, and hostile ones are refused in time."""

import asyncio
import random
import re
import threading
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxserve.demo import DEMO_MODEL
from jaxserve.errors import InvalidRequest, QueueFull
from jaxserve.sampling_params import Grammar
from jaxserve.structured_output import matcher
from jaxserve.structured_output.grammar import read
from jaxserve.structured_output.matcher import CompiledGrammar, GrammarCompiler, GrammarError
from jaxserve.text.tokenizer import Tokenizer
from tests.fixtures.texts import CASES, is_json, printable_tokenizer

WAIT_SECONDS = 120.0
DEMO_VOCAB, DEMO_EOS = 4096, 0


def demo_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer.from_directory(DEMO_MODEL)
    assert tokenizer is not None
    return tokenizer


@pytest.fixture(scope="module")
def grammars() -> GrammarCompiler:
    return GrammarCompiler(demo_tokenizer(), DEMO_VOCAB, (DEMO_EOS,))


def regex(text: str) -> Grammar:
    return Grammar(kind="regex", text=text)


def tokens_of(allowed: np.ndarray) -> list[int]:
    return np.flatnonzero(np.unpackbits(allowed.view(np.uint8), bitorder="little")).tolist()


def walk(compiled: CompiledGrammar, tokenizer: Tokenizer, eos: int, draw: random.Random, most: int = 400) -> str | None:
    """A text of tokens drawn from those allowed; None if it has not ended after so many."""
    follower, tokens, allowed = compiled.start(), [], compiled.first
    for _ in range(most):
        token = draw.choice(tokens_of(allowed))
        is_last = follower.advance(token)
        if token == eos:
            assert is_last
            return tokenizer.text(tokens)
        tokens.append(token)
        if is_last:
            return tokenizer.text(tokens)
        allowed = follower.allowed()
    return None


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_text_is_what_the_grammar_describes(grammars, case) -> None:
    compiled, tokenizer = grammars.compile(read("grammar", case.given)), demo_tokenizer()
    texts = [walk(compiled, tokenizer, DEMO_EOS, random.Random(seed)) for seed in range(40)]
    assert all(text is not None and case.judge(text) for text in texts), texts
    assert len(set(texts)) > 2


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_vocabulary_that_is_not_all_of_bytes(case) -> None:
    tokenizer = printable_tokenizer()
    compiled = GrammarCompiler(tokenizer, 97, (2,)).compile(read("grammar", case.given))
    texts = [walk(compiled, tokenizer, 2, random.Random(seed)) for seed in range(10)]
    assert all(text is not None and case.judge(text) for text in texts), texts


SCALARS = st.one_of(
    st.just({"type": "null"}),
    st.just({"type": "boolean"}),
    st.tuples(st.integers(-50, 50), st.integers(0, 100)).map(
        lambda pair: {"type": "integer", "minimum": pair[0], "maximum": pair[0] + pair[1]}
    ),
    st.tuples(st.integers(0, 2), st.integers(0, 4)).map(
        lambda pair: {"type": "string", "minLength": pair[0], "maxLength": sum(pair)}
    ),
    st.sampled_from(["[a-c]{2}", "x|yz", "(ab)?c"]).map(
        lambda pattern: {"type": "string", "pattern": f"^({pattern})$"}
    ),
    st.lists(st.one_of(st.none(), st.integers(-9, 9), st.text('aü\n"', max_size=2)), min_size=1, max_size=3).map(
        lambda values: {"enum": values}
    ),
)
SCHEMAS = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.tuples(inner, st.integers(0, 2)).map(
            lambda pair: {"type": "array", "items": pair[0], "minItems": pair[1], "maxItems": pair[1] + 1}
        ),
        st.lists(inner, min_size=1, max_size=2).map(lambda each: {"anyOf": each}),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3).map(
            lambda each: {
                "type": "object",
                "properties": each,
                "required": sorted(each)[:2],
                "additionalProperties": False,
            }
        ),
    ),
    max_leaves=5,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(schema=SCHEMAS, seed=st.integers(0, 2**32))
def test_every_text_of_any_schema_fits_it(grammars, schema: dict[str, Any], seed: int) -> None:
    compiled = grammars.compile(read("grammar", {"type": "json_schema", "value": schema}))
    text = walk(compiled, demo_tokenizer_once(), DEMO_EOS, random.Random(seed))
    assert text is None or is_json(text, schema), text


_DEMO = demo_tokenizer()


def demo_tokenizer_once() -> Tokenizer:
    return _DEMO


def test_white_space_in_json_has_a_bound(grammars) -> None:
    def token(text: bytes) -> int:
        return next(token for token in range(DEMO_VOCAB) if _DEMO.token_bytes(token) == text)

    follower = grammars.compile(read("grammar", {"type": "json_object"})).start()
    assert not follower.advance(token(b"{"))
    assert {token(b"\n"), token(b" ")} <= set(tokens_of(follower.allowed()))
    follower.advance(token(b"\n"))
    assert token(b"\n") not in tokens_of(follower.allowed()), "an empty line"
    for _ in range(40):
        follower.advance(token(b" "))
    assert token(b" ") not in tokens_of(follower.allowed())


def test_the_end_is_allowed_where_the_text_is_whole_only(grammars) -> None:
    compiled = grammars.compile(regex("ab?"))
    follower = compiled.start()
    assert DEMO_EOS not in tokens_of(compiled.first)
    (a,) = [token for token in tokens_of(compiled.first) if _DEMO.token_bytes(token) == b"a"]
    assert not follower.advance(a)
    assert DEMO_EOS in tokens_of(follower.allowed())
    assert follower.advance(DEMO_EOS)


def test_a_text_is_over_where_nothing_may_follow(grammars) -> None:
    compiled = grammars.compile(regex("a"))
    assert compiled.start().advance(tokens_of(compiled.first)[0])


def test_texts_of_one_grammar_do_not_touch_each_other(grammars) -> None:
    compiled = grammars.compile(regex("ab|ac"))
    one, two = compiled.start(), compiled.start()
    a = next(token for token in tokens_of(compiled.first) if _DEMO.token_bytes(token) == b"a")
    one.advance(a)
    np.testing.assert_array_equal(two.allowed(), compiled.first)
    with pytest.raises(GrammarError):
        one.advance(a)
    two.advance(a)
    assert tokens_of(two.allowed())


def test_tokens_beyond_the_models_vocabulary_are_not_allowed() -> None:
    compiled = GrammarCompiler(_DEMO, 1000, (DEMO_EOS,)).compile(regex("[a-z ]+"))
    assert compiled.first.shape == (32,)
    assert 0 < max(tokens_of(compiled.first)) < 1000
    wide = GrammarCompiler(_DEMO, 5000, (DEMO_EOS,)).compile(regex("[a-z ]+"))
    assert wide.first.shape == (157,)
    assert 1000 < max(tokens_of(wide.first)) < DEMO_VOCAB


def deep(count: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(count):
        schema = {"type": "array", "items": schema}
    return schema


def doubled(count: int) -> str:
    lines = [f"r{i}: r{i + 1} r{i + 1}" for i in range(count)]
    return "\n".join(["start: r0", *lines, f'r{count}: "a"'])


HOSTILE: dict[str, dict[str, Any]] = {
    "look-around": {"type": "regex", "value": "(?=a)b"},
    "back-reference": {"type": "regex", "value": r"(a)\1"},
    "not a regex": {"type": "regex", "value": "(a"},
    "nested groups": {"type": "regex", "value": "(" * 5000 + "a" + ")" * 5000},
    "nested stars": {"type": "regex", "value": "(" * 2000 + "a" + ")*" * 2000},
    "huge repetition": {"type": "regex", "value": "(a{1000}){1000}"},
    "huger repetition": {"type": "regex", "value": "((a{1000}){1000}){1000}"},
    "states without end": {"type": "regex", "value": "((a|b|c|d|e|.{3}|.{7}x)*[a-f].{25})+"},
    "not Lark": {"type": "lark", "value": "begin of nothing"},
    "no start": {"type": "lark", "value": 'a: "a"'},
    "nested Lark": {"type": "lark", "value": "start: " + "(" * 9000 + '"a"' + ")" * 9000},
    "doubled rules": {"type": "lark", "value": doubled(60)},
    "a million items": {"type": "lark", "value": 'start: ("a" "b"){1000000}'},
    "nested GBNF": {"type": "lark", "value": "root ::= " + "(" * 9000 + '"a"' + ")" * 9000},
    "GBNF of nothing": {"type": "lark", "value": "root ::= other"},
    "nothing but itself": {"type": "lark", "value": "start: start"},
    "a type that is none": {"type": "json_schema", "value": {"type": "strin"}},
    "a keyword not served": {"type": "json_schema", "value": {"type": "array", "uniqueItems": True}},
    "a reference to itself": {"type": "json_schema", "value": {"$ref": "#"}},
    "a reference to nothing": {"type": "json_schema", "value": {"$ref": "#/$defs/none"}},
    "a reference to the network": {"type": "json_schema", "value": {"$ref": "https://example.com/schema.json"}},
    "nested arrays": {"type": "json_schema", "value": deep(200)},
    "nothing fits": {"type": "json_schema", "value": {"type": "string", "minLength": 3, "maxLength": 2}},
    "combinations": {
        "type": "json_schema",
        "value": {
            "allOf": [
                {"anyOf": [{"properties": {f"p{i}_{j}": {"type": "integer"}}} for j in range(4)]} for i in range(12)
            ]
        },
    },
    "thousands of properties": {
        "type": "json_schema",
        "value": {"type": "object", "properties": {f"p{i}": {"enum": [i]} for i in range(2200)}},
    },
}


@pytest.mark.parametrize("hostile", HOSTILE.values(), ids=HOSTILE)
def test_hostile_grammars_are_refused_with_one_clear_error(grammars, hostile) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        grammars.compile(read("response_format", hostile))
    told = str(refusal.value)
    assert refusal.value.field == "response_format"
    assert re.match(r"response_format: (cannot be compiled: |cannot be followed: |takes longer )\S", told), told
    assert len(told) < 400
    assert "\n" not in told
    with pytest.raises(InvalidRequest) as again:
        grammars.compile(read("grammar", hostile))
    assert str(again.value) == told.replace("response_format", "grammar", 1)


FULL_OF_WORK: dict[str, dict[str, Any]] = {
    "a long run": {"type": "regex", "value": "[ab]{20000}"},
    "a far look": {"type": "regex", "value": "(.*a){30}.{200}"},
    "two ways": {"type": "regex", "value": "(a|b)*a(a|b){25}c"},
    "thousands of words": {"type": "choice", "value": [f"w{i}" for i in range(7000)]},
    "long strings": {"type": "json_schema", "value": {"type": "string", "minLength": 10**6, "maxLength": 10**7}},
    "a long list": {"type": "json_schema", "value": {"type": "array", "items": {}, "minItems": 10**6}},
    "ambiguity": {"type": "lark", "value": 'start: s\ns: s s | s s s | "a" | "b" | /[a-z]+/'},
    "sixty choices in a row": {
        "type": "json_schema",
        "value": {
            "$ref": "#/$defs/d0",
            "$defs": {"d60": {"type": "null"}}
            | {
                f"d{i}": {
                    "anyOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"type": "array", "items": {"$ref": f"#/$defs/d{i + 1}"}}]
                }
                for i in range(60)
            },
        },
    },
}


@pytest.mark.parametrize("hard", FULL_OF_WORK.values(), ids=FULL_OF_WORK)
def test_steps_of_hard_grammars_are_short_or_the_text_fails(grammars, hard) -> None:
    compiled, draw = grammars.compile(read("grammar", hard)), random.Random(0)
    follower, longest = compiled.start(), 0.0
    for _ in range(200):
        try:
            before = time.thread_time()
            allowed = follower.allowed()
            token = draw.choice(tokens_of(allowed))
            is_last = follower.advance(token)
            longest = max(longest, time.thread_time() - before)
        except GrammarError:
            break
        if is_last:
            break
    assert longest < 0.25  # of processor time; some milliseconds where nobody else computes


def test_what_is_kept_has_a_bound(monkeypatch) -> None:
    monkeypatch.setattr(matcher, "MAX_CACHED", 3)
    grammars = GrammarCompiler(_DEMO, DEMO_VOCAB, (DEMO_EOS,))
    first = grammars.compile(regex("a0"))
    for count in range(1, 6):
        grammars.compile(regex(f"a{count}"))
        with pytest.raises(InvalidRequest):
            grammars.compile(regex(f"(a{count}"))
        assert grammars.cached[0] <= 3
    assert grammars.compile(regex("a0")) is first, "somebody holds it"
    monkeypatch.setattr(matcher, "MAX_CACHED_BYTES", 20)
    grammars.compile(regex("b" * 19))
    assert grammars.cached == (1, 19)
    grammars.compile(regex("b" * 30))
    assert grammars.cached == (1, 30), "one is always kept"


def test_the_least_recently_used_goes_first(monkeypatch) -> None:
    monkeypatch.setattr(matcher, "MAX_CACHED", 2)
    grammars, made = GrammarCompiler(_DEMO, DEMO_VOCAB, (DEMO_EOS,)), []
    monkeypatch.setattr(
        grammars, "_compile", lambda *args, of=grammars._compile: (made.append(args[1].text), of(*args))[1]
    )
    for text in ("a", "b", "a", "c", "a", "b"):
        grammars.compile(regex(text))
    assert made == ["a", "b", "c", "b"]


class Slow:
    """A grammar compiler that takes as long as a test wants."""

    def __init__(self, monkeypatch) -> None:
        self.grammars = GrammarCompiler(_DEMO, DEMO_VOCAB, (DEMO_EOS,))
        self.grammars.compile(regex("warm"))  # the vocabulary is read
        self.begun, self.may_end = threading.Semaphore(0), threading.Event()
        compile_ = self.grammars._compile

        def slowly(tokenizer, grammar):
            if grammar.text.startswith("slow"):
                self.begun.release()
                assert self.may_end.wait(WAIT_SECONDS)
            return compile_(tokenizer, grammar)

        monkeypatch.setattr(self.grammars, "_compile", slowly)
        monkeypatch.setattr(matcher, "COMPILE_SECONDS", 0.05)
        self._monkeypatch = monkeypatch

    def be_patient(self) -> None:
        """Lets others take as long as a busy machine may need."""
        self._monkeypatch.setattr(matcher, "COMPILE_SECONDS", WAIT_SECONDS)


def test_slow_grammar_is_refused_once(monkeypatch) -> None:
    slow = Slow(monkeypatch)
    try:
        for _ in range(2):
            with pytest.raises(InvalidRequest, match=r"^grammar: takes longer than 0.05 seconds to compile$"):
                slow.grammars.compile(regex("slow"))
        assert slow.begun.acquire(timeout=WAIT_SECONDS)
        assert not slow.begun.acquire(blocking=False), "it was tried twice"
        slow.be_patient()
        slow.grammars.compile(regex("quick"))
    finally:
        slow.may_end.set()


def test_event_loops_do_not_wait_for_others(monkeypatch) -> None:
    slow = Slow(monkeypatch)

    async def scenario() -> None:
        async with asyncio.timeout(WAIT_SECONDS):
            for count in range(2):  # as many threads as there are
                with pytest.raises(InvalidRequest, match="takes longer"):
                    await slow.grammars.compile_async(regex(f"slow{count}"))
            with pytest.raises(QueueFull, match="other grammars"):
                await slow.grammars.compile_async(regex("quick"))
            slow.be_patient()
            slow.may_end.set()
            compiled = None
            while compiled is None:
                try:
                    compiled = await slow.grammars.compile_async(regex("quick"))
                except QueueFull:
                    await asyncio.sleep(0)
            assert slow.grammars.compile(regex("quick")) is compiled

    try:
        asyncio.run(scenario())
    finally:
        slow.may_end.set()


def test_so_many_wait_and_no_more(monkeypatch) -> None:
    slow = Slow(monkeypatch)
    monkeypatch.setattr(matcher, "MAX_COMPILING", 2)
    try:
        jobs = [slow.grammars._find_or_start(regex(f"slow{count}")) for count in range(2)]
        assert slow.grammars._find_or_start(regex("slow1")) is jobs[1], "asked for twice, compiled once"
        with pytest.raises(QueueFull, match="2 grammars are being compiled"):
            slow.grammars.compile(regex("quick"))
    finally:
        slow.may_end.set()


def test_a_library_that_breaks_down_breaks_nothing_else(monkeypatch, grammars) -> None:
    class Panic(BaseException):
        pass

    def panics(*_):
        raise Panic

    with monkeypatch.context() as patched:
        patched.setattr(grammars, "_compile", panics)
        with pytest.raises(InvalidRequest, match=r"cannot be compiled \(Panic\)"):
            grammars.compile(regex("unheard of"))
    grammars.compile(regex("heard of"))


def test_a_tokenizer_that_the_library_cannot_read_is_told(monkeypatch) -> None:
    tokenizer = demo_tokenizer()
    monkeypatch.setattr(tokenizer, "to_json", lambda: '{"version": "1.0"}')
    with pytest.raises(InvalidRequest, match=r"^grammar: is not served with this tokenizer: "):
        GrammarCompiler(tokenizer, DEMO_VOCAB, (DEMO_EOS,)).compile(regex("a"))
