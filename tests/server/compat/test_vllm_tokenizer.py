"""A router fetches the tokenizer over gRPC, with messages compiled from the published interface."""

import asyncio
import hashlib
import io
import random
import zipfile
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from grpc_tools import protoc

from jaxserve.text.tokenizer import Tokenizer
from tests.server.conftest import Served
from tests.server.fake_engine import byte_tokenizer

# From crates/grpc_client/proto/common.proto of lightseekorg/smg (August 2026).
PUBLISHED = """
syntax = "proto3";
package smg.grpc.common;
message GetTokenizerRequest {}
message GetTokenizerChunk {
  bytes data = 1;
  string sha256 = 2;
}
"""


@pytest.fixture(scope="module")
def call_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Makes the call GetTokenizer of a channel."""
    folder = tmp_path_factory.mktemp("proto")
    (folder / "common.proto").write_text(PUBLISHED)
    compiled = folder / "common.bin"
    assert protoc.main(["protoc", f"-I{folder}", f"--descriptor_set_out={compiled}", str(folder / "common.proto")]) == 0
    messages = message_factory.GetMessages(
        descriptor_pb2.FileDescriptorSet.FromString(compiled.read_bytes()).file, descriptor_pool.DescriptorPool()
    )
    request, chunk = (messages[f"smg.grpc.common.GetTokenizer{name}"] for name in ("Request", "Chunk"))
    return lambda channel: channel.unary_stream(
        "/vllm.grpc.engine.VllmEngine/GetTokenizer", request.SerializeToString, chunk.FromString
    )(request())


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A folder with a tokenizer and a template; its config.json is long enough for several messages."""
    byte_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    (tmp_path / "config.json").write_text(random.Random(0).randbytes(100_000).hex())
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    return tmp_path


def test_a_router_gets_the_tokenizer_in_parts(serve: Any, call_of: Any, checkpoint: Path, tmp_path: Path) -> None:
    async def scenario(it: Served) -> None:
        parts = [part async for part in call_of(it.channel)]
        data = b"".join(part.data for part in parts)
        assert len(parts) > 1
        assert max(len(part.data) for part in parts) <= 65536
        assert [part.sha256 for part in parts] == [""] * (len(parts) - 1) + [hashlib.sha256(data).hexdigest()]
        archive = zipfile.ZipFile(io.BytesIO(data))
        assert set(archive.namelist()) == {"tokenizer.json", "chat_template.jinja", "config.json"}
        archive.extractall(tmp_path / "fetched")
        fetched = Tokenizer.from_directory(tmp_path / "fetched")
        assert fetched is not None
        assert fetched.encode("tokens") == list(b"tokens")
        assert fetched.chat_template is not None

    serve(scenario, tokenizer=Tokenizer.from_directory(checkpoint))


def test_many_routers_get_the_same_archive(serve: Any, call_of: Any, checkpoint: Path) -> None:
    async def scenario(it: Served) -> None:
        async def fetched() -> bytes:
            return b"".join([part.data async for part in call_of(it.channel)])

        first = call_of(it.channel)
        await first.read()
        first.cancel()  # a router that leaves takes nothing from the others
        assert len(set(await asyncio.gather(*(fetched() for _ in range(5))))) == 1

    serve(scenario, tokenizer=Tokenizer.from_directory(checkpoint))


@pytest.mark.parametrize("tokenizer", [None, byte_tokenizer()])
def test_without_tokenizer_files_the_call_is_refused(serve: Any, call_of: Any, tokenizer: Tokenizer | None) -> None:
    async def scenario(it: Served) -> None:
        with pytest.raises(grpc.aio.AioRpcError, match="has no tokenizer files") as caught:
            async for _ in call_of(it.channel):
                pass
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION

    serve(scenario, tokenizer=tokenizer)
