"""Kills a server's processes while streams run, and counts how each stream ends.

    python -m tests.server.broken_streams --kills 100

A stream may be whole, or end in an error that its client library raises. It must not just stop. With a supervisor a
stream without a token yet must be whole in the end, and so must new calls.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import httpx2 as httpx
import openai

from server.proto.jaxserve.v1 import inference_pb2 as pb
from server.proto.jaxserve.v1.inference_pb2_grpc import InferenceStub
from server.proto.vllm.grpc.engine import vllm_engine_pb2 as vllm_pb
from server.proto.vllm.grpc.engine.vllm_engine_pb2_grpc import VllmEngineStub
from tests.jaxserve.multihost.processes import ROOT

PROMPT, TOKENS = "abc", 300  # of each stream; the fake engine repeats the prompt
_PAUSE = 0.003  # seconds of an iteration
_ROWS = 4  # of twice as many streams, so that half of them wait when the first are broken
_SECONDS = 60.0  # that anything may take
_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
CASES = ("engine, supervised", "engine", "front", "front, by SIGTERM")  # what is killed


@dataclass(slots=True)
class Ending:
    """How a stream ended: tokens that came, and the error that its client raised, if any."""

    protocol: str
    tokens: int = 0
    error: str | None = None

    @property
    def is_silent(self) -> bool:
        return self.error is None and self.tokens < TOKENS


class Server:
    """`jaxserve serve` on a fake engine, and one client of each kind."""

    def __init__(self, front: subprocess.Popen[str], grpc_address: str, http_address: str) -> None:
        self.front, self._url = front, f"http://{http_address}"
        self._channel = grpc.aio.insecure_channel(grpc_address)
        self._http = httpx.AsyncClient(base_url=self._url, timeout=_SECONDS)
        self._openai = openai.AsyncOpenAI(base_url=f"{self._url}/v1", api_key="-", max_retries=0, timeout=_SECONDS)
        self.streams: dict[str, Callable[[], AsyncIterator[int]]] = {
            "gRPC": self._over_grpc,
            "vLLM gRPC": self._over_vllm,
            "OpenAI completions": self._completions,
            "OpenAI chat": self._chat,
            "OpenAI responses": self._responses,
            "TGI": lambda: self._events("/generate_stream", {"inputs": PROMPT, "parameters": _TGI}, "token"),
            "KServe": lambda: self._events("/v2/models/demo/generate_stream", _KSERVE, "text_output"),
            "SSE": lambda: self._events("/v1/completions", _BODY, "choices"),
        }

    async def run(self, protocol: str, told: Callable[[], None] = lambda: None) -> Ending:
        """Reads a stream to its end.

        Args:
          told: called with each piece that comes.
        """
        ending = Ending(protocol)
        try:
            async with asyncio.timeout(_SECONDS):
                async for tokens in self.streams[protocol]():
                    ending.tokens += tokens
                    told()
        except (openai.APIError, httpx.HTTPError, grpc.aio.AioRpcError, StreamError) as problem:
            ending.error = f"{type(problem).__name__}: {problem}"
        return ending

    async def _over_grpc(self) -> AsyncIterator[int]:
        stub: Any = InferenceStub(self._channel)
        async for message in stub.GenerateStream(pb.GenerateRequest(prompt=PROMPT, max_tokens=TOKENS)):
            yield len(message.token_ids)

    async def _over_vllm(self) -> AsyncIterator[int]:
        stub: Any = VllmEngineStub(self._channel)
        sampling = vllm_pb.SamplingParams(max_tokens=TOKENS)
        async for message in stub.Generate(vllm_pb.GenerateRequest(text=PROMPT, sampling_params=sampling, stream=True)):
            yield len(message.chunk.token_ids)

    async def _completions(self) -> AsyncIterator[int]:
        stream = await self._openai.completions.create(model="demo", prompt=PROMPT, max_tokens=TOKENS, stream=True)
        async for chunk in stream:
            yield sum(len(choice.text) for choice in chunk.choices)

    async def _chat(self) -> AsyncIterator[int]:
        messages: Any = [{"role": "user", "content": PROMPT}]
        stream = await self._openai.chat.completions.create(
            model="demo", messages=messages, max_tokens=TOKENS, stream=True
        )
        async for chunk in stream:
            yield sum(len(choice.delta.content or "") for choice in chunk.choices)

    async def _responses(self) -> AsyncIterator[int]:
        stream = await self._openai.responses.create(model="demo", input=PROMPT, max_output_tokens=TOKENS, stream=True)
        async for event in stream:
            yield len(event.delta) if event.type == "response.output_text.delta" else 0

    async def _events(self, path: str, body: dict[str, Any], field: str) -> AsyncIterator[int]:
        """Server-sent events, as a client reads them that knows what an error looks like and nothing else."""
        async with self._http.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                raise StreamError(str(response.status_code))
            async for line in response.aiter_lines():
                if not line.startswith("data:") or line == "data: [DONE]":
                    continue
                event = json.loads(line.removeprefix("data:"))
                if "error" in event:
                    raise StreamError(str(event["error"]))
                value = event[field]
                yield len(value if isinstance(value, str) else value["text"] if "text" in value else value[0]["text"])

    async def close(self) -> None:
        await self._openai.close()
        await self._http.aclose()
        await self._channel.close()


class StreamError(Exception):
    """A stream told of an error."""


_TGI = {"max_new_tokens": TOKENS}
_KSERVE = {"text_input": PROMPT, "parameters": {"max_tokens": TOKENS}}
_BODY = {"prompt": PROMPT, "max_tokens": TOKENS, "stream": True}


@contextlib.asynccontextmanager
async def serving(folder: Path, *, supervise: bool) -> AsyncIterator[Server]:
    """A server with its files in a folder."""
    orders, template = folder / "orders.json", folder / "template.jinja"
    orders.write_text(json.dumps({"pause": _PAUSE}))
    template.write_text(_TEMPLATE)
    command = [sys.executable, "-m", "tests.server.serve_fake", "--orders", str(orders), "--max-rows", str(_ROWS)]
    command += ["--port", "0", "--http-port", "0", "--chat-template", str(template), *["--supervise"] * supervise]
    command += ["--served-model-name", "demo", "--drain-seconds", "0"]
    log = folder / "log"
    with log.open("w") as err:
        front = subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.DEVNULL, stderr=err)
    try:
        async with asyncio.timeout(_SECONDS):
            while (found := re.search(r"ready on (\S+) .*? on (\S+) \(HTTP", log.read_text())) is None:
                assert front.poll() is None, log.read_text()
                await asyncio.sleep(0.02)
        server = Server(front, found[1], found[2])
        yield server
        await server.close()
    finally:
        front.kill()
        front.wait()


async def kill_once(server: Server, case: str, after: float) -> list[Ending]:
    """Kills what the case says while a stream of every kind runs. Returns how they end.

    Args:
      after: seconds from the first piece that comes.
    """
    begun = asyncio.Event()
    streams = [asyncio.create_task(server.run(protocol, begun.set)) for protocol in server.streams]
    await asyncio.wait_for(begun.wait(), _SECONDS)
    await asyncio.sleep(after)
    target = _engine_of(server.front.pid) if case.startswith("engine") else server.front.pid
    os.kill(target, signal.SIGTERM if case == CASES[-1] else signal.SIGKILL)
    return await asyncio.gather(*streams)


def _engine_of(front: int) -> int:
    """Its engine process; it has another that renders chat templates."""
    (found,) = [
        child
        for child in map(int, Path(f"/proc/{front}/task/{front}/children").read_text().split())
        if b"fake_engine_process" in Path(f"/proc/{child}/cmdline").read_bytes()
    ]
    return found


def check(case: str, endings: list[Ending], afterwards: list[Ending]) -> list[str]:
    """What is wrong with these endings."""
    wrong = [f"{each.protocol} just stopped after {each.tokens} tokens" for each in endings if each.is_silent]
    if case == "engine, supervised":
        wrong += [f"{each.protocol} had no token: {each.error}" for each in endings if each.error and not each.tokens]
        wrong += [f"a new {each.protocol}: {each}" for each in afterwards if each.error or each.tokens != TOKENS]
    return wrong


async def measure(
    kills: int, folder: Path, cases: Sequence[str] = CASES, show: Callable[[str], None] = lambda _: None
) -> list[str]:
    """Kills processes, one after the other, as often for each case. Returns what went wrong."""
    rng, wrong = random.Random(0), []
    counted: collections.Counter[tuple[str, str]] = collections.Counter()
    for index, case in enumerate(cases):
        supervise = case == "engine, supervised"
        left = share = (kills + len(cases) - 1 - index) // len(cases)
        while left:
            async with serving(folder, supervise=supervise) as server:
                for _ in range(min(left, 4) if supervise else 1):  # a front gives up after five restarts in a row
                    rng.shuffle(names := list(server.streams))
                    server.streams = {name: server.streams[name] for name in names}
                    endings = await kill_once(server, case, rng.random() * TOKENS * _PAUSE / 2)
                    again = [server.run(name) for name in names] if supervise else []
                    afterwards = await asyncio.gather(*again)
                    wrong += [f"{case}: {each}" for each in check(case, endings, afterwards)]
                    for each in endings:
                        how = "silent" if each.is_silent else "error" if each.error else "whole"
                        counted[case, how] += 1
                    left -= 1
        ends = {how: number for (of, how), number in counted.items() if of == case}
        show(f"{case}: {share} kills; ends of streams: {ends}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES, help="what is killed")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        wrong = asyncio.run(measure(args.kills, Path(folder), args.cases, partial(print, flush=True)))
    print("\n".join(wrong) or "no stream ended silently")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
