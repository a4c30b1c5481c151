"""`python -m benchmarks soak`: requests of every kind, and the server's memory meanwhile."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import itertools
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import grpc
import grpc.aio
import numpy as np

from benchmarks.started_server import started_server
from jaxserve.demo import DEMO_MODEL
from server.commands.bench import flags, load_generator, machine, report
from server.commands.console import progress_bars, tables
from server.commands.flags import add_engine_flags, engine_config
from server.proto.jaxserve.v1 import inference_pb2 as pb
from server.proto.jaxserve.v1.inference_pb2_grpc import InferenceStub

HELP = """\
Starts a server and sends it requests of every kind from many clients at once: some are cancelled, some run out of time,
some share prefixes, and the slots are too few for all of them, so the scheduler preempts requests. The benchmark
watches memory, slots, threads and open files of the server. At the end no request may be lost, every slot must be free
and memory flat."""

_WARM_UP = 0.2  # share of the run before memory is judged
_FLAT = 0.01  # growth over the rest, as a share of the memory, above which it counts as a leak
_PREFIXES, _PREFIX_TOKENS = 8, 130
_LONGEST_DEADLINE = 1.0  # seconds
_EMPTY_SECONDS = 30.0  # within which an idle server releases everything

Ending = Literal["answered", "cancelled", "out of time", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakRequest:
    """A request, and how its client behaves.

    Attributes:
      tokens: the length of the answer if it runs to its end; None where the model may end it.
      leaves_after: tokens after which the client cancels; None lets it end.
      deadline: seconds that the client waits; None waits forever.
    """

    message: pb.GenerateRequest
    tokens: int | None
    leaves_after: int | None = None
    deadline: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSample:
    """The server at one moment.

    Attributes:
      seconds: since the start of the run.
      ended: requests that have ended so far.
      resident: bytes of memory.
    """

    seconds: float
    ended: int
    resident: int
    threads: int
    open_files: int
    running: int
    waiting: int
    slots_used: int
    slots_cached: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    """A straight line through the memory after the warm-up, over the requests that had ended.

    Attributes:
      growth: bytes by which the line grows from the end of the warm-up to the end of the run.
      spread: bytes between the largest value and the smallest.
      share: the growth as a share of the line's start.
    """

    growth: float
    spread: float
    share: float

    @property
    def is_flat(self) -> bool:
        return self.share <= _FLAT


def memory_trend(samples: Sequence[ServerSample]) -> Trend:
    """Fits a line to the resident memory after the warm-up."""
    warm = [each for each in samples if each.ended >= _WARM_UP * samples[-1].ended]
    ended = np.array([each.ended for each in warm], np.float64)
    values = np.array([each.resident for each in warm], np.float64)
    if ended[0] == ended[-1]:
        raise ValueError("the soak was too short to see a trend; give more --requests")
    slope, base = np.polyfit(ended - ended[0], values, 1)
    growth = float(slope * (ended[-1] - ended[0]))
    return Trend(growth=growth, spread=float(np.ptp(values)), share=growth / float(base))


def draw(index: int, seed: int, vocab_size: int) -> SoakRequest:
    """The request of this number, with random lengths and settings."""
    rng = np.random.default_rng([seed, index])
    prompt = rng.integers(vocab_size, size=int(rng.integers(1, 160))).tolist()
    if rng.random() < 0.4:  # a few shared prefixes, which the other prompts evict
        which = int(rng.integers(_PREFIXES))
        prefix = np.random.default_rng([seed, 1 << 32, which]).integers(vocab_size, size=_PREFIX_TOKENS)
        prompt = [*prefix.tolist(), *prompt[:60]]
    tokens = int(rng.integers(1, 65))
    fields: dict[str, Any] = {"max_tokens": tokens, "ignore_eos": True, "request_id": f"soak-{index}"}
    match rng.integers(4):
        case 0:
            fields["temperature"] = 0.0
        case 1:
            fields |= {"temperature": 0.8, "top_p": 0.9, "seed": index}
        case 2:
            fields |= {"top_k": 40, "repetition_penalty": 1.1, "logprobs": 2}
        case _:
            fields["prompt_logprobs"] = 1
    if may_end := bool(rng.random() < 0.1):
        fields["ignore_eos"] = False
        fields["stop_token_ids"] = rng.integers(vocab_size, size=16).tolist()
    message = pb.GenerateRequest(**fields)
    message.prompt_token_ids.ids.extend(prompt)
    leaves_after = int(rng.integers(0, tokens)) if rng.random() < 0.15 else None
    deadline = float(rng.uniform(0.005, _LONGEST_DEADLINE)) if rng.random() < 0.15 else None
    return SoakRequest(
        message=message,
        tokens=None if may_end else tokens,
        leaves_after=leaves_after,
        deadline=deadline,
    )


@dataclass(slots=True)
class Soaked:
    """The result of a soak.

    Attributes:
      endings: requests by how they ended, each counted once.
      last: the server's load after the last request.
    """

    endings: Counter[Ending]
    failures: list[str]
    samples: list[ServerSample]
    last: dict[str, Any]


async def soak(
    address: str,
    pid: int,
    calls: Callable[[int], SoakRequest],
    requests: int,
    clients: int,
    every: float,
    progress: Callable[[int], None],
) -> Soaked:
    """Sends the calls 0..requests-1 from `clients` clients, and waits until the server is idle.

    Args:
      every: seconds between samples.
    """
    soaked = Soaked(Counter(), [], [], {})
    numbers = iter(range(requests))
    started = time.monotonic()
    async with grpc.aio.insecure_channel(address) as channel:
        await channel.channel_ready()
        stub = InferenceStub(channel)

        async def client() -> None:
            for index in numbers:
                ending, problem = await _one(stub, calls(index))
                soaked.endings[ending] += 1
                if problem is not None:
                    soaked.failures.append(f"request {index}: {problem}")
                progress(soaked.endings.total())

        async def sample() -> pb.GetLoadResponse:
            answer: Any = await stub.GetLoad(pb.GetLoadRequest())
            soaked.samples.append(_sample(pid, time.monotonic() - started, soaked.endings.total(), answer))
            return answer

        async def watch() -> None:
            while True:
                await sample()
                await asyncio.sleep(every)

        watching = asyncio.ensure_future(watch())
        await asyncio.gather(*(client() for _ in range(clients)))
        watching.cancel()
        patience = time.monotonic() + _EMPTY_SECONDS
        while True:
            answer = await sample()
            if not (answer.running or answer.waiting or answer.slots_used) or time.monotonic() > patience:
                break
            await asyncio.sleep(0.1)
        soaked.last = {field.name: getattr(answer, field.name) for field in answer.DESCRIPTOR.fields}
    return soaked


async def _one(stub: Any, call: SoakRequest) -> tuple[Ending, str | None]:
    """Sends a call as its client would; returns how it ended, and a description of any failure."""
    came, finished, left = 0, False, False
    answer = stub.GenerateStream(call.message, timeout=call.deadline)
    try:
        if call.leaves_after == 0:
            await asyncio.sleep(0.01)
            left = answer.cancel()
        async for message in answer:
            came += len(message.token_ids)
            finished = finished or message.finish_reason != 0
            if call.leaves_after is not None and came >= call.leaves_after and not finished:
                answer.cancel()
                return "cancelled", None
    except asyncio.CancelledError:
        if not left:
            raise
        return "cancelled", None
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and call.deadline is not None:
            return "out of time", None
        return "failed", f"{error.code().name}: {error.details()}"
    if not finished:
        return "failed", f"the stream ended after {came} tokens without a reason"
    if call.tokens is not None and came != call.tokens:
        return "failed", f"{came} tokens came instead of {call.tokens}"
    return "answered", None


def _sample(pid: int, seconds: float, ended: int, load: Any) -> ServerSample:
    status = Path(f"/proc/{pid}/status").read_text()
    resident, threads = (int(re.search(rf"{name}:\s+(\d+)", status)[1]) for name in ("VmRSS", "Threads"))  # type: ignore[index]
    return ServerSample(
        seconds=seconds,
        ended=ended,
        resident=1024 * resident,
        threads=threads,
        open_files=len(os.listdir(f"/proc/{pid}/fd")),
        running=load.running,
        waiting=load.waiting,
        slots_used=load.slots_used,
        slots_cached=load.slots_cached,
    )


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of this benchmark."""
    flags.add_output_flags(parser)
    parser.add_argument("--model", type=Path, metavar="DIR", help="a checkpoint directory (default: the demo model)")
    parser.add_argument("--requests", type=flags.positive, default=20_000, metavar="N", help="(default: %(default)s)")
    parser.add_argument(
        "--clients", type=flags.positive, default=48, metavar="N", help="that ask at a time (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the requests (default: %(default)s)")
    add_engine_flags(parser)
    parser.set_defaults(slots=1536, max_context=1024)


def run(args: argparse.Namespace) -> int:
    """Starts a server and soaks it; prints, plots and writes what it held.

    Returns:
      The exit code: 1 when a request failed or the server kept something.
    """
    model, requests, clients = args.model or DEMO_MODEL, 200 if args.quick else args.requests, args.clients
    config, console, out, seed = engine_config(args), tables(), args.out, args.seed
    config = dataclasses.replace(config, max_queued_requests=max(config.max_queued_requests, clients))
    log = out / "server-soak.log"
    with progress_bars() as bars, started_server(model, config, log) as server:
        vocab_size = load_generator.get_model(server.address).vocab_size
        soaked = asyncio.run(
            soak(
                server.address,
                server.pid,
                lambda index: draw(index, seed, vocab_size),
                requests,
                clients,
                every=0.1 if requests < 1000 else 2.0,
                progress=lambda done: bars("soaking", done, requests),
            )
        )
    memory = memory_trend(soaked.samples)
    wrong = defects(soaked, requests, memory, log.read_text(encoding="utf-8", errors="replace"))
    last, end = soaked.last, soaked.samples[-1]
    facts = {
        "requests": f"{requests} by {clients} clients in {end.seconds:.0f} s: "
        + ", ".join(f"{count} {ending}" for ending, count in sorted(soaked.endings.items())),
        "engine": f"{last['iterations']} iterations, {last['generated_tokens']} tokens generated, "
        f"{last['cached_tokens']} prompt tokens found in the prefix cache, {last['preemptions']} preemptions",
        "slots": f"{max(each.slots_used for each in soaked.samples)} of {last['slots_total']} in use at most; at the "
        f"end {last['slots_used']} in use, {last['slots_cached']} hold prefixes, the rest are free",
        "memory": f"{end.resident / 2**20:.1f} MiB at the end; a line through the last {1 - _WARM_UP:.0%} of requests "
        f"grows {memory.growth / 2**20:+.2f} MiB ({memory.share:+.2%}), largest less smallest "
        f"{memory.spread / 2**20:.2f} MiB",
        "threads, files": f"{end.threads} threads, {end.open_files} open files at the end; at most "
        f"{max(each.threads for each in soaked.samples)} and {max(each.open_files for each in soaked.samples)}",
        "verdict": "; ".join(wrong) or "every request ended as intended, every slot is free, memory is flat",
    }
    for name, text in facts.items():
        console.print(f"{name:14}  {text}", soft_wrap=True)
    result = {
        "benchmark": "soak",
        "environment": machine.environment(),
        "requests": requests,
        "clients": clients,
        "endings": dict(soaked.endings),
        "memory": memory,
        "last": last,
        "defects": wrong,
        "samples": soaked.samples,
    }
    report.write_json(out / "soak.json", result, console)
    return 1 if wrong else 0


def defects(soaked: Soaked, requests: int, memory: Trend, log: str) -> list[str]:
    """Describes everything that a clean soak must not show."""
    last, (first, *_, end) = soaked.last, soaked.samples
    wrong = soaked.failures[:5]
    if soaked.endings.total() != requests:
        wrong.append(f"{requests - soaked.endings.total()} requests never ended")
    wrong += [f"{name} is {last[name]} at the end" for name in ("running", "waiting", "slots_used") if last[name]]
    if last["compiled_after_ready"]:
        wrong.append(f"{last['compiled_after_ready']} programs were compiled while serving")
    if not memory.is_flat:
        wrong.append(f"memory grew by {memory.share:.2%} after the warm-up, more than {_FLAT:.0%}")
    if (more := end.open_files - first.open_files) > 0:
        wrong.append(f"{more} more files are open than at the start")
    said = itertools.islice((line for line in log.splitlines() if " ERROR " in line), 1)
    return [*wrong, *(f"the server's log has {line!r}" for line in said)]
