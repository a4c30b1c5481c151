"""What callers say of the text they want, read into one spelling or refused by name."""

import json

import pytest

from jaxserve.errors import InvalidRequest
from jaxserve.generation.parsing import parse_sampling
from jaxserve.sampling_params import MAX_GRAMMAR_BYTES, Grammar, SamplingParams
from jaxserve.structured_output.grammar import read


@pytest.mark.parametrize(
    ("given", "kind", "text"),
    [
        ({"type": "json_schema", "value": {"type": "object", "b": 1, "a": 2}}, "json_schema", None),
        ({"type": "json_schema", "value": ' {"type":  "object", "b": 1, "a": 2} '}, "json_schema", None),
        ({"type": "json_object"}, "json_schema", '{"type":"object"}'),
        ({"type": "json_object", "value": None}, "json_schema", '{"type":"object"}'),
        ({"type": "regex", "value": "a+"}, "regex", "a+"),
        ({"type": "choice", "value": ("a", "ü")}, "choice", '["a", "\\u00fc"]'),
        ({"type": "lark", "value": 'start: "a"'}, "lark", 'start: "a"'),
    ],
)
def test_every_type_is_read(given, kind, text) -> None:
    expected = Grammar(kind=kind, text=text or '{"type":"object","b":1,"a":2}')
    assert parse_sampling({"grammar": given}).grammar == expected
    assert read("x", expected) is expected


def test_what_it_is_called_does_not_tell_grammars_apart() -> None:
    one, two = read("one", {"type": "regex", "value": "a"}), read("two", {"type": "regex", "value": "a"})
    assert (one, hash(one)) == (two, hash(two))
    assert one.field != two.field


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("a+", 'must be an object {"type": ..., "value": ...}'),
        ({"value": "a"}, "must be an object"),
        ({"type": "regex", "value": "a", "flags": "i"}, "must be an object"),
        ({"type": "xml", "value": "a"}, "is of type 'xml'; it must be json_schema, regex, choice, lark, json_object"),
        ({"type": ["regex"], "value": "a"}, "is of type"),
        ({"type": "json_object", "value": {}}, "has no value"),
        ({"type": "json_schema"}, "has a NoneType for a JSON schema"),
        ({"type": "json_schema", "value": [1]}, "has a list for a JSON schema"),
        ({"type": "json_schema", "value": "{"}, "is no JSON"),
        ({"type": "json_schema", "value": "[" * 50_000}, "is nested too deeply|is no JSON"),  # by Python's version
        ({"type": "json_schema", "value": {"a": float("nan")}}, "is no JSON"),
        ({"type": "json_schema", "value": {"a": object()}}, "is no JSON"),
        ({"type": "json_schema", "value": {"a": "x" * MAX_GRAMMAR_BYTES}}, "has 65544 bytes; at most 65536"),
        ({"type": "json_schema", "value": " " * 100_000}, "has 100000 characters; at most 65536"),
        ({"type": "regex", "value": "ü" * (MAX_GRAMMAR_BYTES // 2 + 1)}, "has 65538 bytes"),
        ({"type": "regex", "value": ""}, "must be a string, and not an empty one"),
        ({"type": "regex", "value": 3}, "must be a string"),
        ({"type": "lark", "value": None}, "must be a string"),
        ({"type": "choice", "value": []}, "must be a list of strings"),
        ({"type": "choice", "value": "ab"}, "must be a list of strings"),
        ({"type": "choice", "value": ["a", ""]}, "none of them empty"),
        ({"type": "choice", "value": ["a", 3]}, "none of them empty"),
    ],
)
def test_what_is_wrong_is_told_by_name(given, told) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        parse_sampling({"grammar": given})
    assert refusal.value.field == "grammar"
    assert str(refusal.value).startswith("grammar: ")
    assert any(each in str(refusal.value) for each in told.split("|"))
    assert len(str(refusal.value)) < 300


def test_deeply_nested_objects_are_told() -> None:
    schema: dict = {}
    for _ in range(100_000):
        schema = {"items": schema}
    with pytest.raises(InvalidRequest, match="grammar: is nested too deeply"):
        read("grammar", {"type": "json_schema", "value": schema})


def test_a_value_is_checked_however_it_is_made() -> None:
    with pytest.raises(InvalidRequest, match="it must be json_schema, regex, choice, lark"):
        Grammar(kind="xml", text="")  # pyright: ignore[reportArgumentType]
    with pytest.raises(InvalidRequest, match="must be a string"):
        Grammar(kind="regex", text=3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(InvalidRequest, match="it must be a Grammar"):
        SamplingParams(grammar={"type": "regex", "value": "a"})  # pyright: ignore[reportArgumentType]
    assert json.loads(read("g", {"type": "choice", "value": ["\ud800"]}).text) == ["\ud800"]
