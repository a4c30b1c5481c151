"""What a full queue refuses: what can never fit is told so, what could is told when to come back."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import httpx2 as httpx
import pytest

import server.text
from jaxserve.config import EngineConfig
from jaxserve.text.tokenizer import Tokenizer
from server.auth import ApiKeys
from server.grpc.server import ROUTER_SERVICES, SERVICE
from server.proto.inference.open_inference_grpc_pb2_grpc import GRPCInferenceServiceStub
from server.proto.jaxserve.v1 import inference_pb2 as pb
from server.proto.vllm.grpc.engine.vllm_engine_pb2_grpc import VllmEngineStub
from server.text import REQUEST_WORK
from tests.server.compat import test_kserve_infer as kserve
from tests.server.compat import vllm_calls
from tests.server.conftest import Served
from tests.server.http.http_calls import post

Serve = Callable[..., None]
QUEUE = EngineConfig(max_rows=1, max_queued_requests=2)
CONTEXT = 2048  # of the engine; a token stands for one byte here, and for up to five as far as its tokenizer tells
COMPLETIONS, CHATS, KSERVE = "/v1/completions", "/v1/chat/completions", "/v2/models/echo"
LONG = "a" * CONTEXT  # too many tokens, and not too many bytes
BEAMS = {"use_beam_search": True, "n": 2, "max_tokens": 3}


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@contextlib.asynccontextmanager
async def full(it: Served) -> AsyncIterator[None]:
    """The queue is full while the block lasts."""
    async with asyncio.TaskGroup() as tasks:
        for waiting in (1, 2):
            tasks.create_task(post(it, COMPLETIONS, prompt="abc", max_tokens=2))
            await it.until(lambda waiting=waiting: it.engine.load().waiting == waiting)
        yield
        assert it.engine.load().waiting == 2
        admission = it.app.handler.admission
        assert (admission.reserved_requests, admission.reserved_tokens, admission.kept_requests) == (0, 0, 0)
        it.engine.release()


# (path, what fits, what can never fit)
HTTP: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "bytes": (COMPLETIONS, {"prompt": "a" * 2000}, {"prompt": LONG * 6}),
    "tokens": (COMPLETIONS, {"prompt": "a" * 2047, "max_tokens": 1}, {"prompt": LONG}),
    "ids": (COMPLETIONS, {"prompt": [97] * 2000}, {"prompt": [97] * 2048}),
    "many ids": (COMPLETIONS, {"prompt": [97]}, {"prompt": [97] * 9000}),
    "an id": (COMPLETIONS, {"prompt": [97]}, {"prompt": [97] * 2040 + [999]}),
    "text and answer": (COMPLETIONS, {"prompt": "a", "max_tokens": 2047}, {"prompt": "ab", "max_tokens": 2047}),
    "ids and answer": (COMPLETIONS, {"prompt": [97], "max_tokens": 2047}, {"prompt": [97, 98], "max_tokens": 2047}),
    "batch": (COMPLETIONS, {"prompt": ["a", "b"]}, {"prompt": ["a", LONG]}),
    "batch of ids": (COMPLETIONS, {"prompt": [[97], [98]]}, {"prompt": [[97], [97] * 2048]}),
    "many prompts": (COMPLETIONS, {"prompt": ["a"] * 2}, {"prompt": ["a"] * 3}),
    "n": (COMPLETIONS, {"prompt": "a", "n": 2}, {"prompt": "a", "n": 3}),
    "n and answer": (COMPLETIONS, {"prompt": "a", "n": 2}, {"prompt": "a", "n": 2, "max_tokens": 2048}),
    "cut": (
        COMPLETIONS,
        {"prompt": LONG, "truncate_prompt_tokens": 48, "max_tokens": 2000},
        {"prompt": LONG, "truncate_prompt_tokens": 49, "max_tokens": 2000},
    ),
    "beams": (COMPLETIONS, {"prompt": "a"} | BEAMS, {"prompt": LONG} | BEAMS),
    "beams in a batch": (COMPLETIONS, {"prompt": ["a", "b"]} | BEAMS, {"prompt": ["a", LONG]} | BEAMS),
    "wide beams": (COMPLETIONS, {"prompt": "a"} | BEAMS, {"prompt": "a"} | BEAMS | {"n": 3}),
    "stream": (COMPLETIONS, {"prompt": "a", "stream": True}, {"prompt": LONG, "stream": True}),
    "chat": (CHATS, {"messages": chat("a" * 1900)}, {"messages": chat(LONG)}),
    "chat and template": (CHATS, {"messages": chat("a")}, {"messages": chat("a" * 2041)}),  # which adds 7 and 5
    "chat and answer": (
        CHATS,
        {"messages": chat("a"), "max_tokens": 2000},
        {"messages": chat("a"), "max_tokens": 2047},
    ),
    "many bytes of a chat": (CHATS, {"messages": chat("a" * 500) * 3}, {"messages": chat("a" * 500) * 90}),
    "a response": ("/v1/responses", {"input": "a"}, {"input": LONG}),
    "an embedding": ("/v1/embeddings", {"input": "a" * 2000}, {"input": LONG}),
    "a score": ("/score", {"text_1": "a", "text_2": "b" * 2000}, {"text_1": "a" * 1024, "text_2": "b" * 1024}),
    "ranks": ("/rerank", {"query": "a", "documents": ["b"]}, {"query": "a", "documents": ["b", LONG]}),
    "TGI": ("/generate", {"inputs": "a"}, {"inputs": LONG}),
    "TGI's answer": ("/", {"inputs": "a"}, {"inputs": "a", "parameters": {"max_new_tokens": 2048}}),
    "KServe": (f"{KSERVE}/infer", {"inputs": [kserve.text("a")]}, {"inputs": [kserve.text("a", LONG)]}),
    "KServe's text": (f"{KSERVE}/generate", {"text_input": "a"}, {"text_input": LONG}),
}


@pytest.mark.parametrize("form", HTTP)
def test_what_can_never_fit_is_told_so_by_a_full_queue(serve_http: Serve, form: str) -> None:
    path, fits, never = HTTP[form]

    async def scenario(it: Served) -> None:
        async with full(it), httpx.AsyncClient(base_url=it.url, timeout=None) as client:
            answer = await client.post(path, json=fits)
            assert (answer.status_code, int(answer.headers["retry-after"]) > 0) == (429, True), answer.text
            answer = await client.post(path, json=never)
            assert answer.status_code in (400, 422), answer.text
        assert (await post(it, path, **never))[0] == answer.status_code  # as when the queue is empty
        if "stream" not in fits:
            assert (await post(it, path, **fits))[0] == 200

    serve_http(scenario, held=True, config=QUEUE)


def ids(count: int) -> pb.TokenIds:
    return pb.TokenIds(ids=[97] * count)


GRPC: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "bytes": ({"prompt": "a"}, {"prompt": LONG * 6}),
    "tokens": ({"prompt": "a" * 2000, "max_tokens": 9}, {"prompt": LONG}),
    "ids": ({"prompt_token_ids": ids(2000), "max_tokens": 9}, {"prompt_token_ids": ids(2048)}),
    "text and answer": ({"prompt": "a", "max_tokens": 2047}, {"prompt": "ab", "max_tokens": 2047}),
    "chat": ({"messages": chat("a")}, {"messages": chat(LONG)}),
    "n": ({"prompt": "a", "n": 2}, {"prompt": "a", "n": 3}),
    "beams": ({"prompt": "a"} | BEAMS, {"prompt": LONG} | BEAMS),
}


@pytest.mark.parametrize("form", GRPC)
def test_what_can_never_fit_is_told_so_over_grpc(serve_http: Serve, form: str) -> None:
    async def scenario(it: Served) -> None:
        codes = (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INVALID_ARGUMENT)
        async with full(it):
            for fields, code in zip(GRPC[form], codes, strict=True):
                request = pb.GenerateRequest(**fields)
                calls = [it.stub.Generate(request)]
                if "use_beam_search" not in fields:
                    calls.append(it.stub.GenerateStream(request).read())
                for call in calls:
                    with pytest.raises(grpc.aio.AioRpcError) as caught:
                        await call
                    assert caught.value.code() is code, caught.value.details()

    serve_http(scenario, held=True, config=QUEUE)


def test_routers_are_told_so_as_well(serve_http: Serve) -> None:
    async def scenario(it: Served) -> None:
        vllm: Any = VllmEngineStub(it.channel)
        infer: Any = GRPCInferenceServiceStub(it.channel)
        async with full(it):
            for text, code in (
                ("a", grpc.StatusCode.RESOURCE_EXHAUSTED),
                (LONG, grpc.StatusCode.INVALID_ARGUMENT),
            ):
                for call in (vllm.Generate(vllm_calls.ask(text)).read(), infer.ModelInfer(kserve.message(text))):
                    with pytest.raises(grpc.aio.AioRpcError) as caught:
                        await call
                    assert caught.value.code() is code, caught.value.details()
                stream = infer.ModelStreamInfer(iter([kserve.message(text)]))
                assert ("waiting" in (await stream.read()).error_message) == (text == "a")

    serve_http(scenario, held=True, config=QUEUE)


def test_a_deadline_does_not_hide_it(serve_http: Serve) -> None:
    async def scenario(it: Served) -> None:
        it.engine.owed_elsewhere = 10**12
        for text, status in (("a", 504), (LONG, 400)):
            assert (await post(it, COMPLETIONS, prompt=text, timeout=1.0))[0] == status

    serve_http(scenario)


# What a refusal costs


def test_what_fits_by_its_bytes_is_refused_unseen(serve_http: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def noted(*args: Any, **more: Any) -> list[int]:
        seen.append(args)
        return encode(*args, **more)

    async def scenario(it: Served) -> None:
        async with full(it):
            monkeypatch.setattr(Tokenizer, "encode", noted)
            assert (await post(it, COMPLETIONS, prompt="a" * 2000))[0] == 429
            assert (await post(it, COMPLETIONS, prompt=["a" * 2000] * 2, logprobs=1))[0] == 429
            assert (await post(it, COMPLETIONS, prompt=LONG * 6))[0] == 400
            assert (await post(it, CHATS, messages=chat("a" * 1900)))[0] == 429
            for text, code in (("a" * 1000, "RESOURCE_EXHAUSTED"), (LONG * 6, "INVALID_ARGUMENT")):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await it.stub.Generate(pb.GenerateRequest(prompt=text))
                assert caught.value.code().name == code
            assert not seen
            assert (await post(it, COMPLETIONS, prompt=LONG))[0] == 400
            assert len(seen) == 1

    encode = Tokenizer.encode
    serve_http(scenario, held=True, config=QUEUE)


@pytest.mark.parametrize(
    ("path", "fields", "work"),
    [
        (COMPLETIONS, {"prompt": LONG}, CONTEXT + REQUEST_WORK),
        (CHATS, {"messages": chat(LONG)}, 4001),  # as any short chat
        ("/score", {"text_1": "a" * 1024, "text_2": "b" * 1024}, CONTEXT + REQUEST_WORK),
    ],
)
def test_refused_texts_take_turns_on_one_thread(
    serve_http: Serve, path: str, fields: dict[str, Any], work: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode, may_go_on = Tokenizer.encode, threading.Event()
    under_way = most = 0

    def slowly(*args: Any, **more: Any) -> list[int]:
        nonlocal under_way, most
        assert threading.current_thread() is not threading.main_thread()  # which it would stop
        under_way += 1
        most = max(most, under_way)
        may_go_on.wait()
        under_way -= 1
        return encode(*args, **more)

    async def scenario(it: Served) -> None:
        monkeypatch.setattr(Tokenizer, "encode", slowly)
        async with asyncio.TaskGroup() as tasks:
            for _ in range(2):
                tasks.create_task(post(it, COMPLETIONS, prompt=[97], max_tokens=2))
            await it.until(lambda: it.engine.load().waiting == 2)
            calls = [tasks.create_task(post(it, path, **fields)) for _ in range(5)]
            try:
                await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
                while sum(each.done() for each in calls) < 2:
                    await asyncio.sleep(0)
                assert [each.result()[0] for each in calls if each.done()] == [429, 429]
                assert (await post(it, COMPLETIONS, prompt="a"))[0] == 429  # others are not delayed
            finally:
                may_go_on.set()
            await asyncio.wait(calls)
            it.engine.release()
        assert sorted(each.result()[0] for each in calls) == [400, 400, 400, 429, 429]
        assert most == 1

    monkeypatch.setattr(server.text, "MAX_REFUSED_TEXT", 3 * work)
    serve_http(scenario, held=True, config=QUEUE)


def test_a_full_queue_reads_what_it_is_sent(serve_http: Serve) -> None:
    """A wrong call is told so; one whose message does not come is not refused before it has."""

    async def scenario(it: Served) -> None:
        methods = (f"/{SERVICE}/Generate", f"/{SERVICE}/GenerateStream", f"/{ROUTER_SERVICES[0]}/Generate")
        async with full(it), httpx.AsyncClient(base_url=it.url, headers={"content-type": "application/json"}) as client:
            for path in (COMPLETIONS, CHATS, "/generate", "/generate_stream", "/", f"{KSERVE}/infer", "/tokenize"):
                assert (await client.post(path, content=b"no JSON")).status_code in (400, 422), path
            for method in methods:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await it.channel.unary_unary(method)(b"\xff")
                assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            it.app.handler.close("closing")
            for prompt in ("abc", LONG):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await it.stub.Generate(pb.GenerateRequest(prompt=prompt))
                assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            it.app.handler.open()

    serve_http(scenario, held=True, config=QUEUE)


def test_a_refused_call_counts_against_the_rate(serve_http: Serve, tmp_path: Path) -> None:
    """Otherwise a flood of them would cost more than the rate allows."""
    keys = tmp_path / "keys.toml"
    keys.write_text('[a]\nkeys = ["key-of-a"]\n[b]\nkeys = ["key-of-b"]\nrate = 0.001\nburst = 3\n')

    async def scenario(it: Served) -> None:
        of_b = [("x-api-key", "key-of-b")]

        async def ask(prompt: str) -> str:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await it.stub.Generate(pb.GenerateRequest(prompt=prompt), metadata=of_b)
            return str(caught.value.details())

        calls = []
        for waiting in (1, 2):
            request = pb.GenerateRequest(prompt="abc", max_tokens=2)
            calls.append(it.stub.Generate(request, metadata=[("x-api-key", "key-of-a")]))
            await it.until(lambda waiting=waiting: it.engine.load().waiting == waiting)
        assert "waiting" in await ask("a")
        assert "tokens" in await ask(LONG)
        assert "waiting" in await ask("a")
        assert "b is limited" in await ask(LONG)
        it.engine.release()
        await asyncio.gather(*calls)

    serve_http(scenario, held=True, config=QUEUE, app={"keys": ApiKeys(keys)})
