"""Chats among a request's fields: read as strictly as the others, and made a prompt by the checkpoint's template."""

from __future__ import annotations

from typing import Any

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, processors

from jaxserve.errors import InvalidRequest
from jaxserve.generation import chat
from jaxserve.generation.parsing import parse_request
from jaxserve.text.chat_template import ChatTemplate
from jaxserve.text.tokenizer import Tokenizer

TEMPLATE = (
    "{{ bos_token }} {% for m in messages %}{{ m.role }} {{ m.content }} {{ m.name }} {% endfor %}"
    "{% if add_generation_prompt %}bot{% endif %}"
)
BEGIN, A, B, USER, BOT = range(5)
HI = [{"role": "user", "content": "a"}]


def tokenizer_with(template: str | None) -> Tokenizer:
    """One that begins every text with a special token, unless it is told not to."""
    library = tokenizers.Tokenizer(models.WordLevel({"<s>": BEGIN, "a": A, "b": B, "user": USER, "bot": BOT}))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.add_special_tokens(["<s>"])
    library.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BEGIN)])
    return Tokenizer(library, None if template is None else ChatTemplate(template, {"bos_token": "<s>"}))


def parse(template: str | None = TEMPLATE, **fields: Any) -> tuple[int, ...]:
    return parse_request(fields, request_id="r", tokenizer=tokenizer_with(template)).prompt


def test_the_template_makes_the_prompt_special_tokens_and_all() -> None:
    assert parse(messages=HI) == (BEGIN, USER, A, BOT)
    assert parse(messages=HI, add_generation_prompt=False) == (BEGIN, USER, A)
    assert parse(messages=HI, add_generation_prompt=None, prompt=None) == (BEGIN, USER, A, BOT)
    assert parse(prompt="a") == (BEGIN, A)


def test_what_has_been_read_is_read_as_itself() -> None:
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
    read = chat.read([{"role": "user", "content": parts, "name": "b"}, {"role": "bot", "content": "", "name": None}])
    assert read == [{"role": "user", "content": "a b", "name": "b"}, {"role": "bot", "content": ""}]
    assert chat.read(read) == read
    assert parse(messages=read) == (BEGIN, USER, A, B, B, BOT, BOT)


@pytest.mark.parametrize("empty", [None, "", [], {}])
def test_fields_of_an_answer_may_be_empty(empty: Any) -> None:
    others = dict.fromkeys(("refusal", "tool_calls", "function_call", "audio", "annotations"), empty)
    assert chat.read([{"role": "assistant", "content": "a"} | others]) == [{"role": "assistant", "content": "a"}]


@pytest.mark.parametrize(
    ("fields", "field", "says"),
    [
        ({"prompt": "a", "messages": HI}, "prompt", "and messages are both given"),
        ({"prompt_token_ids": [1], "messages": HI}, "prompt_token_ids", "and messages are both given"),
        ({"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt", "is only for messages"),
        ({"add_generation_prompt": True}, "prompt", "is missing"),
        ({"messages": HI, "add_generation_prompt": 1}, "add_generation_prompt", "true or false"),
        ({"message": HI}, "message", "did you mean messages?"),
        ({"messages": []}, "messages", "is empty"),
        ({"messages": "a"}, "messages", "a list of messages"),
        ({"messages": HI[0]}, "messages", "a list of messages"),
        ({"messages": ["a"]}, "messages", "must have role and content"),
        ({"messages": HI * (chat.MAX_MESSAGES + 1)}, "messages", "more than 2048"),
        ({"messages": [{"content": "a"}]}, "messages", "role is None"),
        ({"messages": [{"role": "", "content": "a"}]}, "messages", "role is empty"),
        ({"messages": [{"role": "r" * 65, "content": "a"}]}, "messages", "at most 64"),
        ({"messages": [{"role": "user", "content": "a", "name": 7}]}, "messages", "name is 7"),
        ({"messages": [{"role": "user"}]}, "messages", "must be a string"),
        ({"messages": [{"role": "user", "content": b"a"}]}, "messages", "must be a string"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "each part must be text"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 3}]}]}, "messages", "must be text"),
        ({"messages": [{"role": "user", "content": [1] * 2049}]}, "messages", "2048 parts"),
        ({"messages": [{"role": "user", "content": "a", "tool_calls": [{}]}]}, "messages", "tool_calls hold {}"),
        ({"messages": [{"role": "user", "content": "a", "refusal": "no"}]}, "messages", "'refusal', which is not"),
        ({"messages": [{"role": "user", "content": "a", "weight": 0}]}, "messages", "'weight', which is not"),
        ({"messages": [{"role": "user", "content": "\ud83d"}]}, "messages", "tokenised"),
    ],
)
def test_mistakes_are_named(fields: dict[str, Any], field: str, says: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        parse(**fields)
    assert error.value.field == field
    assert says in str(error.value)
    assert len(str(error.value)) < 300


@pytest.mark.parametrize(
    ("template", "says"),
    [
        (None, "need a chat template"),
        ("", "give an empty prompt"),
        ("{{ ' ' }}", "no token"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
    ],
)
def test_a_template_that_makes_no_prompt_of_them(template: str | None, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as error:
        parse(template, messages=HI)
    assert error.value.field == "messages"


def test_a_chat_needs_a_tokenizer() -> None:
    with pytest.raises(InvalidRequest, match="messages: need a tokenizer"):
        parse_request({"messages": HI}, request_id="r", tokenizer=None)
