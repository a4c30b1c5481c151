"""KV events: the log that routers read at their own pace, over gRPC."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from jaxserve.scheduler.prefix_changes import BlocksStored
from server.auth import ApiKeys
from server.commands import cli
from server.commands.console import UserError
from server.commands.serve import from_flags
from server.kv_events import KvEventLog, Missed, number_of
from server.proto.jaxserve.v1.inference_pb2 import GenerateRequest
from server.proto.vllm.grpc.engine import vllm_engine_pb2 as pb
from server.proto.vllm.grpc.engine.vllm_engine_pb2_grpc import VllmEngineStub
from tests.server.conftest import Served
from tests.server.fake_engine import BLOCK_SIZE

ON = {"kv_events": True}
PROMPTS = ["one prompt of some blocks", "one prompt of other blocks", "a third"]


async def ask(it: Served, prompt: str, **call: Any) -> None:
    await it.stub.Generate(GenerateRequest(prompt=prompt, max_tokens=1), **call)


async def take(call: Any, count: int) -> list[pb.KvEventBatch]:
    return [await call.read() for _ in range(count)]


def whole_blocks(prompt: str) -> list[int]:
    """The tokens of a prompt's full blocks."""
    return list(prompt.encode())[: len(prompt) // BLOCK_SIZE * BLOCK_SIZE]


# The log


class Feed:
    """The engine of a log: changes come when the test says so."""

    def __init__(self) -> None:
        self.waiting: list[Any] = []

    def follow_prefixes(self, wake: Callable[[], None]) -> Callable[[], list[Any]]:
        self._wake = wake

        def taken() -> list[Any]:
            changes, self.waiting = self.waiting, []
            return changes

        return taken

    async def add(self, number: int = 0) -> None:
        self.waiting.append(stored(number))
        self._wake()
        await asyncio.sleep(0)


def stored(number: int) -> BlocksStored:
    return BlocksStored((number.to_bytes(32, "big"),), None, array("I", [number] * BLOCK_SIZE), BLOCK_SIZE, "")


async def first(batches: Any, count: int) -> list[int]:
    return [(await anext(batches)).sequence for _ in range(count)]


def test_a_reader_keeps_its_own_place() -> None:
    async def scenario() -> None:
        feed = Feed()
        log = KvEventLog(feed, most_batches=5)  # pyright: ignore[reportArgumentType]
        assert log.after(0) == []
        early = log.follow(0)
        for number in range(5):
            await feed.add(number)
        assert await first(early, 3) == [1, 2, 3]
        assert await first(log.follow(2), 3) == [3, 4, 5]
        await feed.add()
        await feed.add()
        assert [batch.sequence for batch in log.after(4)] == [5, 6, 7]
        assert await first(early, 4) == [4, 5, 6, 7]  # it has those in hand
        assert await first(log.follow(0), 5) == [3, 4, 5, 6, 7]
        for missed in (1, 8):
            with pytest.raises(Missed, match="3 to 7"):
                await anext(log.follow(missed))
        assert await first(log.follow(2), 1) == [3]
        waiting = asyncio.create_task(first(log.follow(7), 1))
        await asyncio.sleep(0)
        await feed.add()
        assert await waiting == [8]

    asyncio.run(scenario())


def test_the_log_is_bounded_in_bytes() -> None:
    async def scenario() -> None:
        feed = Feed()
        log = KvEventLog(feed, most_bytes=1000)  # pyright: ignore[reportArgumentType]
        for number in range(100):
            await feed.add(number)
        assert [batch.sequence for batch in log.after(0)] == list(range(95, 101))

    asyncio.run(scenario())


# gRPC


def test_a_subscriber_reads_every_block_with_its_parent(serve: Any) -> None:
    async def scenario(it: Served) -> None:
        stub: Any = VllmEngineStub(it.channel)
        call = stub.SubscribeKvEvents(pb.SubscribeKvEventsRequest())
        known: dict[int, list[int]] = {}
        for prompt in PROMPTS[:2]:
            await ask(it, prompt)
            (batch,) = await take(call, 1)
            (event,) = batch.events
            assert batch.dp_rank == 0
            assert event.event_id == batch.sequence_number << 32
            assert event.stored.HasField("parent_block_hash") == bool(known)
            path = known[event.stored.parent_block_hash] if known else []
            for block in event.stored.blocks:
                assert block.block_size == BLOCK_SIZE
                path = known[block.block_hash] = [*path, *block.token_ids]
            assert path == whole_blocks(prompt)
        assert it.engine.pool is not None
        assert {number_of(digest) for digest in it.engine.pool.blocks._block_of} == {hash_ % 2**64 for hash_ in known}
        it.engine.pool.flush()
        (batch,) = await take(call, 1)
        assert [event.WhichOneof("data") for event in batch.events] == ["cleared"]
        again = stub.SubscribeKvEvents(pb.SubscribeKvEventsRequest(start_sequence_number=1))
        assert [each.sequence_number for each in await take(again, 2)] == [2, 3]
        load = (await stub.GetLoads(pb.GetLoadsRequest())).loads[0]
        assert (load.outstanding_tokens, load.prefill_tokens, load.num_waiting_uncached_tokens) == (0, 0, 0)
        call.cancel()
        again.cancel()

    serve(scenario, app=ON)


def test_evicted_blocks_are_told(serve: Any) -> None:
    async def scenario(it: Served) -> None:
        stub: Any = VllmEngineStub(it.channel)
        call, known = stub.SubscribeKvEvents(pb.SubscribeKvEventsRequest()), set()
        for number in range(20):
            await ask(it, f"{number:02} " * 8)
        assert it.engine.pool is not None
        removed = 0
        while number_of(next(reversed(it.engine.pool.blocks._block_of))) not in {hash_ % 2**64 for hash_ in known}:
            for event in (await call.read()).events:
                known.update(block.block_hash for block in event.stored.blocks)
                known.difference_update(event.removed.block_hashes)
                removed += len(event.removed.block_hashes)
        call.cancel()
        assert removed > 20
        assert {number_of(digest) for digest in it.engine.pool.blocks._block_of} == {hash_ % 2**64 for hash_ in known}

    serve(scenario, app=ON)


async def refusal(it: Served, start: int = 0, **call: Any) -> grpc.StatusCode:
    stub: Any = VllmEngineStub(it.channel)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        async for _ in stub.SubscribeKvEvents(pb.SubscribeKvEventsRequest(start_sequence_number=start), **call):
            pass
    return refused.value.code()


def test_who_cannot_subscribe_is_told_why(serve: Any, tmp_path: Path) -> None:
    async def without(it: Served) -> None:
        assert await refusal(it) == grpc.StatusCode.FAILED_PRECONDITION

    async def lost(it: Served) -> None:
        await ask(it, PROMPTS[0])
        assert await refusal(it, 99) == grpc.StatusCode.OUT_OF_RANGE

    async def keyed(it: Served) -> None:
        assert await refusal(it) == grpc.StatusCode.UNAUTHENTICATED
        assert (
            await refusal(it, metadata=[("authorization", "Bearer key-of-team")]) == grpc.StatusCode.PERMISSION_DENIED
        )
        stub: Any = VllmEngineStub(it.channel)
        operator = [("authorization", "Bearer key-of-run")]
        call = stub.SubscribeKvEvents(pb.SubscribeKvEventsRequest(), metadata=operator)
        await ask(it, PROMPTS[0], metadata=[("authorization", "Bearer key-of-team")])
        (batch,) = await take(call, 1)
        call.cancel()
        assert batch.events[0].stored.cache_salt == '["team", ""]'

    serve(without)
    serve(lost, app=ON)
    keys = tmp_path / "keys.toml"
    keys.write_text('[team]\nkeys = ["key-of-team"]\n[run]\nkeys = ["key-of-run"]\noperator = true\n')
    serve(keyed, app=ON | {"keys": ApiKeys(keys)})


# Settings


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--kv-events-replay", "tcp://*:1"], "need --kv-events ENDPOINT"),
        (["--kv-events", "grpc", "--kv-events-topic", "kv"], "need --kv-events ENDPOINT"),
    ],
)
def test_settings_that_do_nothing_are_refused(flags: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        from_flags(cli.parser().parse_args(["serve", *flags]))
