"""`python -m benchmarks faults`: faults at random, and callers who check every answer meanwhile."""

from __future__ import annotations

import argparse
import asyncio
import bisect
import contextlib
import json
import os
import random
import signal
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from benchmarks.free_ports import free_ports
from benchmarks.started_server import started_server
from jaxserve.config import EngineConfig
from jaxserve.demo import DEMO_MODEL
from server.commands.bench import flags, machine, report
from server.commands.console import progress_bars, tables
from server.proto.jaxserve.v1 import inference_pb2 as pb
from server.proto.jaxserve.v1.inference_pb2_grpc import InferenceStub

HELP = """\
Starts `jaxserve serve --supervise` on the demo model and does its worst to it: the engine process is killed and
stopped, the front is stopped for a moment, the disk of the request log stands still, crowds of callers come, leave and
send what is no request. Eight callers behave meanwhile and compare every answer with the one that they had before the
first fault (the engine is deterministic). None may be wrong and none lost: each call ends within a minute with its
answer, or with an error of the server's state, and is repeated. Tells how many are answered at the first try, and how
long after each fault the next answer came."""

_POLITE = 8
_CONFIG = EngineConfig(
    max_rows=8, buckets=(72,), slots=4096, max_context=512, slot_policy="reserve", deterministic=True
)
_LOST_SECONDS = 60.0  # a call that has not ended by then is lost
_TOLD = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED)  # of the server's state, not of the call
_TOO_LATE = "waiting takes about"  # in a refusal before the deadline, which names the wait: of the server's state, too
_TEXTS = ("It was a", "She had never", "Mr. Darcy", "In the evening", "They were", "Nothing could", "I am sure")
_OUTAGE_SECONDS = 1.0  # without an answer
_BREAK_SECONDS = 3.0  # without an answer: longer than any fault but a dead engine stops them
_STEADY_SECONDS = 65.0  # a supervisor counts engines that die after less service, and gives up after five in a row


Known = list[tuple[pb.GenerateRequest, str]]  # with the text of its answer


@dataclass(slots=True)
class Outcome:
    """What became of the polite calls.

    Attributes:
      tries: by what they ended with; "answered" are right.
      firsts: calls that were answered at their first try.
      failures: descriptions of wrong answers and lost calls.
      answered: monotonic seconds of each answer.
      faults: (monotonic seconds, name) of each fault.
    """

    tries: Counter[str] = field(default_factory=Counter)
    firsts: int = 0
    calls: int = 0
    failures: list[str] = field(default_factory=list)
    answered: list[float] = field(default_factory=list)
    faults: list[tuple[float, str]] = field(default_factory=list)


def requests() -> list[pb.GenerateRequest]:
    """The calls whose answers are known: greedy and drawn, short and long."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0, "max_tokens": 24},
        {"temperature": 0.9, "seed": 7, "max_tokens": 48},
        {"temperature": 0.7, "top_p": 0.9, "seed": 11, "max_tokens": 8, "repetition_penalty": 1.1},
    ]
    return [pb.GenerateRequest(prompt=text, ignore_eos=True, **kind) for text in _TEXTS for kind in kinds]


async def polite(stub: Any, known: Known, until: float, found: Outcome, seed: int) -> None:
    """Asks again and again, and again after an error of the server's state; notes what came."""
    rng = random.Random(seed)
    while time.monotonic() < until:
        request, expected = rng.choice(known)
        found.calls += 1
        for tries in range(1, 1000):
            try:
                answer = await stub.Generate(request, timeout=_LOST_SECONDS)
            except grpc.aio.AioRpcError as error:
                found.tries[error.code().name] += 1
                await asyncio.sleep(0.2)
                details = error.details() or ""
                if details and (error.code() in _TOLD or _TOO_LATE in details):
                    continue
                found.failures.append(f"lost: {error.code().name}: {details}")
                break
            found.tries["answered" if answer.text == expected else "wrong"] += 1
            if answer.text != expected:
                found.failures.append(f"wrong: {answer.text!r} instead of {expected!r}")
            found.answered.append(time.monotonic())
            found.firsts += tries == 1
            break
        else:
            found.failures.append("lost: no answer in 1,000 tries")


class Faults:
    """The faults, on one server.

    Args:
      front: process id of the server.
      disk: stops what reads the request log, while it is set.
    """

    def __init__(self, address: str, http_port: int, front: int, disk: threading.Event) -> None:
        self._address, self._http_port, self._front, self._disk = address, http_port, front, disk

    def engine(self) -> int | None:
        """The engine process: the child of the front that has most memory."""
        children: dict[int, int] = {}
        for each in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError, ValueError, IndexError):
                if int((each / "stat").read_text().rpartition(")")[2].split()[1]) == self._front:
                    children[int(each.name)] = int((each / "statm").read_text().split()[1])
        return max(children, key=children.__getitem__, default=None)

    async def kill_engine(self) -> None:
        self._signal(signal.SIGKILL)

    async def stop_engine(self) -> None:
        """For good: the watchdog has to find out."""
        self._signal(signal.SIGSTOP)

    def _signal(self, number: int) -> None:
        if (engine := self.engine()) is not None:
            os.kill(engine, number)

    async def pause_engine(self) -> None:
        """Shorter than the watchdog waits."""
        self._signal(signal.SIGSTOP)
        await asyncio.sleep(0.5)
        self._signal(signal.SIGCONT)

    async def pause_front(self) -> None:
        os.kill(self._front, signal.SIGSTOP)
        await asyncio.sleep(1.0)
        os.kill(self._front, signal.SIGCONT)

    async def slow_disk(self) -> None:
        self._disk.set()
        await asyncio.sleep(3.0)
        self._disk.clear()

    async def cancels(self) -> None:
        """Callers who leave after their first token."""
        request = pb.GenerateRequest(prompt="It was a", max_tokens=400, ignore_eos=True)

        async def leave(stub: Any) -> None:
            call = stub.GenerateStream(request)
            with contextlib.suppress(grpc.aio.AioRpcError):
                await call.read()
            call.cancel()

        async with grpc.aio.insecure_channel(self._address) as channel:
            await asyncio.gather(*(leave(InferenceStub(channel)) for _ in range(50)))

    async def flood(self) -> None:
        """More callers at once than the queue takes."""
        request = pb.GenerateRequest(prompt="It was a", max_tokens=4, ignore_eos=True)

        async def ask(stub: Any) -> None:
            with contextlib.suppress(grpc.aio.AioRpcError):
                await stub.Generate(request, timeout=_LOST_SECONDS)

        async with grpc.aio.insecure_channel(self._address) as channel:
            await asyncio.gather(*(ask(InferenceStub(channel)) for _ in range(400)))

    async def evil_input(self) -> None:
        """Bytes that are no request, bodies as large as are taken, grammars without end, bodies that never end."""
        large = json.dumps({"prompt": "a", "guided_choice": [1] * 1_900_000}).encode()
        endless = json.dumps({"prompt": "a", "guided_regex": "(((a{1,999}){1,999}){1,999}){1,999}"}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        for body in (large, endless, b"[" * 4_000_000, b"{}", os.urandom(1000)):
            await self._send(self._http_port, f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        await self._send(self._http_port, f"{head}content-length: 9\r\n\r\n{{".encode())
        for port in (self._http_port, int(self._address.rpartition(":")[2])):
            await self._send(port, os.urandom(5000))
            await self._send(port, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + os.urandom(500))
        async with grpc.aio.insecure_channel(self._address) as channel:
            call: Any = channel.unary_unary("/jaxserve.v1.Inference/Generate")
            for body in (os.urandom(2000), b"\xff" * 10_000, b"\x0a\xff\xff\xff\xff\x0f"):
                with contextlib.suppress(grpc.aio.AioRpcError):
                    await call(body)

    @staticmethod
    async def _send(port: int, data: bytes) -> None:
        with contextlib.suppress(OSError, TimeoutError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            with contextlib.closing(writer):
                writer.write(data)
                async with asyncio.timeout(5.0):
                    await writer.drain()
                    await reader.read(1)

    async def run(self, until: float, every: float, found: Outcome, seed: int) -> None:
        """One after another, at random, until the time is over. The last seconds are without."""
        rng, deadly, is_first = random.Random(seed), time.monotonic() + every, True
        while time.monotonic() < until - 20.0:
            await asyncio.sleep(rng.uniform(0.5, 1.5) * every)
            kinds: Sequence[Callable[[], Awaitable[None]]]
            now = time.monotonic()
            if now > deadly and (is_first or now > served_since(found.answered, now) + _STEADY_SECONDS):
                kinds, deadly, is_first = [self.kill_engine, self.stop_engine], now + _STEADY_SECONDS, False
            else:
                kinds = [self.pause_engine, self.pause_front, self.slow_disk, self.cancels, self.flood, self.evil_input]
            fault = rng.choice(kinds)
            found.faults.append((time.monotonic(), fault.__name__))
            await fault()


@contextlib.contextmanager
def slow_file(folder: Path) -> Iterator[tuple[Path, threading.Event]]:
    """A pipe, and an event while which nobody reads it."""
    os.mkfifo(path := folder / "requests")
    reader, stands_still, over = os.open(path, os.O_RDWR | os.O_NONBLOCK), threading.Event(), threading.Event()

    def read() -> None:
        while not over.wait(0.01):
            with contextlib.suppress(BlockingIOError):
                while not stands_still.is_set():
                    os.read(reader, 2**16)

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield path, stands_still
    finally:
        over.set()
        thread.join()
        os.close(reader)


async def soak(
    address: str, http_port: int, front: int, disk: threading.Event, seconds: float, every: float, seed: int
) -> Outcome:
    """Learns the answers, then lets polite callers and faults at the server for so long."""
    found, options = Outcome(), [("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 500)]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        stub: Any = InferenceStub(channel)
        known = [(request, (await stub.Generate(request)).text) for request in requests()]
        until = time.monotonic() + seconds
        callers = [polite(stub, known, until, found, seed + index) for index in range(_POLITE)]
        await asyncio.gather(Faults(address, http_port, front, disk).run(until, every, found, seed), *callers)
    return found


def served_since(answered: Sequence[float], now: float) -> float:
    """When the last break without an answer ended; `now` if it goes on."""
    since = now
    for each in reversed(answered):
        if since - each > _BREAK_SECONDS:
            break
        since = each
    return since


def waits(found: Outcome) -> dict[str, list[float]]:
    """Seconds from each fault to the next answer, by the fault's name; without faults that come in an outage."""
    times: dict[str, list[float]] = {}
    for at, name in found.faults:
        which = bisect.bisect(found.answered, at)
        if 0 < which < len(found.answered) and at - found.answered[which - 1] < _OUTAGE_SECONDS:
            times.setdefault(name, []).append(found.answered[which] - at)
    return times


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of this benchmark."""
    flags.add_output_flags(parser)
    parser.add_argument("--minutes", type=float, default=120.0, metavar="M", help="(default: %(default)g)")
    parser.add_argument("--every", type=float, default=6.0, metavar="S", help="between faults (default: %(default)g)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the faults (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Soaks a server; prints and writes what became of the polite callers. Returns 1 if an answer is wrong or lost."""
    minutes, console, (http_port,) = 1.0 if args.quick else args.minutes, tables(), free_ports(1)
    with tempfile.TemporaryDirectory() as folder, slow_file(Path(folder)) as (path, disk):
        more = ["--supervise", "--http-port", str(http_port), "--request-log", str(path), "--log-prompts"]
        with progress_bars(), started_server(DEMO_MODEL, _CONFIG, args.out / "server-faults.log", more) as server:
            found = asyncio.run(soak(server.address, http_port, server.pid, disk, 60 * minutes, args.every, args.seed))
    wrong = [*found.failures[:5]] or (["nothing was answered"] if not found.answered else [])
    facts = {
        "calls": f"{found.calls} by {_POLITE} callers in {minutes:g} min: "
        + ", ".join(f"{count} {name}" for name, count in sorted(found.tries.items())),
        "availability": f"{found.firsts / max(1, found.calls):.2%} of the calls are answered at the first try",
        "faults": ", ".join(f"{count} {name}" for name, count in Counter(name for _, name in found.faults).items()),
        "verdict": "; ".join(wrong) or "no answer is wrong, none is lost",
    }
    for name, text in facts.items():
        console.print(f"{name:14}  {text}", soft_wrap=True)
    for name, times in sorted(waits(found).items()):
        console.print(f"{name:14}  next answer after {statistics.median(times):.2f} s, at most {max(times):.2f} s")
    result = {
        "benchmark": "faults",
        "environment": machine.environment(),
        "minutes": minutes,
        "calls": found.calls,
        "tries": dict(found.tries),
        "answered_at_first_try": found.firsts,
        "seconds_to_next_answer": waits(found),
        "defects": dict(Counter(found.failures).most_common(100)),
    }
    report.write_json(args.out / "faults.json", result, console)
    return 1 if wrong else 0
