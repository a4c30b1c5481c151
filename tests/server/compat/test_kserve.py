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
EXTENSIONS = ["binary_tensor_data", "generate", "model_streaming"]
TENSORS = [
    {"name": "text_input", "datatype": "BYTES", "shape": [-1]},
    {"name": "text_output", "datatype": "BYTES", "shape": [-1]},
    {"name": "finish_reason", "datatype": "BYTES", "shape": [-1]},
    {"name": "completion_tokens", "datatype": "INT64", "shape": [-1]},
]
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
        assert (server.name, server.version, list(server.extensions)) == ("jaxserve", "1.2.3", EXTENSIONS)
        model = await stub.ModelMetadata(pb.ModelMetadataRequest(name="echo"))
        assert (model.name, list(model.versions), model.platform) == ("echo", [], "jax_xla")
        for call in (
            stub.ModelReady(pb.ModelReadyRequest(name="other")),
            stub.ModelMetadata(pb.ModelMetadataRequest(name="echo", version="3")),
        ):
            assert (await code_of(call))[0] is grpc.StatusCode.NOT_FOUND
        assert [(each.name, each.datatype, list(each.shape)) for each in model.inputs] == [
            ("text_input", "BYTES", [-1])
        ]
        assert [each.name for each in model.outputs] == ["text_output", "finish_reason", "completion_tokens"]

    serve(scenario)


def test_numbers_on_the_wire_are_the_published_ones(serve: Serve) -> None:
    async def scenario(it: Served) -> None:
        async def call(method: str, message: bytes = b"") -> dict[int, Any]:
            return wire.fields(await it.channel.unary_unary(f"{SERVICE}/{method}")(message))

        assert await call("ServerLive") == await call("ServerReady") == {1: 1}
        assert await call("ModelReady", wire.of_bytes(1, b"echo")) == {1: 1}
        server = {1: b"jaxserve", 2: b"1.2.3", 3: [name.encode() for name in EXTENSIONS]}
        assert await call("ServerMetadata") == server
        model = await call("ModelMetadata", wire.of_bytes(1, b"echo"))
        assert (model[1], model[3], len(model[5])) == (b"echo", b"jax_xla", 3)
        assert wire.fields(model[4]) == {1: b"text_input", 2: b"BYTES", 3: wire.varint(2**64 - 1)}
        name, kind, shape = wire.of_bytes(1, b"text_input"), wire.of_bytes(2, b"BYTES"), wire.of_bytes(3, b"\1")
        contents = wire.of_bytes(5, wire.of_bytes(8, b"abc"))
        limit = wire.of_bytes(1, b"max_tokens") + wire.of_bytes(2, wire.of_varint(2, 4))
        head = wire.of_bytes(1, b"echo") + wire.of_bytes(3, b"an id") + wire.of_bytes(4, limit)
        answer = await call("ModelInfer", head + wire.of_bytes(5, name + kind + shape + contents))
        assert (answer[1], answer[3]) == (b"echo", b"an id")
        text = wire.fields(answer[5][0])
        assert (text[1], text[2], text[3], text[5]) == (b"text_output", b"BYTES", b"\1", wire.of_bytes(8, b"abca"))
        wanted = wire.of_bytes(6, wire.of_bytes(1, b"text_output"))
        raw = head + wire.of_bytes(5, name + kind + shape) + wanted + wire.of_bytes(7, b"\3\0\0\0abc")
        assert (await call("ModelInfer", raw))[6] == b"\4\0\0\0abca"
        stream = it.channel.stream_stream(f"{SERVICE}/ModelStreamInfer")(iter([raw, wire.of_bytes(1, b"other")]))
        found = [wire.fields(each) async for each in stream]
        assert {each.get(1, b"")[:4] for each in found} == {b"", b"name"}
        assert any(6 in wire.fields(each[2]) for each in found)
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
                ("/v2", {"name": "jaxserve", "version": "1.2.3", "extensions": EXTENSIONS}),
                ("/v2/", {"name": "jaxserve", "version": "1.2.3", "extensions": EXTENSIONS}),
                ("/v2/health/live", {"live": True}),
                ("/v2/health/ready", {"ready": True}),
                ("/v2/models/echo/ready", {"name": "echo", "ready": True}),
                (
                    "/v2/models/echo",
                    {
                        "name": "echo",
                        "versions": [],
                        "platform": "jax_xla",
                        "inputs": TENSORS[:1],
                        "outputs": TENSORS[1:],
                    },
                ),
            ):
                answer = await client.get(path)
                assert (answer.status_code, answer.json()) == (200, expected)
            for path in ("/v2/models/other", "/v2/models/other/ready", "/v2/models/echo/versions/1/ready"):
                answer = await client.get(path)
                assert (answer.status_code, list(answer.json())) == (404, ["error"])
                if path.endswith("/ready"):
                    continue
                for call in ("infer", "generate", "generate_stream"):
                    answer = await client.post(f"{path}/{call}", json={"inputs": []})
                    assert (answer.status_code, list(answer.json())) == (404, ["error"])

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
