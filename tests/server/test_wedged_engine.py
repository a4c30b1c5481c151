"""A real engine that stands still, in a server that nobody restarts."""

import asyncio
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import jax
import pytest

from jaxserve.engine import Engine
from jaxserve.runner import lowering
from jaxserve.runner.programs import Forward
from server.app import _RECOVERY_SECONDS, ServerApp
from server.commands import cli, flags
from server.proto.jaxserve.v1 import inference_pb2 as pb
from server.proto.jaxserve.v1.inference_pb2_grpc import InferenceStub
from tests.server.commands.serve_process import running
from tests.server.engine_process.test_processes import child_of
from tests.server.fake_engine import WAIT_SECONDS

SETTINGS = [
    "--buckets",
    "4,16",
    "--slots",
    "512",
    "--max-rows",
    "1",
    "--max-context",
    "64",
    "--compilation-cache",
    "off",
]
STALL_SECONDS = 1.0


@pytest.fixture
def goes_on(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """While this is not set, no program returns."""
    event, compiled = threading.Event(), lowering.forward
    event.set()

    def kernel(hidden: Any) -> Any:
        event.wait()
        return hidden

    def stopping(*args: Any, **kwargs: Any) -> Forward:
        out = compiled(*args, **kwargs)
        return out._replace(hidden=jax.pure_callback(kernel, out.hidden, out.hidden))

    monkeypatch.setattr(lowering, "forward", stopping)
    yield event
    event.set()


@pytest.mark.long
def test_callers_of_a_wedged_engine_fail_in_time(checkpoint: Path, goes_on: threading.Event) -> None:
    """The running one and the waiting one; once its program returns, the engine serves again."""

    async def scenario(engine: Engine) -> None:
        app = ServerApp(engine, name="tiny", version="0", stall_seconds=STALL_SECONDS)
        port, _ = await app.start("127.0.0.1", 0, None)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub: Any = InferenceStub(channel)

            async def told() -> tuple[grpc.StatusCode, str, float]:
                request = pb.GenerateRequest(prompt="a", max_tokens=50, ignore_eos=True)
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await stub.Generate(request, timeout=WAIT_SECONDS)
                return caught.value.code(), str(caught.value.details()), time.monotonic() - stopped

            await stub.Generate(pb.GenerateRequest(prompt="a", max_tokens=2))
            await app.check_health()  # a first iteration that took long is forgotten
            goes_on.clear()
            stopped = time.monotonic()
            for code, details, seconds in await asyncio.gather(told(), told()):
                assert (code, "no iteration" in details) == (grpc.StatusCode.UNAVAILABLE, True)
                assert STALL_SECONDS <= seconds < STALL_SECONDS + _RECOVERY_SECONDS + 2.0
            goes_on.set()
            until = time.monotonic() + WAIT_SECONDS
            while engine.load().running + engine.load().waiting:
                assert time.monotonic() < until
                await asyncio.sleep(0.01)
            await app.check_health()
            answer = await stub.Generate(pb.GenerateRequest(prompt="a", max_tokens=2, ignore_eos=True))
            assert len(answer.token_ids) == 2
        await app.stop()

    args = cli.parser().parse_args(["serve", "--model", str(checkpoint), *SETTINGS])
    with Engine.from_checkpoint(checkpoint, flags.engine_config(args)) as engine:
        asyncio.run(scenario(engine))


@pytest.mark.processes
def test_callers_of_a_stopped_engine_process_fail() -> None:
    """The running one and the waiting one, by default: the engine in a process of its own, without `--supervise`."""
    settings = ("--port", "0", "--http-port", "off", "--max-rows", "1", "--stall-seconds", str(STALL_SECONDS))
    with running("server.commands.cli serve", *settings) as server:
        port = server.until(lambda: re.search(r"ready on \S+:(\d+)", server.log))[1]
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub: Any = InferenceStub(channel)
            request = pb.GenerateRequest(prompt="It was a", max_tokens=480, ignore_eos=True)
            answers = [stub.Generate.future(request, timeout=2 * WAIT_SECONDS) for _ in range(2)]
            server.until(lambda: stub.GetLoad(pb.GetLoadRequest()).waiting == 1)
            engine = child_of(server.process.pid)
            os.kill(engine, signal.SIGSTOP)
            for answer in answers:
                assert answer.code() is grpc.StatusCode.UNAVAILABLE
