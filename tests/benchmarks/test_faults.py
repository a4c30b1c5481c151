"""What the soak under faults finds wrong, and what it tells of the faults."""

import asyncio
import time
from types import SimpleNamespace

import grpc
import grpc.aio
import pytest

from benchmarks import faults
from tests.server.conftest import served
from tests.server.fake_engine import WAIT_SECONDS, FakeEngine, byte_tokenizer


def test_wrong_answers_are_found() -> None:
    """Answers of an engine that repeats the prompt; then the third known answer is another."""

    async def scenario() -> faults.Outcome:
        found = faults.Outcome()
        async with asyncio.timeout(WAIT_SECONDS), served(FakeEngine(tokenizer=byte_tokenizer())) as it:
            right = [(request, request.prompt * 50) for request in faults.requests()]
            known = [(request, text[: request.max_tokens]) for request, text in right]
            await faults.polite(it.stub, known, time.monotonic() + 0.3, found, 1)
            assert found.failures == []
            assert found.firsts == found.calls == found.tries["answered"] > 0
            known[2] = (known[2][0], "something else")
            await faults.polite(it.stub, known, time.monotonic() + 0.5, found, 1)
        return found

    found = asyncio.run(scenario())
    failures = found.failures
    assert len(failures) == found.tries["wrong"] > 0
    assert all(failure.startswith("wrong: ") for failure in failures)


@pytest.mark.parametrize(
    ("code", "details", "lost"),
    [
        (grpc.StatusCode.UNAVAILABLE, "the engine is being restarted", False),
        (grpc.StatusCode.UNAVAILABLE, "", True),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "the deadline is in 60.0 s; waiting takes about 82.0 s", False),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded", True),
        (grpc.StatusCode.INTERNAL, "a bug", True),
    ],
)
def test_errors_of_the_servers_state_are_tried_again(code: grpc.StatusCode, details: str, lost: bool) -> None:
    errors = [grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)]

    async def generate(_: object, timeout: float) -> SimpleNamespace:
        assert timeout > 0
        if errors:
            raise errors.pop()
        return SimpleNamespace(text="right")

    found, known = faults.Outcome(), [(request, "right") for request in faults.requests()]
    until = time.monotonic() + 0.1
    asyncio.run(faults.polite(SimpleNamespace(Generate=generate), known, until, found, 1))
    assert found.failures == ([f"lost: {code.name}: {details}"] if lost else [])
    assert found.tries[code.name] == 1


def test_seconds_to_the_next_answer_are_told_by_fault() -> None:
    in_outage, last = (3.5, "cancels"), (9.5, "cancels")
    found = faults.Outcome(
        answered=[1.0, 5.0, 8.0, 9.0],
        faults=[(1.5, "flood"), in_outage, (5.5, "kill_engine"), (8.5, "flood"), last],
    )
    assert faults.waits(found) == {"flood": [3.5, 0.5], "kill_engine": [2.5]}


def test_service_lasts_since_the_last_break() -> None:
    answered = [1.0, 2.0, 3.0, 20.0, 22.0, 24.5]
    assert faults.served_since(answered, 25.0) == 20.0  # an engine that came back late is not killed at once
    assert faults.served_since(answered, 30.0) == 30.0
    assert faults.served_since([], 30.0) == 30.0
    assert faults.served_since(answered[:3], 4.0) == 1.0
