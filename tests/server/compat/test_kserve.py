"""The Open Inference Protocol, version 2, over gRPC and HTTP."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import httpx2 as httpx
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from server.auth import ApiKeys
from server.grpc.server import ROUTER_SERVICES
from server.proto.inference import open_inference_grpc_pb2 as pb
from server.proto.inference.open_inference_grpc_pb2_grpc import GRPCInferenceServiceStub
from tests.server.compat import wire
from tests.server.conftest import Served

Serve = Callable[..., None]
SERVICE = "/inference.GRPCInferenceService"


async def code_of(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), caught.value.details() or ""


def test_liveness_readiness_and_metadata_over_grpc(serve: Serve) -> None:
    async def scenario(it: Served) -> None:
        stub: Any = GRPCInferenceServiceStub(it.channel)
        assert (await stub.ServerLive(pb.ServerLiveRequest())).live
        assert (await stub.ServerReady(pb.ServerReadyRequest())).ready
        assert (await stub.ModelReady(pb.ModelReadyRequest(name="echo"))).ready
        server = await stub.ServerMetadata(pb.ServerMetadataRequest())
        assert (server.name, server.version, list(server.extensions)) == ("jaxserve", "1.2.3", [])
        model = await stub.ModelMetadata(pb.ModelMetadataRequest(name="echo"))
        assert (model.name, list(model.versions), model.platform) == ("echo", [], "jax_xla")
        for call in (
            stub.ModelReady(pb.ModelReadyRequest(name="other")),
            stub.ModelMetadata(pb.ModelMetadataRequest(name="echo", version="3")),
        ):
            assert (await code_of(call))[0] is grpc.StatusCode.NOT_FOUND
        code, told = await code_of(stub.ModelInfer(pb.ModelInferRequest()))
        assert code is grpc.StatusCode.UNIMPLEMENTED
        assert "jaxserve.v1.Inference/Generate" in told

    serve(scenario)


def test_numbers_on_the_wire_are_the_published_ones(serve: Serve) -> None:
    async def scenario(it: Served) -> None:
        async def call(method: str, message: bytes = b"") -> dict[int, Any]:
            return wire.fields(await it.channel.unary_unary(f"{SERVICE}/{method}")(message))

        assert await call("ServerLive") == await call("ServerReady") == {1: 1}
        assert await call("ModelReady", wire.of_bytes(1, b"echo")) == {1: 1}
        assert await call("ServerMetadata") == {1: b"jaxserve", 2: b"1.2.3"}
        assert await call("ModelMetadata", wire.of_bytes(1, b"echo")) == {1: b"echo", 3: b"jax_xla"}
        with_version = wire.of_bytes(1, b"echo") + wire.of_bytes(2, b"7")
        code, told = await code_of(it.channel.unary_unary(f"{SERVICE}/ModelReady")(with_version))
        assert (code, "'7'" in told) == (grpc.StatusCode.NOT_FOUND, True)

    serve(scenario)


def test_readiness_is_health(serve: Serve) -> None:
    async def scenario(it: Served) -> None:
        stub: Any = GRPCInferenceServiceStub(it.channel)
        watches = [HealthStub(it.channel).Watch(HealthCheckRequest(service=service)) for service in ROUTER_SERVICES]
        assert {(await watch.read()).status for watch in watches} == {HealthCheckResponse.SERVING}
        it.engine.fail()
        assert {(await watch.read()).status for watch in watches} == {HealthCheckResponse.NOT_SERVING}
        assert not (await stub.ServerReady(pb.ServerReadyRequest())).ready
        assert not (await stub.ModelReady(pb.ModelReadyRequest(name="echo"))).ready
        assert (await stub.ServerLive(pb.ServerLiveRequest())).live
        async with httpx.AsyncClient(base_url=it.url) as client:
            for path in ("/v2/health/ready", "/v2/models/echo/ready"):
                answer = await client.get(path)
                assert (answer.status_code, answer.json()["ready"]) == (503, False)
            assert (await client.get("/v2/health/live")).status_code == 200
        for watch in watches:
            watch.cancel()

    serve(scenario, http_port=0)


def test_the_same_over_http(serve: Serve) -> None:
    async def scenario(it: Served) -> None:
        async with httpx.AsyncClient(base_url=it.url) as client:
            for path, expected in (
                ("/v2", {"name": "jaxserve", "version": "1.2.3", "extensions": []}),
                ("/v2/", {"name": "jaxserve", "version": "1.2.3", "extensions": []}),
                ("/v2/health/live", {"live": True}),
                ("/v2/health/ready", {"ready": True}),
                ("/v2/models/echo/ready", {"name": "echo", "ready": True}),
                (
                    "/v2/models/echo",
                    {"name": "echo", "versions": [], "platform": "jax_xla", "inputs": [], "outputs": []},
                ),
            ):
                answer = await client.get(path)
                assert (answer.status_code, answer.json()) == (200, expected)
            for path in ("/v2/models/other", "/v2/models/other/ready", "/v2/models/echo/versions/1/ready"):
                answer = await client.get(path)
                assert (answer.status_code, list(answer.json())) == (404, ["error"])
            answer = await client.post("/v2/models/echo/infer", json={"inputs": []})
            assert answer.status_code == 501
            assert "POST /v1/completions" in answer.json()["error"]

    serve(scenario, http_port=0)


def test_http_asks_for_a_key_too(serve: Serve, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[team]\nkeys = ["key-of-team"]\n')

    async def scenario(it: Served) -> None:
        async with httpx.AsyncClient(base_url=it.url) as client:
            for path in ("/v2", "/v2/health/live", "/v2/health/ready", "/v2/models/echo", "/v2/models/echo/ready"):
                assert (await client.get(path)).status_code == 401
                assert (await client.get(path, headers={"x-api-key": "key-of-team"})).status_code == 200

    serve(scenario, http_port=0, app={"keys": ApiKeys(keys)})
