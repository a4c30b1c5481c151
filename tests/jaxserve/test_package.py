"""What a person meets first in Python: the version, the demo model, progress, readable values, chats."""

import io
import subprocess
import sys
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

import jaxserve
from jaxserve import progress_bars, startup
from jaxserve.config import EngineConfig
from jaxserve.demo import DEMO_MODEL
from jaxserve.engine import Engine
from jaxserve.generation.completion import Completion
from jaxserve.request import FinishReason


def test_the_version_needs_no_jax() -> None:
    assert jaxserve.__version__ == metadata.version("jaxserve")
    code = "import jaxserve, sys; jaxserve.__version__; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = jaxserve.nothing


class Started(Exception):
    pass


@pytest.mark.parametrize("chosen", [None, startup.silent])
def test_an_engine_is_the_demo_models_and_shows_its_progress(monkeypatch: pytest.MonkeyPatch, chosen: Any) -> None:
    out = io.StringIO()
    terminal = Console(file=out, force_terminal=True, width=100)
    monkeypatch.setattr(progress_bars, "Console", lambda **_: terminal)

    def start(path: Any, config: EngineConfig, progress: Any) -> None:
        progress("reading weights", 1, 2)
        raise Started(path)

    monkeypatch.setattr(startup, "from_checkpoint", start)
    with pytest.raises(Started) as ended:
        Engine.from_checkpoint(progress=chosen)
    assert ended.value.args == (DEMO_MODEL,)
    assert ("reading weights" in out.getvalue()) == (chosen is None)


def test_without_a_terminal_each_step_is_told_once() -> None:
    out, steps = io.StringIO(), []
    with progress_bars.progress_bars(Console(file=out), steps.append) as show:
        for done in range(3):
            show("reading weights", done, 2)
        show("compiling", 0, 1)
    assert (steps, out.getvalue()) == (["reading weights", "compiling"], "")


def test_a_completion_shows_its_text_first() -> None:
    made = Completion(request_id="r", text=" very", token_ids=(5, 6), finish_reason=FinishReason.LENGTH, seed=7)
    assert repr(made) == (
        "Completion(text=' very', request_id='r', finish_reason='length', seed=7, prompt_tokens=0, cached_tokens=0, "
        "token_ids=(5, 6))"
    )


def test_an_engine_says_what_it_is() -> None:
    report = SimpleNamespace(family="bloom", parameters=2568000, dtype="float32", device="cpu", slots=4096)
    assert Engine.__repr__(SimpleNamespace(report=report)) == (  # pyright: ignore[reportArgumentType]
        "Engine(bloom, 2,568,000 parameters, float32, cpu, 4,096 slots)"
    )


def test_a_chat_is_one_prompt_with_its_own_fields() -> None:
    told: list[Any] = []

    def generate(prompt: Any, **fields: Any) -> list[str]:
        told.append((prompt, fields))
        return ["answer"]

    engine: Any = SimpleNamespace(generate=generate)
    messages = [{"role": "user", "content": "Hi"}]
    assert Engine.chat(engine, "Hi", max_tokens=3) == "answer"
    assert Engine.chat(engine, messages, chat_template_kwargs={"a": 1}, add_generation_prompt=False, seed=1) == "answer"
    assert told == [
        ({"messages": messages}, {"max_tokens": 3}),
        ({"messages": messages, "add_generation_prompt": False, "chat_template_kwargs": {"a": 1}}, {"seed": 1}),
    ]
