"""Embed. The engine's embedding of a prompt of n tokens is (4n, 3n), or (4n, -3n) for the mean."""

from collections.abc import Callable

import grpc
import pytest

from server.proto.jaxserve.v1 import inference_pb2 as pb
from tests.server.conftest import Served

Serve = Callable[..., None]


def test_over_grpc(serve: Serve) -> None:
    async def scenario(it: Served) -> None:
        inputs = [pb.EmbedInput(prompt="abc"), pb.EmbedInput(prompt_token_ids=pb.TokenIds(ids=[1, 2]))]
        found = await it.stub.Embed(pb.EmbedRequest(inputs=inputs, request_id="mine"))
        assert [list(each.values) for each in found.embeddings] == [pytest.approx([0.8, 0.6])] * 2
        assert (found.request_id, found.usage.prompt_tokens) == ("mine", 5)
        found = await it.stub.Embed(pb.EmbedRequest(inputs=inputs[:1], pooling="mean"))
        assert list(found.embeddings[0].values) == pytest.approx([0.8, -0.6])

    serve(scenario)


@pytest.mark.parametrize(
    ("request_", "told"),
    [
        (pb.EmbedRequest(), "inputs: has 0 prompts; give 1 to 1024"),
        (pb.EmbedRequest(inputs=[pb.EmbedInput()]), "prompt: is missing"),
        (pb.EmbedRequest(inputs=[pb.EmbedInput(prompt="a")], pooling="max"), "pooling: is 'max'"),
    ],
)
def test_what_is_wrong_is_told(serve: Serve, request_: pb.EmbedRequest, told: str) -> None:
    async def scenario(it: Served) -> None:
        with pytest.raises(grpc.aio.AioRpcError, match=told) as refused:
            await it.stub.Embed(request_)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    serve(scenario)
