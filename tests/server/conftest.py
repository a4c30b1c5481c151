import asyncio
import contextlib
import functools
import json
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import httpcore2
import pytest
import uvicorn.server
from grpc_status import rpc_status

from jaxserve.text.chat_template import ChatTemplate
from jaxserve.text.tokenizer import Tokenizer
from server.app import Application, ServerApp, create_app
from server.commands import settings
from server.proto.jaxserve.v1 import inference_pb2 as pb
from server.proto.jaxserve.v1.inference_pb2_grpc import InferenceStub
from tests.server import asgi_servers
from tests.server.fake_engine import EOS, VOCAB_SIZE, WAIT_SECONDS, FakeEngine, byte_tokenizer

FOREIGN = Path(__file__).parent / "foreign"
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return byte_tokenizer()


@pytest.fixture(autouse=True)
def no_settings_of_yours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings in the environment of whoever runs the tests are not the tests'."""
    for name in [name for name in os.environ if name.startswith(settings.PREFIX)]:
        monkeypatch.delenv(name)


@pytest.fixture(scope="session", autouse=True)
def _quick_ends_and_starts() -> Iterator[None]:
    """uvicorn's waits of 0.1 s, several of them at each end, are 0.01 s, and clients read certificates once."""
    quick = SimpleNamespace(**vars(asyncio) | {"sleep": lambda seconds: asyncio.sleep(min(seconds, 0.01))})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(uvicorn.server, "asyncio", quick)
        patch.setattr(httpcore2, "default_ssl_context", functools.cache(httpcore2.default_ssl_context))
        yield


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a tiny BLOOM with a tokenizer of bytes."""
    import jax
    import jax.numpy as jnp

    from jaxserve import models, weights

    folder = tmp_path_factory.mktemp("checkpoint")
    config = models.parse_config(
        {
            "model_type": "bloom",
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 24,
            "n_layer": 2,
            "n_head": 3,
            "eos_token_id": EOS,
            "layer_norm_epsilon": 1e-5,
        }
    )
    params = models.build(config).init(0, jnp.float32)
    weights.write_hf(folder, config, jax.tree.map(lambda leaf: leaf * 4 if leaf.ndim > 1 else leaf, params))
    byte_tokenizer(save_to=folder / "tokenizer.json")
    return folder


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with ca.pem; server.pem and client.pem, which it signed; stranger.pem; and a NAME.key for each."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl to make certificates")
    folder = tmp_path_factory.mktemp("certificates")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "30"]
    use = ["-addext", "keyUsage=critical,keyCertSign,cRLSign"]  # Python 3.13 holds certificates to RFC 5280
    for name in ("ca", "stranger"):
        openssl("req", "-x509", *curve, *use, "-keyout", f"{name}.key", "-out", f"{name}.pem", "-subj", f"/CN={name}")
    (folder / "names").write_text("subjectAltName=DNS:localhost,IP:127.0.0.2\nauthorityKeyIdentifier=keyid\n")
    for name in ("server", "client"):
        openssl("req", *curve[:-2], "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        openssl(
            *("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial"),
            *("-days", "30", "-extfile", "names", "-out", f"{name}.pem"),
        )
    return folder


class Served:
    """A server on a fake engine, and a client of it; `url` where HTTP is served too, no `stub` where gRPC is not."""

    def __init__(
        self,
        engine: FakeEngine,
        app: ServerApp | Application,
        address: str | None,
        channel: grpc.aio.Channel | None,
        http_port: int | None,
    ) -> None:
        self.engine, self.address = engine, address
        self.app: Any = app
        self.channel: Any = channel
        self.http_port, self.url = http_port, f"http://127.0.0.1:{http_port}"
        self.stub: Any = None if channel is None else InferenceStub(channel)

    async def step(self, iterations: int = 1) -> None:
        """Runs iterations of a held engine, and lets the server hear of each."""
        for _ in range(iterations):
            await asyncio.to_thread(self.engine.step)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits until something is so that the engine's thread brings about."""
        await asyncio.to_thread(self.engine.wait_until, condition)


@contextlib.asynccontextmanager
async def served(
    engine: FakeEngine, http_port: int | None = None, http_server: str | None = None, **settings: Any
) -> AsyncIterator[Served]:
    """Serves an engine on ports of its own, or over HTTP only under the ASGI server `http_server`."""
    settings = {"name": "echo", "version": "1.2.3", "health_seconds": 0.01, "stall_seconds": 1e9} | settings
    if http_server is not None:
        app = create_app(engine, drain_seconds=0.0, **settings)
        async with asgi_servers.RUN[http_server](app) as http_port:
            try:
                yield Served(engine, app, None, None, http_port)
            finally:
                engine.release()
        return
    with engine:
        app = ServerApp(engine, **settings)  # pyright: ignore[reportArgumentType]
        port, http_port = await app.start("127.0.0.1", 0, http_port)
        address = f"127.0.0.1:{port}"
        async with grpc.aio.insecure_channel(address) as channel:
            try:
                yield Served(engine, app, address, channel, http_port)
            finally:
                engine.release()
                await app.stop()


async def some_traffic(it: Served) -> None:
    """A request of each ending: length (twice), stop, end of sequence, cut short; and two refusals."""
    await it.stub.Generate(pb.GenerateRequest(prompt="abc", max_tokens=4))
    await it.stub.Generate(pb.GenerateRequest(prompt="abc", max_tokens=4))
    await it.stub.Generate(pb.GenerateRequest(prompt="abcd", max_tokens=9, stop_token_ids=[100]))
    await it.stub.Generate(pb.GenerateRequest(prompt_token_ids=pb.TokenIds(ids=[97, 256])))
    for wrong in (pb.GenerateRequest(prompt="a", top_p=2), pb.GenerateRequest(prompt="!", request_id="poisoned")):
        with pytest.raises(grpc.aio.AioRpcError):
            await it.stub.Generate(wrong)
    await it.app.handler.calls.wait_until_none()


async def collect(call: Any) -> list[pb.GenerateResponse]:
    return [message async for message in call]


def refusal(error: grpc.aio.AioRpcError, detail: Any) -> Any:
    """The one detail of a status, unpacked into `detail`."""
    status = rpc_status.from_call(error)  # pyright: ignore[reportArgumentType]
    assert status is not None
    assert len(status.details) == 1
    assert status.details[0].Unpack(detail)
    return detail


Scenario = Callable[[Served], Coroutine[Any, Any, None]]


@pytest.fixture
def serve(tokenizer: Tokenizer) -> Callable[..., None]:
    """Runs a coroutine with a server on a fake engine: `serve(scenario, held=True, ...)`."""

    def run(
        scenario: Scenario,
        http_port: int | None = None,
        chat_template: ChatTemplate | None = None,
        app: dict[str, Any] | None = None,
        http_server: str | None = None,
        **fields: Any,
    ) -> None:
        with_template = tokenizer if chat_template is None else byte_tokenizer(chat_template=chat_template)

        async def bounded() -> None:
            engine = FakeEngine(**{"tokenizer": with_template} | fields)
            async with asyncio.timeout(WAIT_SECONDS), served(engine, http_port, http_server, **(app or {})) as it:
                await scenario(it)

        asyncio.run(bounded())

    return run


@pytest.fixture(scope="session")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Coroutine[Any, Any, Any]]:
    """Runs one of the JavaScript programs, their libraries installed as the lock file says: `await foreign("client.js",
    ...)` is the JSON it prints."""
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        pytest.skip("node and npm are not installed")
    folder = tmp_path_factory.mktemp("foreign")
    for path in FOREIGN.iterdir():
        if path.is_file():
            shutil.copy(path, folder)
    installed = subprocess.run(
        [npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )
    if installed.returncode != 0 and any(
        word in installed.stderr for word in ("ENOTFOUND", "EAI_AGAIN", "ECONNREFUSED")
    ):
        pytest.skip("npm cannot reach a registry")
    assert installed.returncode == 0, installed.stderr

    async def run(program: str, *args: object) -> Any:
        process = await asyncio.create_subprocess_exec(
            *("node", str(folder / program), *map(str, args)),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, errors = await process.communicate()
        assert process.returncode == 0, errors.decode()
        return json.loads(out)

    return run


@pytest.fixture
def foreign_client(foreign: Callable[..., Any]) -> Callable[[str, int], Coroutine[Any, Any, Any]]:
    """Runs gRPC's JavaScript client: `await foreign_client(address, n)` tells what it found, where n tokens are more
    than the server generates in 0.3 seconds."""
    return lambda address, tokens: foreign("client.js", address, ROOT, tokens)


TEMPLATE = (
    "{% for message in messages %}{{ '<' + message.role + '>' + message.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<bot>' }}{% endif %}"
)


@pytest.fixture
def serve_http(serve: Callable[..., None]) -> Callable[..., None]:
    """Runs a coroutine with a server, as `serve` does, that answers over HTTP too."""
    return functools.partial(serve, http_port=0, chat_template=ChatTemplate(TEMPLATE, {}))
