"""TLS: who reaches the server, and which files are refused."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from server import auth, tls
from server.commands import cli
from tests.server.fake_engine import WAIT_SECONDS


@pytest.fixture
def reached(certificates: Path) -> Callable[..., bool]:
    """Whether a client gets an answer: `reached(mutual=True, client="client")`."""

    async def check(mutual: bool, client: str | None, trusts: str) -> bool:
        server = grpc.aio.server()
        checks = health.aio.HealthServicer()  # pyright: ignore[reportAttributeAccessIssue]
        health_pb2_grpc.add_HealthServicer_to_server(checks, server)
        shown = tls.Tls(
            certificate=certificates / "server.pem",
            key=certificates / "server.key",
            client_ca=certificates / "ca.pem" if mutual else None,
        )
        port = server.add_secure_port("127.0.0.1:0", shown.grpc_credentials())
        await server.start()
        credentials = grpc.ssl_channel_credentials(
            (certificates / f"{trusts}.pem").read_bytes(),
            (certificates / f"{client}.key").read_bytes() if client else None,
            (certificates / f"{client}.pem").read_bytes() if client else None,
        )
        async with grpc.aio.secure_channel(f"localhost:{port}", credentials) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            try:
                await stub.Check(health_pb2.HealthCheckRequest(), timeout=WAIT_SECONDS)
            except grpc.aio.AioRpcError as error:
                return error.code() is not grpc.StatusCode.UNAVAILABLE
            finally:
                await server.stop(None)
        return True

    def run(*, mutual: bool, client: str | None = None, trusts: str = "ca") -> bool:
        return asyncio.run(check(mutual, client, trusts))

    return run


def test_a_client_that_trusts_the_authority_reaches_the_server(reached: Callable[..., bool]) -> None:
    assert reached(mutual=False)
    assert not reached(mutual=False, trusts="stranger")


def test_mutual_tls_asks_for_a_certificate_of_the_authority(reached: Callable[..., bool]) -> None:
    assert reached(mutual=True, client="client")
    assert not reached(mutual=True)
    assert not reached(mutual=True, client="stranger")


def test_http_gets_the_same_files(certificates: Path) -> None:
    uvicorn = pytest.importorskip("uvicorn")
    shown = tls.Tls(
        certificate=certificates / "server.pem", key=certificates / "server.key", client_ca=certificates / "ca.pem"
    )
    config = uvicorn.Config(lambda: None, **shown.uvicorn_settings())
    config.load()
    assert config.ssl.verify_mode.name == "CERT_REQUIRED"


def test_client_command_with_mutual_tls_and_key(
    certificates: Path, serve: Callable[..., None], capfd: pytest.CaptureFixture[str]
) -> None:
    (certificates / "keys.toml").write_text('[us]\nkeys = ["our-own-key"]\n')
    (certificates / "key").write_text("our-own-key\n")

    async def scenario(it: Any) -> None:
        where = f"localhost:{it.address.rpartition(':')[2]}"
        command = ["client", "ab", "--max-tokens", "3", "--server", where, "--tls-ca", str(certificates / "ca.pem")]
        shown = ["--tls-cert", str(certificates / "client.pem"), "--tls-key", str(certificates / "client.key")]
        assert await asyncio.to_thread(cli.main, [*command, *shown]) == 2
        assert "UNAUTHENTICATED" in capfd.readouterr().err
        assert await asyncio.to_thread(cli.main, [*command, *shown, "--api-key-file", str(certificates / "key")]) == 0
        assert capfd.readouterr().out == "aba\n"

    security = {
        "tls": tls.Tls(
            certificate=certificates / "server.pem", key=certificates / "server.key", client_ca=certificates / "ca.pem"
        ),
        "keys": auth.ApiKeys(certificates / "keys.toml"),
    }
    serve(scenario, app=security)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("--tls-cert {0}/server.pem", "--tls-cert and --tls-key go together"),
        ("--tls-client-ca {0}/ca.pem", "--tls-client-ca needs --tls-cert and --tls-key"),
        ("--tls-cert {0}/server.pem --tls-key {0}/client.key", "mismatch"),
        ("--tls-cert {0}/none.pem --tls-key {0}/client.key", "No such file or directory"),
        ("--tls-cert {0}/names --tls-key {0}/client.key", "no pem"),
        ("--tls-cert {0}/server.pem --tls-key {0}/server.key --tls-client-ca {0}/names", "--tls-client-ca"),
    ],
)
def test_wrong_files_are_told_before_anything_is_loaded(
    certificates: Path, given: str, told: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["serve", "--port", "0", *given.format(certificates).split()]) == 2
    err = capfd.readouterr().err
    assert told in err
    assert err.count("\n") == 1
