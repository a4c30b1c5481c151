"""A soak of a server on a made-up engine, and the defects that it reports."""

import asyncio
import os
from collections import Counter

import pytest

from benchmarks import soak
from tests.server.conftest import served
from tests.server.fake_engine import VOCAB_SIZE, WAIT_SECONDS, FakeEngine, byte_tokenizer

REQUESTS, CLIENTS = 60, 6


def sample(ended: int, **changes) -> soak.ServerSample:
    usual = {"resident": 100 * 2**20, "threads": 9, "open_files": 12, "slots_used": 64, "slots_cached": 32}
    return soak.ServerSample(**{"seconds": float(ended), "ended": ended, "running": 2, "waiting": 1} | usual | changes)


def soaked(samples, **last) -> soak.Soaked:
    ended: Counter[soak.Ending] = Counter({"answered": samples[-1].ended})
    nothing = dict.fromkeys(("running", "waiting", "slots_used", "compiled_after_ready"), 0)
    return soak.Soaked(ended, [], samples, nothing | last)


def defects(samples, log="", requests=100, **last) -> list[str]:
    return soak.defects(soaked(samples, **last), requests, soak.memory_trend(samples), log)


def steady(**changes) -> list[soak.ServerSample]:
    return [sample(ended, **changes) for ended in range(0, 101, 5)]


def test_every_kind_of_ending_occurs_and_nothing_is_kept() -> None:
    async def scenario() -> soak.Soaked:
        engine = FakeEngine(tokenizer=byte_tokenizer())
        async with asyncio.timeout(WAIT_SECONDS), served(engine) as it:

            def call(index: int) -> soak.SoakRequest:
                message = soak.draw(index, 0, VOCAB_SIZE).message
                message.ClearField("stop_token_ids")
                kind = ("answered", "cancelled", "out of time")[index % 3]
                message.ignore_eos = True
                return soak.SoakRequest(
                    message=message,
                    tokens=message.max_tokens,
                    leaves_after=1 if kind == "cancelled" and message.max_tokens > 1 else None,
                    deadline=1e-4 if kind == "out of time" else None,
                )

            return await soak.soak(
                it.address, os.getpid(), call, REQUESTS, CLIENTS, every=0.01, progress=lambda _: None
            )

    found = asyncio.run(scenario())
    assert found.failures == []
    assert found.endings.total() == REQUESTS
    assert {"answered", "out of time"} <= found.endings.keys()
    assert found.endings["failed"] == 0
    assert (found.last["running"], found.last["waiting"], found.last["slots_used"]) == (0, 0, 0)
    assert found.samples[-1].ended == REQUESTS
    assert found.samples[-1].resident > 2**20
    assert found.samples[-1].threads > 1


def test_requests_depend_on_seed_and_number() -> None:
    calls = [soak.draw(index, 7, 4096) for index in range(200)]
    assert calls[5] == soak.draw(5, 7, 4096)
    assert calls[5] != soak.draw(5, 8, 4096)
    messages = [call.message for call in calls]
    heads = Counter(tuple(message.prompt_token_ids.ids[: soak._PREFIX_TOKENS]) for message in messages)
    assert sum(count > 1 for count in heads.values()) == soak._PREFIXES
    assert 10 < sum(call.leaves_after is not None for call in calls) < 60
    assert 10 < sum(call.deadline is not None for call in calls) < 60
    assert all(call.tokens in (None, message.max_tokens) for call, message in zip(calls, messages, strict=True))


def test_a_clean_soak_has_no_defects() -> None:
    assert defects(steady()) == []


def test_memory_after_the_warm_up_is_flat() -> None:
    samples = [sample(ended, resident=min(ended, 20) * 2**20 + 2**28) for ended in range(0, 101, 5)]
    found = soak.memory_trend(samples)
    assert (abs(found.growth), found.spread) == (pytest.approx(0, abs=1), 0)


def test_growth_is_that_of_a_fitted_line() -> None:
    samples = [sample(ended, resident=10_000_000 + 1_000 * ended) for ended in range(0, 101, 5)]
    found = soak.memory_trend(samples)
    assert found.growth == pytest.approx(80_000)
    assert found.spread == 80_000
    assert found.share == pytest.approx(80_000 / 10_020_000)


@pytest.mark.parametrize(
    ("samples", "settings", "message"),
    [
        (steady(), {"slots_used": 64}, "slots_used is 64 at the end"),
        (steady(), {"running": 1}, "running is 1 at the end"),
        (steady(), {"compiled_after_ready": 2}, "2 programs were compiled while serving"),
        (steady(), {"requests": 101}, "1 requests never ended"),
        (steady(), {"log": "x\n2026 ERROR server: request 'a' failed\n"}, "log has \"2026 ERROR server: request 'a'"),
        ([*steady()[:-1], sample(100, open_files=13)], {}, "1 more files are open than at the start"),
        (
            [sample(ended, resident=2**26 + 2**14 * ended) for ended in range(0, 101, 5)],
            {},
            "memory grew by 1.94% after the warm-up, more than 1%",
        ),
    ],
)
def test_defects_are_named(samples, settings, message) -> None:
    (told,) = defects(samples, **settings)
    assert message in told
