"""Prompts that cannot fit are refused before they are tokenized; what takes long delays no other call."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import grpc
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from jaxserve.config import EngineConfig
from jaxserve.generation.completion import Assembler
from jaxserve.text.token_sizes import BYTES, most_bytes
from jaxserve.text.tokenizer import Tokenizer
from server.admission import Ticket
from server.http.choices import Choice
from server.limits import MAX_BODY_BYTES
from server.prompts import CallPrompts
from server.proto.jaxserve.v1 import inference_pb2 as pb
from tests.server.conftest import Served
from tests.server.http.http_calls import events, post

Serve = Callable[..., None]
QUEUE = EngineConfig(max_rows=1, max_queued_requests=8, max_queued_tokens=3000)


# Texts that cannot fit


def tokenizer_of(*, full: bool = True, **parts: Any) -> tokenizers.Tokenizer:
    names = list(BYTES) if full else list(BYTES)[:200]
    vocab = {name: i for i, name in enumerate([*names, "aa", "aaaa"] if full else names)}
    made = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[("a", "a"), ("aa", "aa")] if full else []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    for name, part in parts.items():
        setattr(made, name, part)
    return made


def test_the_most_bytes_of_a_token_are_those_of_its_text() -> None:
    made = tokenizer_of()
    assert most_bytes(made, made.get_vocab()) == 4
    tokenizer = Tokenizer(made)
    for text in ("a" * 999, "é" * 999, "漢字" * 500, " \n" * 700, "\0a" * 600):
        assert len(tokenizer.encode(text)) * 4 >= len(text.encode())
    nfc = tokenizer_of(normalizer=normalizers.NFC())
    assert most_bytes(nfc, nfc.get_vocab()) == 12
    jamo = "\u1100\u1161\u11a8" * 800
    assert len(Tokenizer(nfc).encode(jamo)) * 12 >= len(jamo.encode())


@pytest.mark.parametrize(
    "parts",
    [
        {"full": False},
        {"normalizer": normalizers.Strip()},
        {"normalizer": normalizers.NFKC()},
        {"normalizer": normalizers.Sequence([normalizers.NFC(), normalizers.Replace("aa", "a")])},
        {"pre_tokenizer": pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel()])},
        {"pre_tokenizer": pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel()])},
        {"pre_tokenizer": pre_tokenizers.Metaspace()},
    ],
)
def test_a_tokenizer_that_drops_text_has_no_bound(parts: dict[str, Any]) -> None:
    made = tokenizer_of(**parts)
    assert most_bytes(made, made.get_vocab()) is None


def test_a_token_that_takes_spaces_has_no_bound() -> None:
    made = tokenizer_of()
    made.add_special_tokens([tokenizers.AddedToken("<mask>", lstrip=True)])
    assert most_bytes(made, made.get_vocab()) is None


def test_long_texts_tokenize_as_short_ones_do() -> None:
    tokenizer = Tokenizer(tokenizer_of())
    text = "ab é " * 2000
    ids = tokenizer.encode(text)
    assert ids == tokenizer.encode("ab é ") * 2000
    assert tokenizer.decode(ids) == text


def test_a_text_that_cannot_fit_is_not_tokenized(serve_http: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "a" * (MAX_BODY_BYTES - 1000)

    async def scenario(it: Served) -> None:
        monkeypatch.setattr(Tokenizer, "encode", lambda *_args, **_more: pytest.fail("it is tokenized"))
        for path, field in (("/v1/completions", "prompt"), ("/generate", "inputs"), ("/tokenize", "prompt")):
            status, answer = await post(it, path, **{field: text})
            assert status in (400, 422)
            assert "more tokens than fit" in str(answer)
        for method, message in (
            (it.stub.Generate, pb.GenerateRequest(prompt=text)),
            (it.stub.Tokenize, pb.TokenizeRequest(text=text)),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await method(message)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert it.app.handler.admission.reserved_tokens == 0

    serve_http(scenario)


def test_a_text_that_is_cut_may_be_longer(serve_http: Serve) -> None:
    async def scenario(it: Served) -> None:
        fields = {"prompt": "a" * 50_000 + "bc", "max_tokens": 2, "truncate_prompt_tokens": 2}
        status, answer = await post(it, "/v1/completions", **fields)
        assert (status, answer["choices"][0]["text"]) == (200, "bc")

    serve_http(scenario)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": ["abc"] * 100, "max_tokens": 1, "logprobs": 2}),
        ("/score", {"text_1": "a", "text_2": ["abc" * 30] * 100}),
    ],
)
def test_many_short_texts_are_handled_beside_the_event_loop(
    serve_http: Serve, path: str, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Together they take as long as a long one: to tokenize, to make requests of, and to answer."""
    seen = []

    def noting(owner: Any, name: str) -> None:
        work = getattr(owner, name)

        def noted(*args: Any, **more: Any) -> Any:
            seen.append((name, threading.current_thread() is threading.main_thread()))
            return work(*args, **more)

        monkeypatch.setattr(owner, name, noted)

    async def scenario(it: Served) -> None:
        for owner, name in ((Tokenizer, "encode"), (Assembler, "__init__"), (Assembler, "completion")):
            noting(owner, name)
        status, answer = await post(it, path, **fields)
        assert status == 200, answer
        assert {name for name, _ in seen} == {"encode", "__init__", "completion"}
        assert not [name for name, is_main in seen if is_main]

    serve_http(scenario)


def test_many_scored_tokens_of_a_stream_are_too(serve_http: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces, seen = Choice.pieces, []

    def noted(self: Choice, delta: Any) -> Any:
        seen.append((len(delta.prompt_logprobs) > 40, threading.current_thread() is threading.main_thread()))
        return pieces(self, delta)

    async def scenario(it: Served) -> None:
        fields = {"prompt": "a" * 100, "max_tokens": 1, "prompt_logprobs": 2, "stream": True}
        assert [each async for each in events(it, "/v1/completions", **fields)]
        assert (True, False) in seen
        assert (True, True) not in seen

    monkeypatch.setattr(Choice, "pieces", noted)
    serve_http(scenario)


# What can never fit


def test_what_can_never_fit_is_told_so_while_others_wait(serve_http: Serve) -> None:
    async def scenario(it: Served) -> None:
        async def ask(**fields: Any) -> tuple[int, str]:
            status, answer = await post(it, "/v1/completions", **fields)
            return status, str(answer)

        async with asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(ask(prompt="abc", max_tokens=2))
            await it.until(lambda: it.engine.load().waiting == 1)
            assert (await ask(prompt="a" * 4000))[0] == 400
            assert (await ask(prompt=[97] * 4000))[0] == 400
            assert (await ask(prompt="a" * 2047, max_tokens=2))[0] == 400
            assert (await ask(prompt=["a"] * 9))[0] == 400
            assert (await ask(prompt="a", n=9))[0] == 400
            chat = {"messages": [{"role": "user", "content": "a" * 4000}]}
            assert (await post(it, "/v1/chat/completions", **chat))[0] == 400
            assert (await ask(prompt=["a"] * 8))[0] == 429  # these fit once nobody waits
            it.engine.release()
        assert waiting.result()[0] == 200

    serve_http(scenario, held=True, config=QUEUE)


def test_a_prompt_reserves_no_more_than_fits(serve_http: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ticket, "correct", lambda *_args: pytest.fail("it reserves what does not fit"))
    seen = []

    async def scenario(it: Served) -> None:
        async def slowly(self: CallPrompts) -> Any:
            seen.append(it.app.handler.admission.reserved_tokens)
            await asyncio.sleep(0)
            return await parse(self)

        parse = CallPrompts.parse
        monkeypatch.setattr(CallPrompts, "parse", slowly)
        for size in (100_000, 4000):  # the second may be few tokens, for all that its bytes tell
            chat = {"messages": [{"role": "user", "content": "a" * size}]}
            assert (await post(it, "/v1/chat/completions", **chat))[0] == 400

    serve_http(scenario, config=QUEUE)
    assert seen == [2048, 2048]
