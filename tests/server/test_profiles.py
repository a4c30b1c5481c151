"""Profiles that callers start and stop on a running server."""

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import httpx2 as httpx
import pytest

from jaxserve.profiler import Profiler
from server.auth import ApiKeys
from server.proto.jaxserve.v1 import inference_pb2 as pb
from tests.server.conftest import Served


async def over_http(it: Any, call: str, key: str = "") -> tuple[int, str]:
    """(status, message) of `start` or `stop`."""
    async with httpx.AsyncClient(base_url=it.url, timeout=None) as client:
        answer = await client.post(f"/{call}_profile", headers={"x-api-key": key})
        return answer.status_code, answer.json()["error"]["message"] if answer.content else ""


async def over_grpc(it: Any, call: str, key: str = "") -> tuple[grpc.StatusCode, str]:
    start, stop = (it.stub.StartProfile, pb.StartProfileRequest()), (it.stub.StopProfile, pb.StopProfileRequest())
    method, message = start if call == "start" else stop
    try:
        await method(message, metadata=[("x-api-key", key)])
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or ""
    return grpc.StatusCode.OK, ""


STATUS = grpc.StatusCode
WAYS = [
    (over_http, 200, 409, 403),
    (over_grpc, STATUS.OK, STATUS.FAILED_PRECONDITION, STATUS.PERMISSION_DENIED),
]


@pytest.mark.parametrize(
    ("call", "fine", "wrong", "forbidden"), [WAYS[0], pytest.param(*WAYS[1], marks=pytest.mark.long)]
)
def test_profiles_start_and_stop_in_order(
    serve_http: Callable[..., None], tmp_path: Path, call: Any, fine: Any, wrong: Any, forbidden: Any
) -> None:
    async def scenario(it: Served) -> None:
        asked = "start the server with --profile DIR to allow profiles"
        assert await call(it, "start") == (wrong, asked)
        it.app.handler.profile = partial(asyncio.to_thread, Profiler(tmp_path).set)
        assert await call(it, "stop") == (wrong, "no profile is running; start one first")
        for _ in range(2):
            assert await call(it, "start") == (fine, "")
            status, message = await call(it, "start")
            assert (status, message.partition(":")[0]) == (wrong, "a profile is running")
            assert await call(it, "stop") == (fine, "")
            (capture,) = tmp_path.rglob("*.xplane.pb")
            capture.unlink()  # the next one within this second has the same name

    serve_http(scenario)


@pytest.mark.parametrize(("call", "fine", "wrong", "forbidden"), WAYS)
def test_profiles_are_for_operators(
    serve_http: Callable[..., None], tmp_path: Path, call: Any, fine: Any, wrong: Any, forbidden: Any
) -> None:
    keys, set_to = tmp_path / "keys.toml", []
    keys.write_text('[team]\nkeys = ["key-of-team"]\n[run]\nkeys = ["key-of-run"]\noperator = true\n')

    async def profile(running: bool) -> None:
        set_to.append(running)

    async def scenario(it: Served) -> None:
        it.app.handler.profile = profile
        for command in ("start", "stop"):
            assert (await call(it, command))[0] in (401, STATUS.UNAUTHENTICATED)
            assert await call(it, command, "key-of-team") == (forbidden, "profiles are for operators")
        assert set_to == []
        for command in ("start", "stop"):
            assert await call(it, command, "key-of-run") == (fine, "")
        assert set_to == [True, False]

    serve_http(scenario, app={"keys": ApiKeys(keys)})
