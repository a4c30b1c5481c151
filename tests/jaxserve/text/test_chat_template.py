"""Chat templates: found where checkpoints have them, and harmless."""

import json
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from jaxserve.text import chat_template
from jaxserve.text.chat_template import ChatTemplate
from jaxserve.text.template_process import SECONDS


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


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",  # no text, no end
        "{% set n = 10**(10**8) %}",  # one instruction of the interpreter
        "{{ 'a' * 10**9 }}",  # while it is compiled
        "{% set all = [messages] * 10**8 %}{{ all | length }}",
        "{{ messages[0].content | center(10**10) }}",
    ],
)
def test_time_and_memory_of_a_template_are_bounded(source: str) -> None:
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    with pytest.raises(ValueError, match="exceed the limits of a chat"):
        ChatTemplate(source, {}).render(messages("Hi"), add_generation_prompt=True)
    assert time.monotonic() - started < 2 * SECONDS + 10.0  # the process starts again, perhaps on a busy machine
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**15  # KiB, of this process
    good = ChatTemplate("{{ messages[0].content }}", {})
    assert good.render(messages("Hi"), add_generation_prompt=True) == "Hi"


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}", "recursion"),
        ("{{ range(10**9) | list }}", "too big"),
        ("{{ [1, 2].__init__.__globals__ }}", "unsafe"),
    ],
)
def test_what_a_template_must_not_do_is_an_error_of_the_chat(source: str, told: str) -> None:
    with pytest.raises(ValueError, match=f"do not suit this checkpoint's chat template: .*{told}"):
        ChatTemplate(source, {}).render(messages("Hi"), add_generation_prompt=True)


@pytest.mark.parametrize(
    "source", ["{{ " + "(" * 50_000 + ")" * 50_000 + " }}", "{{ 1" + "0" * 5000 + " }}", "a" * 2**19]
)
def test_a_source_that_cannot_be_parsed_is_refused(source: str) -> None:
    with pytest.raises(ValueError, match="the chat template"):
        ChatTemplate(source, {})


def test_a_long_chat_does_not_delay_a_short_one() -> None:
    slow = ChatTemplate("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", {})
    quick = ChatTemplate("{{ messages[0].content }}", {})
    quick.render(messages("Hi"), add_generation_prompt=True)
    ended: list[str] = []

    def long() -> None:
        with pytest.raises(ValueError, match="exceed the limits"):
            slow.render(messages("a" * 10**5), add_generation_prompt=True)
        ended.append("long")

    thread = threading.Thread(target=long)
    thread.start()
    while thread.is_alive() and not chat_template._PROCESSES[1]._lock.locked():
        time.sleep(0.001)
    quick.render(messages("Hi"), add_generation_prompt=True)
    assert not ended
    thread.join()
    assert ended


def test_the_process_starts_again_and_ends_with_the_program() -> None:
    program = """if True:
        import os, signal, threading, time
        from jaxserve.text import chat_template
        template = chat_template.ChatTemplate("{{ messages[0].content }}", {})
        render = lambda: template.render([{"content": "Hi"}], add_generation_prompt=True)
        assert render() == "Hi"
        process = chat_template._PROCESSES[0]._process
        process.kill()
        process.wait()
        assert render() == "Hi"
        print(chat_template._PROCESSES[0]._process.pid, flush=True)
        endless = chat_template.ChatTemplate("{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3, {})
        threading.Thread(target=endless.render, args=([],), kwargs={"add_generation_prompt": True}).start()
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    left = Path("/proc", done.stdout.strip(), "cmdline")
    assert done.stdout.strip().isdecimal(), done.stderr
    until = time.monotonic() + 15.0
    while left.exists() and left.read_bytes():  # a process that has ended has an empty command line
        assert time.monotonic() < until, "it goes on without its parent"
        time.sleep(0.01)


def test_what_a_template_says_is_told_to_a_length() -> None:
    with pytest.raises(ValueError, match=r"do not suit .*: aaa") as error:
        ChatTemplate("{{ raise_exception(messages[0].content) }}", {}).render(
            messages("a" * 100_000), add_generation_prompt=True
        )
    assert len(str(error.value)) < 300


def test_a_template_of_its_own_for_chats_with_tools(tmp_path: Path) -> None:
    templates = {"default": "{{ messages[0].content }}", "tool_use": "{{ tools | length }} <tool_call>"}
    listed = [{"name": name, "template": source} for name, source in templates.items()]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": listed}))
    template = ChatTemplate.from_directory(tmp_path)
    assert template is not None
    assert template.tool_form == "hermes"
    message = {"role": "user", "content": "Hi"}
    assert template.render([message], add_generation_prompt=True) == "Hi"
    assert template.render([message], add_generation_prompt=True, tools=[{}, {}]) == "2 <tool_call>"
