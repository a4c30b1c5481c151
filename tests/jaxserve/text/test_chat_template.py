"""Chat templates: found where checkpoints have them, and harmless."""

import json
from pathlib import Path
from typing import Any

import pytest

from jaxserve.text.chat_template import ChatTemplate


def messages(*texts: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text} for text in texts]


def test_a_template_is_found_where_checkpoints_have_it(tmp_path: Path) -> None:
    assert ChatTemplate.from_directory(tmp_path) is None
    config: dict[str, Any] = {"bos_token": {"content": "<s>"}, "eos_token": "</s>"}
    source = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"
    for found in (source, [{"name": "tools", "template": "no"}, {"name": "default", "template": source}]):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": found}))
        template = ChatTemplate.from_directory(tmp_path)
        assert template is not None
        assert template.render(messages("Hi"), add_generation_prompt=True) == "<s>Hi</s>"
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}\n{{ m.content | tojson }}{% endfor %}")
    template = ChatTemplate.from_directory(tmp_path)
    assert template is not None
    assert template.render(messages("é"), add_generation_prompt=True) == '"é"'
    (tmp_path / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(ValueError, match="not valid Jinja"):
        ChatTemplate.from_directory(tmp_path)


@pytest.mark.parametrize(
    "found",
    [
        7,
        {"default": "a"},
        ["a"],
        [{"name": "default"}],
        [{"name": "default", "template": 7}],
        [{"name": "default", "template": "a"}, {"name": "tool_use", "template": 7}],
    ],
)
def test_one_that_is_no_text_is_refused_with_its_file(tmp_path: Path, found: Any) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": found}))
    with pytest.raises(ValueError, match=r"tokenizer_config\.json"):
        ChatTemplate.from_directory(tmp_path)


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages[3].content.missing }}", "undefined|no element|has no"),
        ("{% for i in range(90000) %}{{ messages[0].content * 100 }}{% endfor %}", "exceed the limits"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{{ '' }}{% endfor %}{% endfor %}", "exceed the limits"),
    ],
)
def test_a_template_cannot_do_harm(source: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        ChatTemplate(source, {}).render(messages("Hi"), add_generation_prompt=True)


def test_what_a_template_says_is_told_to_a_length() -> None:
    with pytest.raises(ValueError, match=r"do not suit .*: aaa") as error:
        ChatTemplate("{{ raise_exception(messages[0].content) }}", {}).render(
            messages("a" * 100_000), add_generation_prompt=True
        )
    assert len(str(error.value)) < 300


def test_a_checkpoint_may_have_another_template_for_chats_with_tools(tmp_path: Path) -> None:
    templates = {"default": "{{ messages[0].content }}", "tool_use": "{{ tools | length }} <tool_call>"}
    listed = [{"name": name, "template": source} for name, source in templates.items()]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": listed}))
    template = ChatTemplate.from_directory(tmp_path)
    assert template is not None
    assert template.tool_form == "hermes"
    message = {"role": "user", "content": "Hi"}
    assert template.render([message], add_generation_prompt=True) == "Hi"
    assert template.render([message], add_generation_prompt=True, tools=[{}, {}]) == "2 <tool_call>"
