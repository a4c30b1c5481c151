"""Hostile grammars: they are refused with a clear error, or each step of them is short."""

import random
import re
import time
from typing import Any

import pytest

from jaxserve.errors import InvalidRequest
from jaxserve.structured_output.grammar import read
from jaxserve.structured_output.matcher import GrammarError
from tests.jaxserve.structured_output.demo_grammars import tokens_of


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
