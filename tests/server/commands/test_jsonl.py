"""Files of JSON lines: answered in order, each as soon as it is its turn, whatever the other lines hold."""

import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from jaxserve.config import EngineConfig
from jaxserve.text.chat_template import ChatTemplate
from jaxserve.text.tokenizer import Tokenizer
from server.commands.jsonl import EngineFailed, LineResult, LineServer
from tests.server.fake_engine import EOS, WAIT_SECONDS, FakeEngine, byte_tokenizer

Complete = Callable[..., list[dict[str, Any]]]


def encoded(*lines: Any) -> list[bytes]:
    return [json.dumps(line).encode() + b"\n" for line in lines]


def answers(
    engine: FakeEngine, source: Any, defaults: dict[str, Any] | None = None, window: int = 8
) -> Iterator[LineResult]:
    server = LineServer(engine, defaults or {}, window=window)  # pyright: ignore[reportArgumentType]
    return server.answers(source)


@pytest.fixture
def complete(tokenizer: Tokenizer) -> Complete:
    """Runs lines through a fake engine; gives back the output lines."""

    def run(*lines: Any, raw: list[bytes] | None = None, defaults: dict[str, Any] | None = None, **engine: Any):
        with FakeEngine(**{"tokenizer": tokenizer} | engine) as it:
            found = list(answers(it, raw or encoded(*lines), defaults))
        return [json.loads(answer.encoded) for answer in found]

    return run


def test_a_line_is_answered_with_what_it_asked_for(complete: Complete) -> None:
    plain, full = complete(
        {"id": "a", "prompt": "ab", "max_tokens": 3, "seed": 7},
        {"prompt_token_ids": [97, EOS], "temperature": 0, "logprobs": 1, "prompt_logprobs": 0},
    )
    assert plain == {"id": "a", "text": "aba", "token_ids": [97, 98, 97], "finish_reason": "length", "seed": 7}
    assert full == {
        "id": 2,  # the line's number
        "text": "a",
        "token_ids": [97, EOS],
        "finish_reason": "eos",
        "logprobs": [0.0, -0.25],
        "top_logprobs": [{"0": 0.0}, {"1": 0.0}],
        "prompt_logprobs": [None, -0.25],
    }


def test_answers_come_in_the_order_of_the_input(complete: Complete) -> None:
    lengths = [40, 1, 7, 30, 2, 2, 90, 1, 1, 5] * 10
    found = complete(*({"prompt": "ab", "max_tokens": n} for n in lengths))
    assert [line["id"] for line in found] == list(range(1, 101))
    assert [len(line["token_ids"]) for line in found] == lengths


def test_defaults_hold_where_a_line_says_nothing(complete: Complete) -> None:
    found = complete(
        {"prompt": "abc"}, {"prompt": "abc", "max_tokens": 1}, {"prompt": "abc", "max_tokens": None, "stop": "b"},
        defaults={"max_tokens": 2, "stop": ["c"]},
    )  # fmt: skip
    assert [line["text"] for line in found] == ["ab", "a", "a"]


@pytest.mark.parametrize(
    ("line", "error"),
    [
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"7", "JSON object"),
        (b'{"id": "x"}', "prompt"),
        (b'{"prompt": ""}', "prompt"),
        (b'{"prompt": "\\ud800"}', "prompt"),
        (b'{"prompt": "a", "max_token": 3}', "max_tokens?"),
        (b'{"prompt": "a", "temperature": NaN}', "temperature"),
        (b'{"prompt": "a", "max_tokens": 1e3}', "max_tokens"),
        (b'{"prompt_token_ids": [257]}', "prompt_token_ids"),
        (b'{"prompt": "a", "max_tokens": 2048}', "max_tokens"),
        (b'{"prompt": "a", "id": [1]}', "id"),
        (b'{"prompt": "!"}', "poison"),
    ],
)
def test_bad_line_fails_alone(tokenizer: Tokenizer, line: bytes, error: str) -> None:
    good = b'{"prompt": "ab", "max_tokens": 3}\n'
    with FakeEngine(tokenizer=tokenizer, poison=frozenset(b"!")) as engine:
        found = list(answers(engine, [good, line + b"\n", good]))
    assert [answer.number for answer in found] == [1, 2, 3]
    assert found[0].error is found[2].error is None
    assert [json.loads(found[i].encoded)["text"] for i in (0, 2)] == ["aba", "aba"]
    assert error in (found[1].error or "")
    assert json.loads(found[1].encoded) == {"id": "x" if b'"x"' in line else 2, "error": found[1].error}


def test_a_line_may_be_a_chat(complete: Complete) -> None:
    source = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    chat = {"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}], "max_tokens": 4}
    found = complete(
        chat, chat | {"add_generation_prompt": False}, chat | {"prompt": "ab"}, {"prompt": "ab", "max_tokens": 3},
        tokenizer=byte_tokenizer(chat_template=ChatTemplate(source, {})),
    )  # fmt: skip
    assert [line.get("text") for line in found] == ["ab>a", "abab", None, "aba"]
    assert found[2]["error"] == "prompt: and messages are both given; give one"


def test_blank_lines_are_passed_over_and_counted(complete: Complete) -> None:
    found = complete(raw=[b'{"prompt": "a", "max_tokens": 1}\n', b"\n", b"  \r\n", b'{"prompt": "b", "max_tokens": 1}'])
    assert [line["id"] for line in found] == [1, 4]


def test_ids_are_given_back_as_they_came_and_may_repeat(complete: Complete) -> None:
    ids = ["same", "same", 0, -1.5, "é\u2028\ud800"]
    found = complete(*({"id": i, "prompt": "ab", "max_tokens": 2} for i in ids))
    assert [line["id"] for line in found] == ids


def test_a_line_ended_by_a_stop_string_leaves_the_engine(tokenizer: Tokenizer) -> None:
    with FakeEngine(tokenizer=tokenizer, max_context=10**9) as engine:
        (answer,) = answers(engine, encoded({"prompt": "abc", "max_tokens": 10**8, "stop": ["ca"]}))
        assert json.loads(answer.encoded)["text"] == "ab"
        engine.wait_until(lambda: engine.load().slots_used == 0)


def test_a_full_queue_is_waited_for(complete: Complete) -> None:
    found = complete(
        *({"prompt": "abc", "max_tokens": 4} for _ in range(30)),
        config=EngineConfig(max_rows=2, max_queued_requests=1),
    )
    assert [line.get("text") for line in found] == ["abca"] * 30


def test_an_endless_input_is_read_only_as_far_as_the_window(tokenizer: Tokenizer) -> None:
    read = 0
    asked = threading.Semaphore(0)

    def endless() -> Iterator[bytes]:
        nonlocal read
        while True:
            read += 1
            asked.release()
            yield b'{"prompt": "ab", "max_tokens": 1}\n'

    with FakeEngine(tokenizer=tokenizer, held=True) as engine:
        source = endless()
        found = answers(engine, source, window=5)
        threading.Timer(0, engine.release).start()
        for _ in range(20):
            next(found)
        found.close()
        assert read <= 20 + 5 + 1


def test_finished_line_does_not_wait_for_more_input(tokenizer: Tokenizer) -> None:
    """A program that writes a line and waits for its answer before it writes the next is served."""
    answered = threading.Semaphore(0)

    def dialogue() -> Iterator[bytes]:
        for _ in range(3):
            yield b'{"prompt": "ab", "max_tokens": 2}\n'
            assert answered.acquire(timeout=WAIT_SECONDS)

    with FakeEngine(tokenizer=tokenizer) as engine:
        for answer in answers(engine, dialogue()):
            assert json.loads(answer.encoded)["text"] == "ab"
            answered.release()


def test_leaving_early_ends_what_is_under_way(tokenizer: Tokenizer) -> None:
    with FakeEngine(tokenizer=tokenizer, max_context=10**9) as engine:
        found = answers(engine, encoded({"prompt": "a", "max_tokens": 1}, *[{"prompt": "b", "max_tokens": 10**8}] * 3))
        next(found)
        found.close()
        engine.wait_until(lambda: engine.load().slots_used == 0 and engine.load().waiting == 0)


def test_a_failed_engine_ends_the_run(tokenizer: Tokenizer) -> None:
    with FakeEngine(tokenizer=tokenizer, held=True) as engine:
        found = answers(engine, encoded(*[{"prompt": "ab", "max_tokens": 2}] * 3))
        threading.Thread(target=lambda: (engine.wait_until(lambda: engine.load().waiting == 3), engine.fail())).start()
        with pytest.raises(EngineFailed):
            list(found)


def test_failed_engine_ends_the_run(tokenizer: Tokenizer) -> None:
    with FakeEngine(tokenizer=tokenizer) as engine:
        engine.fail()
        with pytest.raises(EngineFailed, match="takes no more requests"):
            list(answers(engine, encoded({"prompt": "ab", "max_tokens": 2})))


def test_an_unreadable_input_is_raised_where_it_is_used(tokenizer: Tokenizer) -> None:
    def broken() -> Iterator[bytes]:
        yield b'{"prompt": "ab", "max_tokens": 2}\n'
        raise OSError(5, "Input/output error")

    with FakeEngine(tokenizer=tokenizer) as engine, pytest.raises(OSError, match="Input/output"):
        list(answers(engine, broken()))
