"""KV events over ZMQ, as vLLM's subscribers read them: every batch comes, gaps are closed, nobody waits."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from server.kv_events import KvEventLog, number_of
from tests.server.conftest import Served
from tests.server.fake_engine import BLOCK_SIZE, WAIT_SECONDS, FakeEngine, byte_tokenizer
from tests.server.test_kv_events import ON, PROMPTS, Feed, ask, whole_blocks

TOPIC = b"kv@pod@m"


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
        self._sub.setsockopt(zmq.SUBSCRIBE, TOPIC)
        self._dealer.connect(replay)
        self.batches: list[tuple[int, Any]] = []

    def close(self) -> None:
        self._context.destroy(linger=0)

    def read(self, until: int) -> None:
        """Reads until it has batch `until`; batches that never came are asked for."""
        while self._next <= until:
            if not self._sub.poll(200):
                self.replay()
                continue
            topic, number, payload = self._sub.recv_multipart()
            assert topic == TOPIC
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
            assert topic == TOPIC
            self.batches.append((int.from_bytes(number, "big"), decoded(payload)))
            count += 1

    @property
    def _next(self) -> int:
        return self.batches[-1][0] + 1 if self.batches else 0


@pytest.fixture
def endpoints(tmp_path: Path) -> tuple[str, str]:
    return f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"


def test_a_vllm_subscriber_reads_every_event_and_closes_gaps(zmq: Any, endpoints: tuple[str, str], serve: Any) -> None:
    from server.kv_events_zmq import ZmqPublisher

    async def scenario(it: Served) -> None:
        log = it.app.handler.kv_events
        assert log is not None
        publisher = ZmqPublisher(log, endpoints[0], replay=endpoints[1], topic=TOPIC.decode())
        await ask(it, PROMPTS[0])  # nobody subscribes yet
        early = Subscriber(zmq, *endpoints)
        late = Subscriber(zmq, *endpoints)
        try:
            await asyncio.to_thread(early.read, 0)
            await ask(it, PROMPTS[1])
            assert it.engine.pool is not None
            it.engine.pool.flush()
            await ask(it, PROMPTS[2])
            for subscriber in (early, late):
                await asyncio.to_thread(subscriber.read, 3)
                assert [sequence for sequence, _ in subscriber.batches] == [0, 1, 2, 3]
                assert [batch.data_parallel_rank for _, batch in subscriber.batches] == [0] * 4
            kinds = [[type(event).__name__ for event in batch.events] for _, batch in late.batches]
            assert kinds == [["BlockStored"], ["BlockStored"], ["AllBlocksCleared"], ["BlockStored"]]
            first, second, fourth = (late.batches[at][1].events[0] for at in (0, 1, 3))
            assert first.token_ids == whole_blocks(PROMPTS[0])
            assert (first.parent_block_hash, first.block_size, first.medium) == (None, BLOCK_SIZE, "GPU")
            assert second.parent_block_hash in first.block_hashes
            assert set(fourth.block_hashes) == {number_of(digest) for digest in it.engine.pool.blocks._block_of}
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
        publisher = ZmqPublisher(log, endpoints[0], replay=endpoints[1], topic=TOPIC.decode())
        reader, idle = Subscriber(zmq, *endpoints), Subscriber(zmq, *endpoints)
        try:
            for number in range(1000):
                await feed.add(number)
                if number % 100 == 0:
                    await asyncio.sleep(0.001)
            await asyncio.to_thread(reader.read, 999)
            assert reader.batches[-1][0] == 999
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
        publisher = ZmqPublisher(log, endpoints[0], replay=endpoints[1], topic=TOPIC.decode())
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


def test_an_endpoint_that_cannot_be_used_is_refused(zmq: Any) -> None:
    from server.kv_events_zmq import ZmqPublisher

    async def scenario() -> None:
        log = KvEventLog(FakeEngine(byte_tokenizer()))
        for events, replay in (("nonsense", None), ("ipc:///tmp", "tcp://*:x")):
            with pytest.raises(ValueError, match="--kv-events cannot use"):
                ZmqPublisher(log, events, replay=replay)
        assert log.listeners == []

    asyncio.run(scenario())
