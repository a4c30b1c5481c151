"""The application that `create_app` makes, in process: no port is opened and no signal handler installed."""

import asyncio
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

import httpx2 as httpx
import pytest

import jaxserve
from jaxserve.config import EngineConfig
from jaxserve.multihost import config as multihost
from server.app import Application, create_app
from server.auth import ApiKeys
from server.commands import cli
from server.commands.bench import machine
from tests.server.fake_engine import WAIT_SECONDS, FakeEngine, byte_tokenizer

BODY = {"model": "echo", "prompt": "abc", "max_tokens": 6}


@pytest.fixture(autouse=True)
def no_sockets_or_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> NoReturn:
        raise AssertionError("the application opens a port or handles a signal")

    monkeypatch.setattr(socket.socket, "bind", refuse)
    monkeypatch.setattr(asyncio.SelectorEventLoop, "add_signal_handler", refuse)


def made(engine: FakeEngine | None = None, **settings: Any) -> Application:
    engine = FakeEngine(tokenizer=byte_tokenizer()) if engine is None else engine
    return create_app(engine, **{"name": "echo", "health_seconds": 0.01, "stall_seconds": 1e9} | settings)


@asynccontextmanager
async def client_of(app: Application, **headers: str) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=app)
    async with (
        asyncio.timeout(WAIT_SECONDS),
        httpx.AsyncClient(transport=transport, base_url="http://app", headers=headers) as client,
    ):
        yield client


def test_calls_are_answered_while_the_lifespan_lasts() -> None:
    app = made()  # outside any event loop

    async def scenario() -> None:
        async with client_of(app) as client:
            early = await client.post("/v1/completions", json=BODY)
            assert (early.status_code, "lifespan" in early.text) == (503, True)
            async with app.lifespan():
                assert (await client.get("/health")).status_code == 200
                answer = await client.post("/v1/completions", json=BODY)
                assert answer.json()["choices"][0]["text"] == "abcabc"
                stream = await client.post("/v1/completions", json=BODY | {"stream": True})
                assert stream.text.endswith("data: [DONE]\n\n")
                assert (await client.get("/version")).json() == {"version": jaxserve.__version__}
                assert 'jaxserve_generated_tokens_total{model_name="echo"} 12.0' in (await client.get("/metrics")).text
            assert not app.handler.engine.takes_requests
            assert (await client.get("/health")).status_code == 503

    asyncio.run(scenario())


def test_server_runs_the_lifespan() -> None:
    app = made()

    async def scenario() -> None:
        received: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        sent: asyncio.Queue[Any] = asyncio.Queue()
        serving = asyncio.create_task(app({"type": "lifespan"}, received.get, sent.put))
        await received.put({"type": "lifespan.startup"})
        assert (await sent.get())["type"] == "lifespan.startup.complete"
        assert app.handler.closed is None
        await received.put({"type": "lifespan.shutdown"})
        assert (await sent.get())["type"] == "lifespan.shutdown.complete"
        await serving
        assert app.handler.closed == "the server is stopping"

    asyncio.run(scenario())


def test_application_checks_keys(tmp_path: Path) -> None:
    (tmp_path / "keys.toml").write_text('[team]\nkeys = ["secret-key"]\n')
    app = made(keys=ApiKeys(tmp_path / "keys.toml"))

    async def scenario() -> None:
        async with app.lifespan():
            for key, status in (("secret-key", 200), ("another-key", 401)):
                async with client_of(app, authorization=f"Bearer {key}") as client:
                    assert (await client.post("/v1/completions", json=BODY)).status_code == status
                    assert (await client.get("/health")).status_code == 200

    asyncio.run(scenario())


def test_watchdog_sees_a_dead_engine() -> None:
    engine = FakeEngine(tokenizer=byte_tokenizer(), held=True)
    app = made(engine)

    async def scenario() -> None:
        async with app.lifespan(), client_of(app) as client:
            call = asyncio.create_task(client.post("/v1/completions", json=BODY))
            await asyncio.to_thread(engine.step)
            engine.fail(silently=True)
            assert (await call).json()["error"]["message"] == "the engine has failed"
            assert (await client.get("/health")).status_code == 503

    asyncio.run(scenario())


def test_end_of_the_lifespan_drains() -> None:
    engine = FakeEngine(tokenizer=byte_tokenizer(), held=True)
    app = made(engine)

    async def scenario() -> None:
        async with client_of(app) as client:
            async with app.lifespan():
                call = asyncio.create_task(client.post("/v1/completions", json=BODY))
                await asyncio.to_thread(engine.step)
                asyncio.get_running_loop().call_later(0.05, engine.release)
            assert (await call).json()["choices"][0]["text"] == "abcabc"

    asyncio.run(scenario())


def test_websocket_is_closed() -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(made()({"type": "websocket", "path": "/"}, None, send))  # pyright: ignore[reportArgumentType]
    assert [message["type"] for message in sent] == ["websocket.close"]


def test_documented_example_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
    (example,) = re.findall(r"```python\n(# app.py\n.*?)```", page, re.DOTALL)
    assert len(example.splitlines()) <= 10
    engine = FakeEngine(tokenizer=byte_tokenizer())
    monkeypatch.setattr("jaxserve.engine.Engine.from_checkpoint", lambda **_: engine)
    names: dict[str, Any] = {}
    exec(example, names)

    async def scenario() -> None:
        async with names["app"].lifespan(), client_of(names["app"]) as client:
            model = (await client.get("/v1/models")).json()["data"][0]["id"]
            answer = await client.post("/v1/completions", json=BODY | {"model": model})
            assert answer.json()["choices"][0]["text"] == "abcabc"

    asyncio.run(scenario())


def test_checkout_without_metadata_has_a_version(monkeypatch: pytest.MonkeyPatch) -> None:
    known = metadata.version

    def version(name: str) -> str:
        if name == "jaxserve":
            raise metadata.PackageNotFoundError(name)
        return known(name)

    monkeypatch.setattr(metadata, "version", version)
    assert jaxserve.__version__ == "0+checkout"
    assert made().handler.version == "0+checkout"
    assert machine.environment()["jaxserve"] == "0+checkout"
    cluster = multihost.ClusterConfig(hosts=2, host=0, coordinator="a:1")
    assert ("the version of jaxserve", "0+checkout") in multihost.facts(EngineConfig(), cluster, [16], "", [])
    cli.parser()
