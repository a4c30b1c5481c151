"""Chats over gRPC, on an engine whose answers can be worked out by hand."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from jaxserve.text.chat_template import ChatTemplate
from server.proto.jaxserve.v1 import inference_pb2 as pb
from tests.server.conftest import Served, collect
from tests.server.fake_engine import WAIT_SECONDS

Serve = Callable[..., None]
TEMPLATE = ChatTemplate(
    "{% for message in messages %}{{ message.name or message.role }}:{{ message.content }};{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}",
    {},
)
CHAT = [pb.ChatMessage(role="u", content="Hi"), pb.ChatMessage(role="u", name="me"), pb.ChatMessage(role="b", name="")]
TEXT = "u:Hi;me:;b:;>"  # what the template makes of it


def test_a_chat_is_answered_by_its_template(serve: Serve) -> None:
    async def scenario(it: Served) -> None:
        request = pb.GenerateRequest(messages=CHAT, max_tokens=20)
        answer = await it.stub.Generate(request)
        assert answer.text == (TEXT * 2)[:20]
        assert answer.usage.prompt_tokens == len(TEXT)
        assert "".join([message.text for message in await collect(it.stub.GenerateStream(request))]) == answer.text
        several = await it.stub.Generate(
            pb.GenerateRequest(messages=CHAT, add_generation_prompt=False, max_tokens=13, n=2)
        )
        assert [sample.text for sample in several.samples] == [TEXT[:-1] + "u"] * 2
        searched = pb.GenerateRequest(messages=CHAT, max_tokens=3, use_beam_search=True, n=2)
        assert (await it.stub.Generate(searched)).samples[0].usage.prompt_tokens == len(TEXT)

    serve(scenario, chat_template=TEMPLATE)


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("prompt", {"messages": CHAT, "prompt": "a"}),
        ("prompt_token_ids", {"messages": CHAT, "prompt_token_ids": pb.TokenIds(ids=[1])}),
        ("add_generation_prompt", {"add_generation_prompt": True, "prompt": "a"}),
        ("messages", {"messages": [pb.ChatMessage(content="a")]}),
        ("messages", {"messages": [pb.ChatMessage(role="u" * 65, content="a")]}),
        ("messages", {"messages": CHAT * 1000}),
        ("messages", {"messages": [pb.ChatMessage(role="u", content="a" * 2**20)]}),
    ],
)
def test_a_wrong_chat_is_refused_by_name(serve: Serve, field: str, fields: dict[str, Any]) -> None:
    async def scenario(it: Served) -> None:
        for method in (it.stub.Generate, lambda request: collect(it.stub.GenerateStream(request))):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await method(pb.GenerateRequest(**fields))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert (caught.value.details() or "").startswith(f"{field}: ")

    serve(scenario, chat_template=TEMPLATE)


def test_a_checkpoint_without_a_template_says_so(serve: Serve) -> None:
    async def scenario(it: Served) -> None:
        with pytest.raises(grpc.aio.AioRpcError, match=r"messages: need a chat template") as caught:
            await it.stub.Generate(pb.GenerateRequest(messages=CHAT))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    serve(scenario)


def test_slow_template_delays_no_other_call(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on, render = threading.Event(), threading.Event(), ChatTemplate.render

    def slowly(self: ChatTemplate, *args: Any, **kwargs: Any) -> str:
        begun.set()
        assert go_on.wait(WAIT_SECONDS)
        return render(self, *args, **kwargs)

    async def scenario(it: Served) -> None:
        monkeypatch.setattr(ChatTemplate, "render", slowly)
        chat = asyncio.ensure_future(it.stub.Generate(pb.GenerateRequest(messages=CHAT, max_tokens=3)))
        await asyncio.to_thread(begun.wait, WAIT_SECONDS)
        assert (await it.stub.Generate(pb.GenerateRequest(prompt="abc", max_tokens=4))).text == "abca"
        admission = it.app.handler.admission
        assert (admission.reserved_requests, admission.reserved_tokens) == (1, len("uHiumeb"))
        go_on.set()
        assert (await chat).text == TEXT[:3]
        assert (admission.reserved_requests, admission.reserved_tokens) == (0, 0)

    serve(scenario, chat_template=TEMPLATE)
