"""The engine in a notebook: cells in an event loop that runs already, interrupted, run again, never cleaned up."""

import asyncio
import gc
import logging
import threading
from typing import Any

import pytest

from jaxserve.request import FinishReason
from tests.fixtures import notebook
from tests.fixtures.tiny import make_engine, opinionated
from tests.server.fake_engine import WAIT_SECONDS

SAMPLING = "max_tokens=6, temperature=0.0, ignore_eos=True"


@pytest.fixture(scope="module")
def engine() -> Any:
    with make_engine(opinionated(0)) as engine:
        yield engine


def run(engine: Any, *cells: str) -> dict[str, Any]:
    """The names that the cells leave behind."""
    namespace: dict[str, Any] = {"engine": engine, "asyncio": asyncio}
    asyncio.run(asyncio.wait_for(notebook.run(cells, namespace), WAIT_SECONDS))
    return namespace


def test_calls_inside_a_running_loop(engine: Any) -> None:
    found = run(
        engine,
        f"whole = engine.generate([[5, 6], [7, 8]], {SAMPLING})",
        f"deltas = [delta async for delta in engine.stream([5, 6], {SAMPLING})]",
        "tokens = tuple(token for delta in deltas for token in delta.token_ids)",
        f"async def collect(prompt):\n    return [d async for d in engine.stream(prompt, {SAMPLING})]",
        "both = await asyncio.gather(collect([5, 6]), collect([7, 8]))",
    )
    assert found["tokens"] == found["whole"][0].token_ids
    assert len(found["deltas"]) == 6
    for deltas, completion in zip(found["both"], found["whole"], strict=True):
        assert tuple(token for delta in deltas for token in delta.token_ids) == completion.token_ids


def test_a_stream_in_the_background_waits_for_cells_that_block(engine: Any) -> None:
    found = run(
        engine,
        f"async def collect():\n    return [d async for d in engine.stream([5, 6], {SAMPLING})]",
        "task = asyncio.create_task(collect())\nawait asyncio.sleep(0)",
        f"whole = engine.generate([[5, 6]], {SAMPLING})[0]",  # nothing else of the loop runs meanwhile
        "deltas = await task",
    )
    assert tuple(token for delta in found["deltas"] for token in delta.token_ids) == found["whole"].token_ids
    assert found["deltas"][-1].finish_reason is FinishReason.LENGTH


def test_interrupted_cell_leaves_nothing(engine: Any) -> None:
    idle = "while engine.load().running or engine.load().slots_used:\n    await asyncio.sleep(0.001)"
    run(
        engine,
        "async for _ in engine.stream([5, 6], max_tokens=90, ignore_eos=True):\n    break",
        idle,
        "async def endless():\n    async for _ in engine.stream([5], max_tokens=90, ignore_eos=True):\n        pass",
        "task = asyncio.create_task(endless())\nawait asyncio.sleep(0)\ntask.cancel()",
        idle,
        "assert engine.generate([[5, 6]], max_tokens=2)[0].token_ids",
    )


def test_a_loop_that_has_been_closed_troubles_nobody(engine: Any, caplog: pytest.LogCaptureFixture) -> None:
    async def leave() -> None:
        async for _ in engine.stream([5, 6], max_tokens=90, ignore_eos=True):
            return

    with caplog.at_level(logging.ERROR):
        for _ in range(20):
            asyncio.run(leave())
        engine.generate([[5]], max_tokens=2)
    assert not caplog.records


def test_an_engine_that_is_dropped_takes_its_thread_along() -> None:
    before = set(threading.enumerate())
    engine = make_engine(opinionated(0))
    assert engine.generate([[5, 6]], max_tokens=2)[0].token_ids
    (thread,) = set(threading.enumerate()) - before
    del engine  # as by the cell that makes it, run again
    gc.collect()
    thread.join(WAIT_SECONDS)
    assert not thread.is_alive()
