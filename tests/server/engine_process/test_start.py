"""An engine process before it runs our code."""

import asyncio
import signal
import sys

from server.engine_process.process import EngineProcess

TELL = "import signal; print(sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])))"


def test_ctrl_c_does_not_reach_a_process_that_imports() -> None:
    async def scenario() -> None:
        process = EngineProcess([sys.executable, "-c", TELL], lambda *_: None)
        await process.start()
        assert await process.ended() == 0
        assert str(sorted({signal.SIGINT, signal.SIGTERM})) in process.last_lines

    asyncio.run(scenario())
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
