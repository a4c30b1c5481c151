"""What callers are told when engine processes die, are stopped or stand still, and what becomes of those who wait."""

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import duration_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_status import rpc_status

from jaxserve.config import EngineConfig
from jaxserve.multihost.config import ClusterConfig
from server.commands.console import UserError
from server.engine_process import exit_codes
from server.engine_process.job import EngineJob
from server.engine_process.remote_engine import RemoteEngine
from server.engine_process.supervisor import EngineGone, RestartPolicy, Supervisor
from server.proto.jaxserve.v1 import inference_pb2 as pb
from server.proto.vllm.grpc.engine import vllm_engine_pb2 as vllm_pb
from server.proto.vllm.grpc.engine.vllm_engine_pb2_grpc import VllmEngineStub
from tests.server.engine_process.conftest import STALL_SECONDS, Remote
from tests.server.fake_engine import WAIT_SECONDS

RunRemote = Callable[..., None]
LONG = 10**6  # tokens: more than any test waits for


def ask(prompt: str = "abc", max_tokens: int = 7, **fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(prompt=prompt, max_tokens=max_tokens, **fields)


async def refusal(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


async def to_its_end(stream: Any) -> None:
    """Reads a stream of which something was read."""
    while await stream.read() is not grpc.aio.EOF:
        pass


def retry_seconds(error: grpc.aio.AioRpcError) -> float | None:
    status: status_pb2.Status | None = rpc_status.from_call(error)  # pyright: ignore[reportArgumentType]
    for detail in status.details if status is not None else ():
        info = error_details_pb2.RetryInfo()
        if detail.Unpack(info):
            delay: duration_pb2.Duration = info.retry_delay
            return delay.ToMilliseconds() / 1000
    return None


def is_gone(pid: int) -> bool:
    """Whether a process has ended (one that nobody has waited for yet has)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


# Starting


def test_the_ports_answer_before_the_engine_is_ready(run_remote: RunRemote, tmp_path: Path) -> None:
    async def scenario(it: Remote) -> None:
        answer = await it.health.Check(HealthCheckRequest())
        assert answer.status == HealthCheckResponse.NOT_SERVING
        health = VllmEngineStub(it.channel).HealthCheck(vllm_pb.HealthCheckRequest())
        for call in (it.stub.Generate(ask()), it.stub.GetModel(pb.GetModelRequest()), health):
            error = await refusal(call)
            assert (error.code(), error.details()) == (grpc.StatusCode.UNAVAILABLE, "the engine is starting")
            assert retry_seconds(error) is not None
        for path in ("/health", "/v1/models", "/live", "/info"):
            refused = await it.http.get(path)
            assert (path, refused.status_code) == (path, 503)
            assert "the engine is starting" in refused.text
        refused = await it.http.post("/v1/completions", json={"prompt": "a"})
        assert (refused.status_code, "retry-after" in refused.headers) == (503, True)
        assert 'jaxserve_healthy{model_name="echo"} 0.0' in (await it.http.get("/metrics")).text
        (tmp_path / "go").touch()
        await it.until_health("SERVING")
        assert (await it.stub.Generate(ask())).text == "abcabca"
        assert (await it.http.get("/health")).status_code == 200

    run_remote(scenario, ready=False, waits_for=str(tmp_path / "go"))


def test_wrong_settings_are_not_retried(run_remote: RunRemote) -> None:
    async def scenario(it: Remote) -> None:
        with pytest.raises(UserError, match="no such model"):
            await it.running

    run_remote(scenario, ready=False, refuses="no such model")


def test_restarts_in_a_row_are_bounded(run_remote: RunRemote, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(it: Remote) -> None:
        with pytest.raises(EngineGone, match="ended with exit code 3, 3 times in a row"):
            await it.running

    run_remote(scenario, RestartPolicy(most=2, first_delay=0.01), ready=False, dies=3)
    told = [record.getMessage() for record in caplog.records if "its last output" in record.getMessage()]
    assert len(told) == 3
    assert all("these are its last words" in each for each in told)


def test_restarts_wait_longer_each_time_up_to_a_bound() -> None:
    restarts = RestartPolicy(first_delay=0.5, longest_delay=3.0)
    assert [restarts.delay(n) for n in range(1, 6)] == [0.5, 1.0, 2.0, 3.0, 3.0]


# Death, in its forms


def kill(it: Remote) -> None:
    assert it.supervisor.pid is not None
    os.kill(it.supervisor.pid, signal.SIGKILL)


def stop(it: Remote) -> None:
    assert it.supervisor.pid is not None
    os.kill(it.supervisor.pid, signal.SIGSTOP)


def wait(it: Remote) -> None:
    """It does it by itself."""


@pytest.mark.parametrize(
    ("orders", "do", "cause"),
    [
        ({}, kill, "the engine process was killed by signal 9 (SIGKILL); it is being restarted"),
        pytest.param({}, stop, "the engine has completed no iteration for", marks=pytest.mark.processes),
        pytest.param(
            {"wedged_after": 20}, wait, "the engine has completed no iteration for", marks=pytest.mark.processes
        ),
        (
            {"fails_after": 20},
            wait,
            "the engine has failed: the engine process ended with exit code 70; it is being restarted",
        ),
    ],
    ids=["killed", "stopped", "wedged", "failed"],
)
def test_waiting_requests_survive_a_restart(
    run_remote: RunRemote,
    orders: dict[str, Any],
    do: Callable[[Remote], None],
    cause: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario(it: Remote) -> None:
        begun = it.stub.GenerateStream(ask(max_tokens=LONG))
        assert (await begun.read()).text.startswith("a")
        waits = it.stub.Generate(ask("xyz"))
        over_http = asyncio.create_task(it.http.post("/v1/completions", json={"prompt": "uv", "max_tokens": 4}))
        first = it.supervisor.pid
        assert first is not None
        it.order()
        await it.until(lambda: it.engine.load().waiting == 2)
        watch = it.health.Watch(HealthCheckRequest())
        since = time.monotonic()
        do(it)
        error = await refusal(to_its_end(begun))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert cause in str(error.details())
        assert time.monotonic() - since < STALL_SECONDS + 5
        while (await watch.read()).status != HealthCheckResponse.NOT_SERVING:
            pass
        assert (await waits).text == "xyzxyzx"
        assert (await over_http).json()["choices"][0]["text"] == "uvuv"
        await it.until_health("SERVING")
        assert is_gone(first)
        assert it.supervisor.pid != first
        watch.cancel()

    run_remote(scenario, config={"max_rows": 1}, **orders)
    assert "the engine is ready again" in caplog.text


def test_an_engine_process_that_sends_no_messages_is_killed(
    run_remote: RunRemote, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(it: Remote) -> None:
        with pytest.raises(EngineGone, match="sent something that is not a message and was killed"):
            await it.running

    run_remote(scenario, RestartPolicy(most=1, first_delay=0.01), ready=False, babbles=True)
    assert "not a FromEngine message" in caplog.text


def test_calls_wait_for_the_engine_within_the_bounds(run_remote: RunRemote, tmp_path: Path) -> None:
    async def scenario(it: Remote) -> None:
        it.order(waits_for=str(tmp_path / "go"))
        kill(it)
        await it.until_health("NOT_SERVING")
        waits = [asyncio.ensure_future(it.stub.Generate(ask(prompt))) for prompt in ("ab", "cd")]
        await it.until(lambda: it.engine.load().waiting == 2)
        error = await refusal(it.stub.Generate(ask()))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert retry_seconds(error) is not None
        leaves = waits.pop()
        leaves.cancel()
        await it.until(lambda: it.engine.load().waiting == 1)
        (tmp_path / "go").touch()
        assert (await waits[0]).text == "abababa"
        await it.app.handler.calls.wait_until_none()
        assert it.engine.load().outstanding_tokens == 0

    run_remote(scenario, config={"max_queued_requests": 2})


def test_deadly_request_is_tried_twice(run_remote: RunRemote) -> None:
    async def scenario(it: Remote) -> None:
        error = await refusal(it.stub.Generate(ask("!")))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert "SIGKILL" in str(error.details())
        assert (await it.stub.Generate(ask())).text == "abcabca"

    run_remote(scenario, deadly=ord("!"))


def test_without_a_supervisor_a_dead_engine_stays_dead(run_remote: RunRemote) -> None:
    async def scenario(it: Remote) -> None:
        call = it.stub.GenerateStream(ask(max_tokens=LONG))
        await call.read()
        kill(it)
        for error in (await refusal(to_its_end(call)), await refusal(it.stub.Generate(ask()))):
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            assert error.details() == "the engine process was killed by signal 9 (SIGKILL)"
        await it.until_health("NOT_SERVING")
        assert (await it.http.get("/health")).status_code == 503
        await it.supervisor.close()
        with pytest.raises(EngineGone):
            await it.running

    run_remote(scenario, restarts=None)


def test_without_a_supervisor_a_wedged_engine_may_come_back(run_remote: RunRemote) -> None:
    async def scenario(it: Remote) -> None:
        call = it.stub.GenerateStream(ask(max_tokens=LONG))
        await call.read()
        stop(it)
        await it.until_health("NOT_SERVING")
        assert it.supervisor.pid is not None
        os.kill(it.supervisor.pid, signal.SIGCONT)
        await it.until_health("SERVING")
        assert (await it.stub.Generate(ask())).text == "abcabca"
        call.cancel()

    run_remote(scenario, restarts=None)


def test_where_a_wedged_engine_stood_is_in_the_log(
    run_remote: RunRemote, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.app._RECOVERY_SECONDS", 0.1)

    async def scenario(it: Remote) -> None:
        it.order()
        assert (await refusal(it.stub.Generate(ask(max_tokens=LONG)))).code() is grpc.StatusCode.UNAVAILABLE

    with caplog.at_level(logging.ERROR):
        run_remote(scenario, wedged_after=2)
    assert "fake_engine_process.py" in caplog.text  # the line that it stands in


# One of several hosts

FALLS_SILENT = """
import os, signal, socket, sys
from server.engine_process import messages
channel = socket.socket(fileno=int(sys.argv[-1]))
for _ in range(3):
    channel.sendall(messages.to_front(alive_seconds=0.2))
os.kill(os.getpid(), signal.SIGSTOP)
"""


def test_silent_worker_is_killed() -> None:
    config = EngineConfig(tensor=2, stages=2)
    cluster = ClusterConfig(hosts=2, host=1, coordinator="a:1")
    supervisor = Supervisor(
        RemoteEngine(config, None),
        EngineJob.of("fake", config, cluster=cluster),
        restarts=None,
        command=(sys.executable, "-c", FALLS_SILENT),
    )
    told = "host 1, stage 1: the engine process did not report for 0.2 s and was killed"
    with pytest.raises(EngineGone, match=told) as caught:
        asyncio.run(asyncio.wait_for(supervisor.run(), WAIT_SECONDS))
    assert caught.value.exit_code == exit_codes.ENGINE_GONE
    assert supervisor.pid is not None
    assert is_gone(supervisor.pid)
