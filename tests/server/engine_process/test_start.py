"""An engine process before it runs our code, and once it is ready."""

import asyncio
import re
import signal
import sys
from collections.abc import Callable

import grpc
import pytest

from server.engine_process.process import EngineProcess
from server.proto.jaxserve.v1.inference_pb2 import GenerateRequest
from tests.server.engine_process.conftest import Remote

TELL = "import signal; print(sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])))"


def test_ctrl_c_does_not_reach_a_process_that_imports() -> None:
    async def scenario() -> None:
        process = EngineProcess([sys.executable, "-c", TELL], lambda *_: None)
        await process.start()
        assert await process.ended() == 0
        assert str(sorted({signal.SIGINT, signal.SIGTERM})) in process.last_lines

    asyncio.run(scenario())
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_garbage_collections_leave_out_an_engines_start(
    run_remote: Callable[..., None],
) -> None:
    async def scenario(it: Remote) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await it.stub.Generate(GenerateRequest(prompt="a"))
        (left_out,) = re.findall(r"frozen: (\d+)", refused.value.details() or "")
        assert int(left_out) > 10_000

    run_remote(scenario, frozen=True)
