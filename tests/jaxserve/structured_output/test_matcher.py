"""Grammars followed token by token: every text is what the grammar describes."""

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxserve.structured_output.compiler import GrammarCompiler
from jaxserve.structured_output.grammar import read
from jaxserve.structured_output.matcher import CompiledGrammar, GrammarError
from jaxserve.text.tokenizer import Tokenizer
from tests.fixtures.texts import CASES, is_json, printable_tokenizer
from tests.jaxserve.structured_output.demo_grammars import DEMO, DEMO_EOS, DEMO_VOCAB, new_compiler, regex, tokens_of


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
    compiled = grammars.compile(read("grammar", case.given))
    texts = [walk(compiled, DEMO, DEMO_EOS, random.Random(seed)) for seed in range(40)]
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
    text = walk(compiled, DEMO, DEMO_EOS, random.Random(seed))
    assert text is None or is_json(text, schema), text


def test_white_space_in_json_has_a_bound(grammars) -> None:
    def token(text: bytes) -> int:
        return next(token for token in range(DEMO_VOCAB) if DEMO.token_bytes(token) == text)

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
    (a,) = [token for token in tokens_of(compiled.first) if DEMO.token_bytes(token) == b"a"]
    assert not follower.advance(a)
    assert DEMO_EOS in tokens_of(follower.allowed())
    assert follower.advance(DEMO_EOS)


def test_a_text_is_over_where_nothing_may_follow(grammars) -> None:
    compiled = grammars.compile(regex("a"))
    assert compiled.start().advance(tokens_of(compiled.first)[0])


def test_texts_of_one_grammar_do_not_touch_each_other(grammars) -> None:
    compiled = grammars.compile(regex("ab|ac"))
    one, two = compiled.start(), compiled.start()
    a = next(token for token in tokens_of(compiled.first) if DEMO.token_bytes(token) == b"a")
    one.advance(a)
    np.testing.assert_array_equal(two.allowed(), compiled.first)
    with pytest.raises(GrammarError):
        one.advance(a)
    two.advance(a)
    assert tokens_of(two.allowed())


def test_tokens_beyond_the_models_vocabulary_are_not_allowed() -> None:
    compiled = new_compiler(1000).compile(regex("[a-z ]+"))
    assert compiled.first.shape == (32,)
    assert 0 < max(tokens_of(compiled.first)) < 1000
    wide = new_compiler(5000).compile(regex("[a-z ]+"))
    assert wide.first.shape == (157,)
    assert 1000 < max(tokens_of(wide.first)) < DEMO_VOCAB
