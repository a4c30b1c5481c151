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


@pytest.mark.parametrize("kind", ["gRPC", "HTTP", "metrics"])
def test_a_port_taken_meanwhile_is_named(kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Its error is all that is told, and the others are closed again."""
    port, http_port = free_ports(2)
    taken = {"gRPC": port, "HTTP": http_port, "metrics": http_port}[kind]

    async def scenario() -> None:
        with FakeEngine(tokenizer=byte_tokenizer()) as engine:
            app = ServerApp(engine, name="echo", version="0", stall_seconds=1e9)
            if kind == "metrics":
                app.metrics.serve(HOST, taken)
            else:
                await app.start(HOST, port, http_port)

    with socket.create_server((HOST, taken)):
        with pytest.raises(OSError, match=re.escape(f"cannot listen on {HOST}:{taken}: Address already in use")):
            asyncio.run(scenario())
        gc.collect()
    for each in (port, http_port):
        ports.check_free(HOST, each)
    assert capfd.readouterr() == ("", "")
