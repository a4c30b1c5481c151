"""Servers whose ports are taken."""

import asyncio
import gc
import re
import socket

import pytest

from benchmarks.free_ports import free_ports
from server import ports
from server.app import ServerApp
from tests.server.fake_engine import FakeEngine, byte_tokenizer

HOST = "127.0.0.1"


async def start(port: int, http_port: int) -> None:
    with FakeEngine(tokenizer=byte_tokenizer()) as engine:
        await ServerApp(engine, name="echo", version="0", stall_seconds=1e9).start(HOST, port, http_port)


@pytest.mark.parametrize("kind", ["gRPC", "HTTP", "metrics"])
def test_a_port_taken_meanwhile_is_named(kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Its error is all that is told, and the others are closed again."""
    port, http_port = free_ports(2)
    taken = {"gRPC": port, "HTTP": http_port, "metrics": http_port}[kind]

    async def scenario() -> None:
        if kind == "metrics":
            ServerApp(FakeEngine(tokenizer=None), name="echo", version="0").metrics.serve(HOST, taken)
        else:
            await start(port, http_port)

    with socket.create_server((HOST, taken)):
        with pytest.raises(OSError, match=re.escape(f"cannot listen on {HOST}:{taken}: Address already in use")):
            asyncio.run(scenario())
        gc.collect()
    for each in (port, http_port):
        ports.check_free(HOST, each)
    assert capfd.readouterr() == ("", "")


def test_a_port_that_grpc_finds_taken_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "check_free", lambda *_: None)
    port, http_port = free_ports(2)
    with (
        socket.create_server((HOST, port)),
        pytest.raises(OSError, match=f"cannot listen on {re.escape(HOST)}:{port}: Failed to bind"),
    ):
        asyncio.run(start(port, http_port))
