"""KV events over gRPC and over ZMQ, as routers read them: every batch comes, gaps are closed, nobody waits."""

from __future__ import annotations

import asyncio
import time
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
from tests.server.fake_engine import BLOCK_SIZE, WAIT_SECONDS, FakeEngine, byte_tokenizer

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
        assert {number_of(digest) for digest in it.engine.pool._block_of} == {hash_ % 2**64 for hash_ in known}
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
        while number_of(next(reversed(it.engine.pool._block_of))) not in {hash_ % 2**64 for hash_ in known}:
            for event in (await call.read()).events:
                known.update(block.block_hash for block in event.stored.blocks)
                known.difference_update(event.removed.block_hashes)
                removed += len(event.removed.block_hashes)
        call.cancel()
        assert removed > 20
        assert {number_of(digest) for digest in it.engine.pool._block_of} == {hash_ % 2**64 for hash_ in known}

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


# ZMQ


@pytest.fixture
def zmq() -> Any:
    pytest.importorskip("msgspec")
    return pytest.importorskip("zmq")


def decoded(payload: bytes) -> Any:
    """A batch, read by classes that say what vllm/distributed/kv_events.py (v0.26) says of it."""
    import msgspec

    class KVCacheEvent(msgspec.Struct, omit_defaults=True, tag=True):
        pass

    class BlockStored(KVCacheEvent):
        block_hashes: list[bytes | int]
        parent_block_hash: bytes | int | None
        token_ids: list[int]
        block_size: int
        lora_id: int | None
        medium: str | None
        lora_name: str | None
        extra_keys: list[tuple[Any, ...] | None] | None = None
        group_idx: int | None = None
        kv_cache_spec_kind: str | None = None
        kv_cache_spec_sliding_window: int | None = None

    class BlockRemoved(KVCacheEvent):
        block_hashes: list[bytes | int]
        medium: str | None
        group_idx: int | None = None

    class AllBlocksCleared(KVCacheEvent):
        pass

    kind = msgspec.defstruct(
        "KVEventBatch",
        [
            ("ts", float),
            ("events", list[BlockStored | BlockRemoved | AllBlocksCleared]),
            ("data_parallel_rank", int | None, None),
        ],
        array_like=True,
    )
    return msgspec.msgpack.decode(payload, type=kind)


class Subscriber:
    """Follows a publisher as vLLM's example subscriber does, and closes gaps by asking for a replay."""

    def __init__(self, zmq: Any, endpoint: str, replay: str) -> None:
        self._zmq, self._context = zmq, zmq.Context()
        self._sub, self._dealer = self._context.socket(zmq.SUB), self._context.socket(zmq.DEALER)
        self._sub.connect(endpoint)
        self._sub.setsockopt(zmq.SUBSCRIBE, b"kv@pod@m")
        self._dealer.connect(replay)
        self.batches: list[tuple[int, Any]] = []

    def close(self) -> None:
        self._context.destroy(linger=0)

    def read(self, until: int) -> None:
        """Reads until it has batch `until`; batches that never came are asked for."""
        while not self.batches or self.batches[-1][0] < until:
            if not self._sub.poll(200):
                self.replay()
                continue
            topic, number, payload = self._sub.recv_multipart()
            assert topic == b"kv@pod@m"
            if (sequence := int.from_bytes(number, "big")) > self._next:
                self.replay()
            if sequence >= self._next:
                self.batches.append((sequence, decoded(payload)))

    def replay(self) -> int:
        """Asks for the batches from the next one on. Returns how many came."""
        self._dealer.send_multipart((b"", self._next.to_bytes(8, "big")))
        count = 0
        while True:
            assert self._dealer.poll(WAIT_SECONDS * 1000)
            empty, topic, number, payload = self._dealer.recv_multipart()
            assert empty == b""
            if int.from_bytes(number, "big", signed=True) == -1:
                assert (topic, payload) == (b"", b"")
                return count
            assert topic == b"kv@pod@m"
            self.batches.append((int.from_bytes(number, "big"), decoded(payload)))
            count += 1

    @property
    def _next(self) -> int:
        return self.batches[-1][0] + 1 if self.batches else 1


@pytest.fixture
def endpoints(tmp_path: Path) -> tuple[str, str]:
    return f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"


def test_a_vllm_subscriber_reads_every_event_and_closes_gaps(zmq: Any, endpoints: tuple[str, str], serve: Any) -> None:
    from server.kv_events_zmq import ZmqPublisher

    async def scenario(it: Served) -> None:
        log = it.app.handler.kv_events
        assert log is not None
        publisher = ZmqPublisher(log, endpoints[0], replay=endpoints[1], topic="kv@pod@m")
        await ask(it, PROMPTS[0])  # nobody subscribes yet
        early = Subscriber(zmq, *endpoints)
        late = Subscriber(zmq, *endpoints)
        try:
            await asyncio.to_thread(early.read, 1)
            await ask(it, PROMPTS[1])
            assert it.engine.pool is not None
            it.engine.pool.flush()
            await ask(it, PROMPTS[2])
            for subscriber in (early, late):
                await asyncio.to_thread(subscriber.read, 4)
                assert [sequence for sequence, _ in subscriber.batches] == [1, 2, 3, 4]
                assert [batch.data_parallel_rank for _, batch in subscriber.batches] == [0] * 4
            kinds = [[type(event).__name__ for event in batch.events] for _, batch in late.batches]
            assert kinds == [["BlockStored"], ["BlockStored"], ["AllBlocksCleared"], ["BlockStored"]]
            first, second, fourth = (late.batches[at][1].events[0] for at in (0, 1, 3))
            assert first.token_ids == whole_blocks(PROMPTS[0])
            assert (first.parent_block_hash, first.block_size, first.medium) == (None, BLOCK_SIZE, "GPU")
            assert second.parent_block_hash in first.block_hashes
            assert set(fourth.block_hashes) == {number_of(digest) for digest in it.engine.pool._block_of}
            assert abs(late.batches[0][1].ts - time.time()) < WAIT_SECONDS
        finally:
            early.close()
            late.close()
            await asyncio.to_thread(publisher.close)

    serve(scenario, app=ON)


def test_a_subscriber_that_does_not_read_holds_nobody_up(zmq: Any, endpoints: tuple[str, str]) -> None:
    from server.kv_events_zmq import ZmqPublisher

    async def scenario() -> None:
        feed = Feed()
        log = KvEventLog(feed, most_batches=100)  # pyright: ignore[reportArgumentType]
        publisher = ZmqPublisher(log, endpoints[0], replay=endpoints[1], topic="kv@pod@m")
        reader, idle = Subscriber(zmq, *endpoints), Subscriber(zmq, *endpoints)
        try:
            for number in range(1000):
                await feed.add(number)
                if number % 100 == 0:
                    await asyncio.sleep(0.001)
            await asyncio.to_thread(reader.read, 1000)
            assert reader.batches[-1][0] == 1000
        finally:
            reader.close()
            idle.close()
            await asyncio.to_thread(publisher.close)

    asyncio.run(scenario())


def test_an_answer_to_what_is_no_request_is_none(zmq: Any, endpoints: tuple[str, str]) -> None:
    from server.kv_events_zmq import ZmqPublisher

    async def scenario() -> None:
        feed = Feed()
        log = KvEventLog(feed)  # pyright: ignore[reportArgumentType]
        publisher = ZmqPublisher(log, endpoints[0], replay=endpoints[1], topic="kv@pod@m")
        reader = Subscriber(zmq, *endpoints)
        try:
            await feed.add()
            for wrong in ([b"x"], [b"", b"short"], [b"", b"12345678", b"more"]):
                reader._dealer.send_multipart(wrong)
            assert await asyncio.to_thread(reader.replay) == 1
        finally:
            reader.close()
            await asyncio.to_thread(publisher.close)

    asyncio.run(scenario())


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


def test_an_endpoint_that_cannot_be_used_is_refused(zmq: Any) -> None:
    from server.kv_events_zmq import ZmqPublisher

    async def scenario() -> None:
        log = KvEventLog(FakeEngine(byte_tokenizer()))
        for events, replay in (("nonsense", None), ("ipc:///tmp", "tcp://*:x")):
            with pytest.raises(ValueError, match="--kv-events cannot use"):
                ZmqPublisher(log, events, replay=replay)
        assert log.listeners == []

    asyncio.run(scenario())
