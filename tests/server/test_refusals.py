"""What the gRPC service refuses, how it says so, and that nothing of it is left behind."""

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2

from jaxserve.config import EngineConfig
from server.proto.jaxserve.v1 import inference_pb2 as pb
from tests.server.conftest import Served, collect, refusal
from tests.server.fake_engine import WAIT_SECONDS

Serve = Callable[..., None]
LONG = 1500  # tokens: more than any test waits for


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("prompt", {}),
        ("prompt", {"prompt": ""}),
        ("prompt_token_ids", {"prompt_token_ids": pb.TokenIds()}),
        ("prompt_token_ids", {"prompt_token_ids": pb.TokenIds(ids=[97, 257])}),
        ("prompt_token_ids", {"prompt_token_ids": pb.TokenIds(ids=[-1])}),
        ("max_tokens", {"prompt": "a", "max_tokens": 0}),
        ("max_tokens", {"prompt": "a", "max_tokens": 2048}),
        ("temperature", {"prompt": "a", "temperature": -0.1}),
        ("temperature", {"prompt": "a", "temperature": float("nan")}),
        ("top_p", {"prompt": "a", "top_p": 0.0}),
        ("top_k", {"prompt": "a", "top_k": -1}),
        ("min_p", {"prompt": "a", "min_p": 2.0}),
        ("typical_p", {"prompt": "a", "typical_p": 0.0}),
        ("repetition_penalty", {"prompt": "a", "repetition_penalty": 0.0}),
        ("presence_penalty", {"prompt": "a", "presence_penalty": 3.0}),
        ("frequency_penalty", {"prompt": "a", "frequency_penalty": float("inf")}),
        ("logit_bias", {"prompt": "a", "logit_bias": {97: 101.0}}),
        ("logit_bias", {"prompt": "a", "logit_bias": {1000: 1.0}}),
        ("stop", {"prompt": "a", "stop": [""]}),
        ("stop", {"prompt": "a", "stop": ["x"] * 17}),
        ("stop_token_ids", {"prompt": "a", "stop_token_ids": [257]}),
        ("logprobs", {"prompt": "a", "logprobs": 21}),
        ("prompt_logprobs", {"prompt": "a", "prompt_logprobs": -1}),
        ("request_id", {"prompt": "a", "request_id": "x" * 257}),
        ("min_tokens", {"prompt": "a", "max_tokens": 4, "min_tokens": 5}),
        ("bad_words", {"prompt": "a", "bad_words": [" "]}),
        ("bad_words", {"prompt": "a", "bad_words": ["x"] * 65}),
        ("n", {"prompt": "a", "n": 0}),
        ("n", {"prompt": "a", "n": 129}),
        ("best_of", {"prompt": "a", "n": 3, "best_of": 2}),
        ("length_penalty", {"prompt": "a", "length_penalty": 2.0}),
    ],
)
def test_a_wrong_field_is_named(serve: Serve, field: str, fields: dict[str, Any]) -> None:
    async def scenario(it: Served) -> None:
        for method in (it.stub.Generate, lambda request: collect(it.stub.GenerateStream(request))):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await method(pb.GenerateRequest(**fields))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            (violation,) = refusal(caught.value, error_details_pb2.BadRequest()).field_violations
            assert violation.field == field
            assert violation.description

    serve(scenario)


@pytest.mark.parametrize("limit", [{"max_queued_requests": 1}, {"max_queued_tokens": 3}])
def test_full_queue_refuses_with_retry_after(serve: Serve, limit: dict[str, int]) -> None:
    async def scenario(it: Served) -> None:
        def ask() -> Any:
            return it.stub.Generate(pb.GenerateRequest(prompt="abc", max_tokens=2))

        calls = [ask()]
        await it.until(lambda: it.engine.load().waiting == 1)
        await it.step()
        calls.append(ask())
        await it.until(lambda: it.engine.load().waiting == 1)
        with pytest.raises(grpc.aio.AioRpcError) as caught:  # although the engine does not move
            await ask()
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert refusal(caught.value, error_details_pb2.RetryInfo()).retry_delay.ToMilliseconds() > 0
        it.engine.release()
        assert [(await call).text for call in calls] == ["ab", "ab"]

    serve(scenario, held=True, config=EngineConfig(max_rows=1, **limit))


def test_deadline_that_cannot_be_met(serve: Serve) -> None:
    async def scenario(it: Served) -> None:
        # 2,000 tokens at 100 ns, as the fake says it takes, are done in time; a queue of 10**12 tokens is not.
        request = pb.GenerateRequest(prompt="abc", max_tokens=2000, ignore_eos=True)
        assert (await it.stub.Generate(request, timeout=WAIT_SECONDS)).text
        it.engine.owed_elsewhere = 10**12
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await it.stub.Generate(request, timeout=WAIT_SECONDS)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "waiting takes about" in str(caught.value.details())
        assert it.engine.load().prompt_tokens == 3

    serve(scenario)


def test_everything_reserved_comes_back_however_calls_end(serve: Serve) -> None:
    async def scenario(it: Served) -> None:
        calls = [
            it.stub.Generate(pb.GenerateRequest(prompt="abc", max_tokens=4)),
            it.stub.Generate(pb.GenerateRequest(prompt="abc", max_tokens=0)),
            it.stub.Generate(pb.GenerateRequest(prompt="!", max_tokens=4)),
            it.stub.Generate(pb.GenerateRequest(prompt="abc" * 9000, max_tokens=4)),  # too long
            it.stub.Generate(pb.GenerateRequest(prompt="abc", max_tokens=0, use_beam_search=True)),
        ]
        cancelled = it.stub.GenerateStream(pb.GenerateRequest(prompt="abc", max_tokens=LONG))
        await it.until(lambda: it.engine.load().waiting == 3)
        with pytest.raises(grpc.aio.AioRpcError):
            await it.stub.Generate(pb.GenerateRequest(prompt="abc", max_tokens=LONG), timeout=0.1)
        cancelled.cancel()
        await it.until(lambda: it.engine.load().waiting == 2)
        it.engine.release()
        await asyncio.gather(*calls, return_exceptions=True)
        await it.app.handler.calls.wait_until_none()
        admission = it.app.handler.admission
        assert (admission.reserved_requests, admission.reserved_tokens) == (0, 0)
        assert (admission.kept_requests, admission.kept_tokens) == (0, 0)
        assert not admission._waiting

    serve(scenario, held=True, poison=frozenset(b"!"))


def test_a_message_over_the_limit_is_refused(serve: Serve) -> None:
    async def scenario(it: Served) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await it.stub.Tokenize(pb.TokenizeRequest(text="x" * (5 * 2**20)))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED

    serve(scenario)


def test_one_requests_fault_touches_no_other(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(it: Served) -> None:
        good = it.stub.Generate(pb.GenerateRequest(prompt="abc", max_tokens=4))
        bad = it.stub.Generate(pb.GenerateRequest(prompt="!", max_tokens=4, request_id="bad one"))
        await it.until(lambda: it.engine.load().waiting == 2)
        it.engine.release()
        assert (await good).text == "abca"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await bad
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        assert "bad one" in str(caught.value.details())
        assert "poison" not in str(caught.value.details())
        assert (await it.stub.Generate(pb.GenerateRequest(prompt="ab", max_tokens=1))).text == "a"

    serve(scenario, held=True, poison=frozenset(b"!"))
    assert "bad one" in caplog.text
    assert "this prompt is poison" in caplog.text
