"""Inference by the Open Inference Protocol: tensors in JSON, in binary and in messages, whole and as a stream."""

import json
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc
import httpx2 as httpx
import pytest

from jaxserve.errors import InvalidRequest
from server.compat import kserve_tensors
from server.compat.kserve_tensors import Tensor
from server.proto.inference import open_inference_grpc_pb2 as pb
from server.proto.inference.open_inference_grpc_pb2_grpc import GRPCInferenceServiceStub
from tests.server.conftest import Served
from tests.server.http.http_calls import ask, events, post

Serve = Callable[..., None]
PATH = "/v2/models/echo"
HEADER = "Inference-Header-Content-Length"


def text(*values: str, shape: Sequence[int] = ()) -> dict[str, Any]:
    return {"name": "text_input", "datatype": "BYTES", "shape": shape or [len(values)], "data": list(values)}


def one(name: str, datatype: str, value: Any) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": [1], "data": [value]}


def message(prompt: str, **fields: Any) -> pb.ModelInferRequest:
    parameters = {"max_tokens": pb.InferParameter(int64_param=4)} | fields.pop("parameters", {})
    contents = pb.InferTensorContents(bytes_contents=[prompt.encode()])
    inputs = [pb.ModelInferRequest.InferInputTensor(name="text_input", datatype="BYTES", shape=[1], contents=contents)]
    return pb.ModelInferRequest(model_name="echo", inputs=inputs, parameters=parameters, **fields)


def test_texts_over_http(serve: Serve) -> None:
    async def scenario(it: Served) -> None:
        answer = await ask(it, f"{PATH}/infer", id="a", inputs=[text("abc", "de")], parameters={"max_tokens": 4})
        assert answer == {
            "model_name": "echo",
            "id": "a",
            "outputs": [
                {"name": "text_output", "datatype": "BYTES", "shape": [2], "data": ["abca", "dede"]},
                {"name": "finish_reason", "datatype": "BYTES", "shape": [2], "data": ["length", "length"]},
                {"name": "completion_tokens", "datatype": "INT64", "shape": [2], "data": [4, 4]},
            ],
        }
        nested = text("abc", "de", shape=[2, 1]) | {"data": [["abc"], ["de"]]}
        tensors = [nested, one("max_tokens", "INT32", 3), one("stop_words", "BYTES", "e")]
        answer = await ask(it, f"{PATH}/infer", inputs=tensors, outputs=[{"name": "text_output"}])
        assert answer["outputs"] == [
            {"name": "text_output", "datatype": "BYTES", "shape": [2, 1], "data": ["abc", "d"]}
        ]
        sampling = one("sampling_parameters", "BYTES", json.dumps({"max_tokens": 2, "temperature": 0}))
        answer = await ask(it, f"{PATH}/infer", inputs=[text("abc"), sampling])
        assert answer["outputs"][0]["data"] == ["ab"]

    serve(scenario, http_port=0)


def test_tensors_in_binary(serve: Serve) -> None:
    async def scenario(it: Served) -> None:
        raw = b"\3\0\0\0abc" + b"\2\0\0\0de"
        most = (3).to_bytes(4, "little")
        inputs = [
            {"name": "text_input", "datatype": "BYTES", "shape": [2], "parameters": {"binary_data_size": len(raw)}},
            {"name": "max_tokens", "datatype": "INT32", "shape": [1], "parameters": {"binary_data_size": 4}},
        ]
        outputs = [
            {"name": "completion_tokens", "parameters": {"binary_data": True}},
            {"name": "text_output", "parameters": {"binary_data": True}},
            {"name": "finish_reason"},
        ]
        head = json.dumps({"inputs": inputs, "outputs": outputs}).encode()
        async with httpx.AsyncClient(base_url=it.url) as client:
            body, headers = head + raw + most, {HEADER: str(len(head))}
            answer = await client.post(f"{PATH}/infer", content=body, headers=headers)
            assert answer.status_code == 200, answer.text
            size = int(answer.headers[HEADER])
            told, rest = json.loads(answer.content[:size]), answer.content[size:]
            assert [each.get("parameters") for each in told["outputs"]] == [
                {"binary_data_size": 16},
                {"binary_data_size": 14},
                None,
            ]
            assert rest == (3).to_bytes(8, "little") * 2 + b"\3\0\0\0abc" + b"\3\0\0\0ded"
            plain = json.dumps({"inputs": [text("abc")], "parameters": {"binary_data_output": True}}).encode()
            answer = await client.post(f"{PATH}/infer", content=plain)
            assert HEADER in answer.headers
            for wrong, length in ((body[:-1], len(head)), (body + b"x", len(head)), (body, len(body) + 1), (body, "a")):
                answer = await client.post(f"{PATH}/infer", content=wrong, headers={HEADER: str(length)})
                assert (answer.status_code, list(answer.json())) == (400, ["error"])
            assert (
                await client.post(f"{PATH}/infer", content=b"a", headers={"content-type": "text/plain"})
            ).status_code == 415

    serve(scenario, http_port=0)


@pytest.mark.parametrize(
    ("inputs", "more", "named"),
    [
        ([], {}, "text_input"),
        ([text()], {}, "text_input"),
        ([text("a") | {"datatype": "INT32", "data": [1]}], {}, "text_input"),
        ([text("a") | {"datatype": "WORD"}], {}, "text_input"),
        ([text("a") | {"shape": [2]}], {}, "text_input"),
        ([text("a") | {"shape": [-1]}], {}, "text_input"),
        ([text("a") | {"data": [1]}], {}, "text_input"),
        ([text("a") | {"data": None}], {}, "text_input"),
        ([text("a"), one("max_tokens", "INT32", True)], {}, "max_tokens"),
        ([text("a"), one("max_tokens", "INT32", 0)], {}, "max_tokens"),
        ([text("a"), one("max_tokens", "INT32", 1) | {"shape": [2], "data": [1, 2]}], {}, "max_tokens"),
        ([text("a"), one("max_tokens", "INT32", 2)], {"parameters": {"max_tokens": 2}}, "max_tokens"),
        ([text("a"), one("image", "BYTES", "a")], {}, "image"),
        ([text("a"), one("sampling_parameters", "BYTES", "[1]")], {}, "sampling_parameters"),
        ([text("a")], {"parameters": {"top_p": 2.0}}, "top_p"),
        ([text("a")], {"parameters": {"prompt": "b"}}, "prompt"),
        ([text("a")], {"parameters": {"stream": True}}, "stream"),
        ([text("a")], {"parameters": {"priority": 1}}, "priority"),
        ([text("a")], {"parameters": {"timeout": -1}}, "timeout"),
        ([text("a")], {"outputs": [{"name": "logits"}]}, "outputs"),
    ],
)
def test_mistakes_are_named(serve: Serve, inputs: list[Any], more: dict[str, Any], named: str) -> None:
    async def scenario(it: Served) -> None:
        status, answer = await post(it, f"{PATH}/infer", inputs=inputs, **more)
        assert (status, list(answer)) == (400, ["error"])
        assert answer["error"].startswith(named)

    serve(scenario, http_port=0)


def test_texts_over_grpc(serve: Serve) -> None:
    async def scenario(it: Served) -> None:
        stub: Any = GRPCInferenceServiceStub(it.channel)
        answer = await stub.ModelInfer(message("abc", id="a"))
        assert (answer.model_name, answer.id) == ("echo", "a")
        assert [each.name for each in answer.outputs] == ["text_output", "finish_reason", "completion_tokens"]
        assert answer.outputs[0].contents.bytes_contents == [b"abca"]
        assert answer.outputs[2].contents.int64_contents == [4]
        raw = message("", raw_input_contents=[b"\2\0\0\0de"])
        raw.outputs.add(name="text_output")
        answer = await stub.ModelInfer(raw)
        assert list(answer.raw_output_contents) == [b"\4\0\0\0dede"]
        for wrong, code, told in (
            (message("abc", parameters={"top_p": pb.InferParameter(double_param=2)}), "INVALID_ARGUMENT", "top_p"),
            (pb.ModelInferRequest(model_name="other"), "NOT_FOUND", "name"),
            (message("", raw_input_contents=[b"\3\0\0\0de"]), "INVALID_ARGUMENT", "text_input"),
            (message("", raw_input_contents=[b"", b""]), "INVALID_ARGUMENT", "raw_input_contents"),
        ):
            with pytest.raises(grpc.aio.AioRpcError, match=told) as caught:
                await stub.ModelInfer(wrong)
            assert caught.value.code().name == code

    serve(scenario)


def test_a_stream_answers_requests_at_the_same_time(serve: Serve) -> None:
    async def scenario(it: Served) -> None:
        stub: Any = GRPCInferenceServiceStub(it.channel)
        whole = message("de", id="whole", parameters={"stream": pb.InferParameter(bool_param=False)})
        wrong = message("x", id="wrong", parameters={"top_k": pb.InferParameter(int64_param=-5)})
        asked = [message("abc", id="parts"), whole, wrong]

        async def requests() -> AsyncIterator[pb.ModelInferRequest]:
            for each in asked:
                yield each
            await it.until(lambda: it.engine.load().waiting == 2)
            await it.step()  # the server hears of the first tokens before there are others
            it.engine.release()

        found: dict[str, list[Any]] = {}
        errors, counts = {}, []
        async for response in stub.ModelStreamInfer(requests()):
            if response.error_message:
                errors[response.infer_response.id] = response.error_message
                continue
            answer = response.infer_response
            last = answer.parameters["triton_final_response"].bool_param
            counts.append(answer.outputs[2].contents.int64_contents[0])
            found.setdefault(answer.id, []).append((answer.outputs[0].contents.bytes_contents[0], last))
        assert found["whole"] == [(b"dede", True)]
        assert b"".join(text for text, _ in found["parts"]) == b"abca"
        assert [last for _, last in found["parts"]] == [False] * (len(found["parts"]) - 1) + [True]
        assert len(found["parts"]) > 1
        assert sorted(counts)[-2:] == [4, 4]
        assert list(errors) == ["wrong"]
        assert errors["wrong"].startswith("top_k: ")

    serve(scenario, held=True)


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        (b"\xff", "its bytes cannot be parsed"),
        (b"\x2a\x00" * 70_000, "has more than"),  # inputs without anything
    ],
)
def test_a_stream_ends_at_bytes_that_are_no_message(
    serve: Serve, raw: bytes, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(it: Served) -> None:
        stream = it.channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")(iter([raw]))
        with pytest.raises(grpc.aio.AioRpcError, match=told) as caught:
            await stream.read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    serve(scenario)
    assert not caplog.records


def test_a_stream_that_is_left_ends_its_requests(serve: Serve) -> None:
    async def scenario(it: Served) -> None:
        stub: Any = GRPCInferenceServiceStub(it.channel)
        call = stub.ModelStreamInfer(
            iter([message("abc", parameters={"max_tokens": pb.InferParameter(int64_param=900)})])
        )
        await it.until(lambda: it.engine.load().waiting == 1)
        call.cancel()
        await it.until(lambda: len(it.engine.aborted) == 1)

    serve(scenario, held=True)


def test_generate_over_http(serve: Serve) -> None:
    async def scenario(it: Served) -> None:
        expected = {"model_name": "echo", "id": "a", "text_output": "abca"}
        assert await ask(it, f"{PATH}/generate", id="a", text_input="abc", max_tokens=4) == expected
        assert await ask(it, f"{PATH}/generate", id="a", text_input="abc", parameters={"max_tokens": 4}) == expected
        found = [each async for each in events(it, f"{PATH}/generate_stream", text_input="abc", max_tokens=300)]
        assert "".join(each["text_output"] for each in found) == "abc" * 100
        assert len(found) > 1
        status, answer = await post(it, f"{PATH}/generate", text_input="abc", max_tokens=0)
        assert (status, answer["error"][:10]) == (400, "max_tokens")
        status, answer = await post(it, f"{PATH}/generate_stream", text_input="abc", odd=0)
        assert (status, answer["error"][:3]) == (400, "odd")
        status, answer = await post(it, f"{PATH}/generate", text_input="abc", tools=67108863)
        assert (status, answer["error"][:5]) == (400, "tools")

    serve(scenario, http_port=0)


def test_a_request_ends_at_its_timeout(serve: Serve) -> None:
    async def scenario(it: Served) -> None:
        status, answer = await post(it, f"{PATH}/infer", inputs=[text("abc")], parameters={"timeout": 1})
        assert (status, "deadline" in answer["error"]) == (504, True), answer

    serve(scenario, http_port=0, held=True)


@pytest.mark.parametrize(
    ("datatype", "values"),
    [
        ("BOOL", (True, False)),
        *((name, (1, 100)) for name in ("INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64")),
        ("INT64", (-(2**63), 2**63 - 1)),
        *((name, (0.5, -2.0)) for name in ("FP32", "FP64")),
        ("BYTES", ("", "é€")),
    ],
)
def test_tensors_are_read_as_they_are_written(datatype: str, values: tuple[Any, ...]) -> None:
    tensor = Tensor(name="t", datatype=datatype, shape=(1, 2), values=values)
    raw = kserve_tensors.from_bytes("t", datatype, (1, 2), kserve_tensors.to_bytes(tensor))
    sent = kserve_tensors.from_contents("t", datatype, (1, 2), kserve_tensors.to_contents(tensor))
    assert tuple(raw.values) == tuple(sent.values) == values


@pytest.mark.parametrize(
    ("datatype", "shape", "raw"),
    [
        ("INT32", (1,), b"\0\0\0"),
        ("BYTES", (1,), b"\0\0\0"),
        ("BYTES", (1,), b"\1\0\0\0\xff"),
        ("BYTES", (2,), b"\1\0\0\0a"),
        ("INT8", (2**20 + 1,), b"\0" * (2**20 + 1)),
        ("INT8", (1,) * 9, b"a"),
        ("BF16", (1,), b"ab"),
    ],
)
def test_wrong_bytes_are_refused(datatype: str, shape: tuple[int, ...], raw: bytes) -> None:
    with pytest.raises(InvalidRequest, match=r"^t: "):
        kserve_tensors.from_bytes("t", datatype, shape, raw)
