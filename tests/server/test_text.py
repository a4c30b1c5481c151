"""Work on texts beside the event loop."""

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable

import pytest

from server import text
from server.text import RefusedWork, offload_if


class Work:
    """Work on a text of its own."""

    def __call__(self) -> str:
        return "done"


async def of_a_refused_call(work: Work) -> str:
    return await RefusedWork().run(10_000, work)


async def of_a_call(work: Work) -> str:
    return await offload_if(True, work)


@pytest.mark.parametrize("run", [of_a_call, of_a_refused_call])
def test_a_call_that_ends_frees_its_waiting_text(run: Callable, monkeypatch) -> None:
    """The threads are busy, and stay so."""
    free = threading.Event()
    with text.ThreadPoolExecutor(1) as busy:
        monkeypatch.setattr(text, "_THREADS", busy)
        monkeypatch.setattr(text, "_REFUSED_THREAD", busy)
        busy.submit(free.wait)

        async def end_one() -> None:
            work = Work()
            left = weakref.ref(work)
            call = asyncio.ensure_future(run(work))
            del work
            await asyncio.sleep(0)
            call.cancel()
            await asyncio.wait([call])
            assert call.cancelled()
            del call
            gc.collect()
            assert left() is None

        async def finish_one() -> None:
            call = asyncio.ensure_future(run(Work()))
            await asyncio.sleep(0)
            free.set()
            assert await call == "done"

        try:
            asyncio.run(end_one())
            asyncio.run(finish_one())
        finally:
            free.set()
