"""The demo model behind its front, attacked over each protocol as no cheap test can: nothing crashes, nothing leaks,
and whoever behaves is answered as ever. Minutes each."""

import asyncio
import contextlib
import gc
import json
import logging
import os
import re
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx2 as httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.demo import DEMO_MODEL
from server.app import ServerApp
from server.call import Observer, RequestTiming
from server.engine_process.remote_engine import RemoteEngine
from server.grpc.server import ROUTER_SERVICES, SERVICE
from server.proto.jaxserve.v1 import inference_pb2 as pb
from server.proto.jaxserve.v1.inference_pb2_grpc import InferenceStub
from server.proto.vllm.grpc.engine import vllm_engine_pb2 as engine_pb
from tests.server import fuzz
from tests.server.http import fuzz as http_fuzz
from tests.server.test_engine_served import engine_process

pytestmark = pytest.mark.exhaustive

BATCH = 50  # examples that Hypothesis draws together
FLAGS = ("--buckets", "16,64", "--slots", "65536", "--max-rows", "16")
PROMPT, ANSWER = "It was a", " very good sort of thing, and I am sure I should"
PARTS = 10
WAIT = 300.0  # the bound of every wait; nothing ever takes this long
MEGABYTES = 64  # that a process may come to have more after an attack than after the first tenth of it

VLLM, KSERVE = ROUTER_SERVICES
OVER_GRPC = {"grpc": (SERVICE,), "vllm": (VLLM,), "kserve": (KSERVE,)}
OVER_HTTP = {"openai": http_fuzz.OPENAI, "tgi": http_fuzz.TGI, "kserve-http": http_fuzz.KSERVE + http_fuzz.NOWHERE}


Attack = Callable[[Callable[["Attacked", int], Awaitable[None]]], None]


class Attacked:
    """A server on the demo model, and two who behave: one over gRPC, one over HTTP."""

    def __init__(self, engine: RemoteEngine, app: ServerApp, port: int, http_port: int) -> None:
        self.engine, self.app = engine, app
        self.port, self.http_port = port, http_port
        self._served = 0

    @contextlib.asynccontextmanager
    async def well_behaved(self) -> AsyncIterator[None]:
        """Holds that good requests are answered rightly meanwhile, and that nothing is left of the others."""
        over = asyncio.Event()
        before = self._served
        good = [asyncio.create_task(behave(over)) for behave in (self._over_grpc, self._over_http)]
        try:
            yield
        finally:
            over.set()
        await asyncio.gather(*good)
        assert self._served >= before + 2  # each of them at least once
        await self.nothing_is_left()

    async def _over_grpc(self, over: asyncio.Event) -> None:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{self.port}") as channel:
            stub: Any = InferenceStub(channel)
            while not over.is_set():
                answer = await stub.Generate(pb.GenerateRequest(prompt=PROMPT, max_tokens=12, temperature=0))
                assert answer.text == ANSWER
                self._served += 1

    async def _over_http(self, over: asyncio.Event) -> None:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{self.http_port}", timeout=WAIT) as client:
            while not over.is_set():
                body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0}
                answer = await client.post("/v1/completions", json=body)
                assert answer.json()["choices"][0]["text"] == ANSWER
                self._served += 1

    async def nothing_is_left(self) -> None:
        """Returns when no call is under way, and nothing is held any more that calls hold."""
        handler = self.app.handler
        async with asyncio.timeout(WAIT):
            await handler.calls.wait_until_none()
            while (load := self.engine.load()).slots_used or load.running or load.waiting or load.outstanding_tokens:
                await asyncio.sleep(0.01)
        admission = handler.admission
        assert (admission.reserved_requests, admission.reserved_tokens, admission.kept_requests) == (0, 0, 0)
        assert (admission._waiting, handler.calls._calls, self.engine._requests) == ({}, set(), {})
        assert handler.unhealthy_reason is None
        assert load.compiled_after_ready == 0

    async def sizes(self) -> dict[str, float]:
        """Megabytes of this process and of the engine's, open files, tasks, and objects of ours."""
        await asyncio.sleep(0.5)  # connections that were just closed
        gc.collect()
        kept = ("jaxserve.iteration", "jaxserve.stats")  # what the live view keeps is bounded by itself
        modules = [str(type(each).__module__) for each in gc.get_objects()]
        return {
            "front": _megabytes(os.getpid()),
            "engine": max(map(_megabytes, _children(os.getpid()))),
            "files": len(os.listdir("/proc/self/fd")),
            "tasks": len(asyncio.all_tasks()),
            "objects": sum(each.startswith(("server.", "jaxserve.")) and each not in kept for each in modules),
        }


@contextlib.asynccontextmanager
async def _attacked(cache: str) -> AsyncIterator[Attacked]:
    async with engine_process(DEMO_MODEL, *FLAGS, "--compilation-cache", cache) as engine:
        # Where these tests share the machine an iteration may take as long as it likes.
        app = ServerApp(engine, name="echo", version="0", stall_seconds=WAIT)
        port, http_port = await app.start("127.0.0.1", 0, 0)
        assert http_port is not None
        try:
            yield Attacked(engine, app, port, http_port)
        finally:
            await app.stop()


@pytest.fixture(scope="module")
def attack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attack]:
    """Runs an attack in ten parts, and holds after each that nothing is left and in the end that nothing has grown
    since the first. All attacks are on one server, one after the other."""
    logging.getLogger("grpc._cython.cygrpc").setLevel(logging.CRITICAL)  # it logs each message that is none
    served = _attacked(str(tmp_path_factory.mktemp("programs")))
    with asyncio.Runner() as runner:
        it = runner.run(served.__aenter__())

        async def in_parts(part: Callable[[Attacked, int], Awaitable[None]]) -> None:
            sizes = []
            for index in range(PARTS):
                async with it.well_behaved():
                    await part(it, index)
                if index in (0, PARTS - 1):
                    sizes.append(await it.sizes())
            first, last = sizes
            assert last["front"] < first["front"] + MEGABYTES, sizes
            assert last["engine"] < first["engine"] + MEGABYTES, sizes
            assert last["files"] <= first["files"] + 5, sizes
            assert last["tasks"] <= first["tasks"] + 5, sizes
            assert last["objects"] <= first["objects"] + 200, sizes  # bounded caches fill

        yield lambda part: runner.run(in_parts(part))
        runner.run(served.__aexit__(None, None, None))


def drawn(strategy: st.SearchStrategy[Any], count: int) -> list[Any]:
    """So many examples."""
    found: list[Any] = []

    @settings(fuzz.together, max_examples=count // BATCH)
    @given(batch=st.lists(strategy, min_size=BATCH, max_size=BATCH))
    def collect(batch: list[Any]) -> None:
        found.extend(batch)

    collect()
    return found


def over(*names: str, daily: int, weekly: int) -> pytest.MarkDecorator:
    """How many attacks a test makes: a few over our own protocol and OpenAI's daily, many over each weekly."""
    each = [pytest.param(name, daily, id=f"daily-{name}") for name in names if name in ("grpc", "openai")]
    each += [pytest.param(name, weekly, id=f"weekly-{name}", marks=pytest.mark.weekly) for name in names]
    return pytest.mark.parametrize(("protocol", "count"), each)


@over(*OVER_GRPC, *OVER_HTTP, daily=1_000, weekly=10_000)
def test_malformed_requests(attack: Attack, protocol: str, count: int) -> None:
    if protocol in OVER_GRPC:
        hostile = drawn(fuzz.calls_of(*OVER_GRPC[protocol]), count)
    else:
        hostile = drawn(http_fuzz.requests_of(*OVER_HTTP[protocol]), count)
    assert len(hostile) == count
    each = count // PARTS

    async def part(it: Attacked, index: int) -> None:
        now = hostile[index * each : (index + 1) * each]
        if protocol in OVER_GRPC:
            await fuzz.attack(f"127.0.0.1:{it.port}", now)
        else:
            await http_fuzz.attack(it.http_port, now)

    attack(part)


# Connections that misbehave, as bytes: no client library would send or leave out what these do.


def _http(path: str, body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    lines = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{lines}Content-Length: {len(data)}\r\n\r\n".encode() + data


def _http2(method: str, message: bytes) -> bytes:
    """A whole unary-stream call on a connection of its own: preface, settings, headers, one message."""

    def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
        return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + payload

    def header(name: str, value: str) -> bytes:  # literal, not indexed, no Huffman code (RFC 7541, 6.2.2)
        return b"\0" + bytes((len(name),)) + name.encode() + bytes((len(value),)) + value.encode()

    headers = b"".join(
        header(name, value)
        for name, value in (
            *((":method", "POST"), (":scheme", "http"), (":path", method), (":authority", "x")),
            *(("te", "trailers"), ("content-type", "application/grpc")),
        )
    )
    data = b"\0" + struct.pack(">I", len(message)) + message
    return fuzz.PREFACE + frame(4, 0, 0, b"") + frame(1, 4, 1, headers) + frame(0, 1, 1, data)


def beginning(protocol: str, tokens: int) -> bytes:
    """What begins a stream of so many tokens, with much to say of each."""
    endless: dict[str, Any] = {"max_tokens": tokens, "ignore_eos": True, "logprobs": 20}
    sampling = engine_pb.SamplingParams(**endless)
    vllm = engine_pb.GenerateRequest(text=PROMPT, stream=True, sampling_params=sampling)
    grammar = {"type": "regex", "value": "( [a-z]+)+"}  # TGI has no other word for going on
    tgi = {"max_new_tokens": tokens, "top_n_tokens": 20, "grammar": grammar}
    return {
        "grpc": lambda: _http2(
            f"/{SERVICE}/GenerateStream", pb.GenerateRequest(prompt=PROMPT, **endless).SerializeToString()
        ),
        "vllm": lambda: _http2(f"/{VLLM}/Generate", vllm.SerializeToString()),
        "openai": lambda: _http("/v1/completions", endless | {"prompt": PROMPT, "stream": True}),
        "tgi": lambda: _http("/generate_stream", {"inputs": PROMPT, "parameters": tgi}),
    }[protocol]()


async def connected(it: Attacked, protocol: str, receive_buffer: int | None = None) -> tuple[Any, Any]:
    """A connection to the port of a protocol."""
    plain = socket.socket()
    plain.setblocking(False)
    if receive_buffer is not None:
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    port = it.port if protocol in OVER_GRPC else it.http_port
    await asyncio.get_running_loop().sock_connect(plain, ("127.0.0.1", port))
    return await asyncio.open_connection(sock=plain, limit=2**10)


def reset(writer: Any) -> None:
    """Ends a connection without so much as an end of file."""
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def all_of(count: int, at_once: int, one: Callable[[int], Awaitable[None]]) -> None:
    slots = asyncio.Semaphore(at_once)

    async def bounded(index: int) -> None:
        async with slots:
            await one(index)

    await asyncio.gather(*map(bounded, range(count)))


STREAMS = ("grpc", "vllm", "openai", "tgi")


@over(*STREAMS, daily=1_000, weekly=3_000)
def test_streams_are_reset(attack: Attack, protocol: str, count: int) -> None:
    """At their beginning, before their first token, and amid them."""

    async def part(it: Attacked, _: int) -> None:
        async def one(index: int) -> None:
            reader, writer = await connected(it, protocol)
            whole = beginning(protocol, 500)
            writer.write(whole[: len(whole) * (index % 7) // 6] if index % 7 < 6 else whole)
            if index % 7 == 6 or index % 7 == 0:
                async with asyncio.timeout(WAIT):
                    await reader.read(100 * (index % 5)) if index % 7 == 6 else None
            reset(writer)

        await all_of(count // PARTS, 32, one)

    attack(part)


@over(*STREAMS, daily=1_000, weekly=3_000)
def test_streams_are_half_closed(attack: Attack, protocol: str, count: int) -> None:
    """Their callers end what they send, and read on."""

    async def part(it: Attacked, _: int) -> None:
        async def one(index: int) -> None:
            reader, writer = await connected(it, protocol)
            whole = beginning(protocol, 500)
            writer.write(whole[: len(whole) * (index % 4 + 1) // 4])
            writer.write_eof()
            with contextlib.suppress(ConnectionError):
                async with asyncio.timeout(WAIT):
                    while await reader.read(2**16):
                        pass
            writer.transport.abort()

        await all_of(count // PARTS, 32, one)

    attack(part)


@over(*STREAMS, daily=300, weekly=1_200)
def test_readers_who_read_nothing(attack: Attack, protocol: str, count: int) -> None:
    """They stay until the engine is done with all of them, which waits for none.

    In the fifth part there are fewer, 4 daily and 16 weekly, with streams of a megabyte each, more than buffers hold.
    """

    async def part(it: Attacked, index: int) -> None:
        number, tokens = (count // 75, 1500) if index == 4 else (count // PARTS, 20)
        readers = [await connected(it, protocol, receive_buffer=4096) for _ in range(number)]
        handler, begun = it.app.handler, _Begun(tokens)
        handler.observers.append(begun)
        for _, writer in readers:
            writer.write(beginning(protocol, tokens))
        async with asyncio.timeout(WAIT):
            while len(begun.names) < number or not it.engine._requests.keys().isdisjoint(begun.names):
                await asyncio.sleep(0.01)
        handler.observers.remove(begun)
        for _, writer in readers:
            reset(writer)

    attack(part)


class _Begun(Observer):
    """An observer of the requests that ask for so many tokens: the names of those that the engine has taken."""

    def __init__(self, tokens: int) -> None:
        self.names: set[str] = set()
        self._tokens = tokens

    def started(self, timing: RequestTiming) -> None:
        if timing.request.sampling.max_tokens == self._tokens:
            self.names.add(timing.request.request_id)


def _megabytes(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    return int(found[1]) / 1024 if found else 0.0


def _children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
