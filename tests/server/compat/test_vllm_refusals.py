"""What vLLM's protocol refuses, and how; no call of a router is open without a key."""

from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2

from jaxserve.config import EngineConfig
from server.auth import ApiKeys
from server.grpc.server import ROUTER_SERVICES
from server.proto.vllm.grpc.engine import vllm_engine_pb2 as pb
from server.proto.vllm.grpc.engine.vllm_engine_pb2_grpc import VllmEngineStub
from tests.server.compat.vllm_calls import LONG, Serve, ask, complete, generate
from tests.server.conftest import Served
from tests.server.grpc.test_service import refusal


@pytest.mark.parametrize(
    ("field", "request_"),
    [
        ("tokenized", pb.GenerateRequest()),
        ("prompt", ask("")),
        ("prompt_token_ids", pb.GenerateRequest(tokenized=pb.TokenizedInput())),
        ("prompt_token_ids", pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=[257]))),
        ("prompt_token_ids", pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=[2**32 - 1]))),
        ("max_tokens", ask(max_tokens=0)),
        ("max_tokens", ask(max_tokens=2048)),
        ("temperature", ask(temperature=-1)),
        ("temperature", ask(temperature=float("nan"))),
        ("top_p", ask(top_p=1.5)),
        ("min_p", ask(min_p=float("inf"))),
        ("n", ask(n=129)),
        ("logprobs", ask(logprobs=-1)),
        ("prompt_logprobs", ask(prompt_logprobs=21)),
        ("stop", ask(stop=["x"] * 17)),
        ("stop_token_ids", ask(stop_token_ids=[2**31])),
        ("logit_bias", ask(logit_bias={97: 101})),
        ("structural_tag", ask(structural_tag="{}")),
        ("regex", ask(regex="(a")),
        ("json_schema", ask(json_schema="{")),
        ("choice", ask(choice=pb.ChoiceConstraint())),
        ("min_tokens", ask(max_tokens=2, min_tokens=3)),
        ("mm_inputs", pb.GenerateRequest(text="a", mm_inputs=pb.MultimodalInputs())),
        ("kv_transfer_params", pb.GenerateRequest(text="a", kv_transfer_params=pb.KvTransferParams())),
        ("kv_transfer_params_json", pb.GenerateRequest(text="a", kv_transfer_params_json="{}")),
        ("data_parallel_rank", pb.GenerateRequest(text="a", data_parallel_rank=1)),
        ("request_id", ask(request_id="x" * 257)),
    ],
)
def test_a_wrong_field_is_named(serve: Serve, field: str, request_: pb.GenerateRequest) -> None:
    async def scenario(it: Served) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(it, request_)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        (violation,) = refusal(caught.value, error_details_pb2.BadRequest()).field_violations
        assert violation.field == field

    serve(scenario)


def test_other_calls_refuse_what_they_cannot_do(serve: Serve) -> None:
    async def scenario(it: Served) -> None:
        stub: Any = VllmEngineStub(it.channel)
        for call in (
            stub.Abort(pb.AbortRequest(request_ids=["a"] * 5000)),
            stub.GetLoads(pb.GetLoadsRequest(dp_rank=1)),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(grpc.aio.AioRpcError) as caught:  # of the interface, and not of the subset
            await it.channel.unary_unary("/vllm.grpc.engine.VllmEngine/Embed")(b"")
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        with pytest.raises(grpc.aio.AioRpcError, match="start the server with --kv-events grpc") as caught:
            await it.channel.unary_unary("/vllm.grpc.engine.VllmEngine/SubscribeKvEvents")(b"")
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION

    serve(scenario)


def test_errors_are_those_of_other_protocols(serve: Serve, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[team]\nkeys = ["key-of-team"]\nrate = 0.001\nburst = 3\n[other]\nkeys = ["key-of-other"]\n')
    team, other = ({"metadata": [("authorization", f"Bearer key-of-{name}")]} for name in ("team", "other"))

    async def scenario(it: Served) -> None:
        async def code(**call: Any) -> Any:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await generate(it, ask(max_tokens=1), **call)
            return caught.value

        stub: Any = VllmEngineStub(it.channel)
        first = stub.Generate(ask(request_id="mine", max_tokens=LONG), **team)
        await it.until(lambda: it.engine.load().waiting == 1)
        full = await code(**team)
        assert full.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert refusal(full, error_details_pb2.RetryInfo()).retry_delay.ToMilliseconds() > 0
        await stub.Abort(pb.AbortRequest(request_ids=["mine"]), **other)  # whose id it is not
        await it.step()
        await stub.Abort(pb.AbortRequest(request_ids=["mine"]), **team)
        told = (await first.read()).complete
        assert (told.finish_reason, bytes(told.output_ids)) == ("abort", b"a")
        it.engine.release()
        assert bytes((await complete(it, ask(max_tokens=1), **team)).output_ids) == b"a"
        rate = await code(**team)
        assert (rate.code(), "team is limited to" in rate.details()) == (grpc.StatusCode.RESOURCE_EXHAUSTED, True)
        it.app.handler.close("the server is stopping")
        assert (await code(**other)).code() is grpc.StatusCode.UNAVAILABLE

    serve(scenario, held=True, config=EngineConfig(max_queued_requests=1), app={"keys": ApiKeys(keys)})


def test_no_rpc_of_a_router_is_open_without_a_key(serve: Serve, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[team]\nkeys = ["key-of-team"]\n')
    methods = {
        "vllm.grpc.engine.VllmEngine": (
            "Generate HealthCheck Abort GetModelInfo GetServerInfo GetLoads GetTokenizer Embed"
        ),
        "inference.GRPCInferenceService": "ServerLive ServerReady ModelReady ServerMetadata ModelMetadata ModelInfer",
    }
    assert tuple(methods) == ROUTER_SERVICES

    async def scenario(it: Served) -> None:
        for service, names in methods.items():
            for name in names.split():
                for metadata in ((), (("authorization", "Bearer nobodys-key"),)):
                    with pytest.raises(grpc.aio.AioRpcError) as caught:
                        await it.channel.unary_unary(f"/{service}/{name}")(b"", metadata=metadata)
                    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        stub: Any = VllmEngineStub(it.channel)
        assert (await stub.HealthCheck(pb.HealthCheckRequest(), metadata=[("x-api-key", "key-of-team")])).healthy

    serve(scenario, app={"keys": ApiKeys(keys)})
