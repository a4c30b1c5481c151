"""`python -m benchmarks refusals`: what a call costs that a full queue refuses."""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
from rich.table import Table

from benchmarks.free_ports import free_ports
from benchmarks.started_server import started_server
from jaxserve.config import EngineConfig
from jaxserve.demo import DEMO_MODEL
from server.commands import flags
from server.commands.bench import machine
from server.commands.console import tables
from server.proto.jaxserve.v1 import inference_pb2 as pb
from server.proto.jaxserve.v1.inference_pb2_grpc import InferenceStub

HELP = """\
Fills the queue of `jaxserve serve` on the demo model, stops its engine process so that the queue stays full, and calls
again and again: how many such calls a core of the server refuses in a second (by its processor time), and with what."""

_SHORT = "It was a"
_CONTEXT = 512
_LONG = "It was a dark and stormy night. " * 12  # fits by its bytes
_OPEN = "It was a dark and stormy night. " * 40  # whether it fits is seen once it is tokenized: it does
_CHAT = [{"role": "user", "content": _LONG}]
_IDS = [97] * (_CONTEXT - 1)

FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "a short text": ("/v1/completions", {"prompt": _SHORT}),
    "a text that fits by its bytes": ("/v1/completions", {"prompt": _LONG}),
    "a text that fits by its tokens": ("/v1/completions", {"prompt": _OPEN}),
    "a chat that fits": ("/v1/chat/completions", {"messages": _CHAT, "max_tokens": 16}),
    "token ids that fit": ("/v1/completions", {"prompt": _IDS, "max_tokens": 1}),
    "too much text": ("/v1/completions", {"prompt": _OPEN * 10}),
    "too many tokens to generate": ("/v1/completions", {"prompt": _SHORT, "max_tokens": _CONTEXT}),
    "too many token ids": ("/v1/completions", {"prompt": _IDS * 2}),
    "gRPC: a short text": ("", {"prompt": _SHORT}),
    "gRPC: a text that fits by its bytes": ("", {"prompt": _LONG, "max_tokens": 16}),
    "gRPC: a text that fits by its tokens": ("", {"prompt": _OPEN, "max_tokens": 16}),
    "gRPC: too much text": ("", {"prompt": _OPEN * 10}),
}


@contextlib.contextmanager
def full_server(log: Path) -> Iterator[tuple[int, str, int]]:
    """The process id, gRPC address and HTTP port of a server whose queue stays full while the block lasts."""
    (http_port,) = free_ports(1)
    config = EngineConfig(max_rows=1, max_context=_CONTEXT, max_queued_requests=1)
    more = ["--http-port", str(http_port), "--stall-seconds", "100000"]
    with started_server(DEMO_MODEL, config, log, more) as server, grpc.insecure_channel(server.address) as channel:
        stub: Any = InferenceStub(channel)
        request = pb.GenerateRequest(prompt=_SHORT, max_tokens=_CONTEXT - 16, ignore_eos=True)
        engine = int(Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text())
        load = lambda: stub.GetLoad(pb.GetLoadRequest())  # noqa: E731
        calls: list[Any] = []
        try:
            while load().waiting != 1:  # the engine may have ended them before it was stopped
                os.kill(engine, signal.SIGCONT)
                for name in ("running", "waiting"):
                    calls.append(stub.Generate.future(request))
                    while not getattr(load(), name) and not calls[-1].done():
                        pass
                os.kill(engine, signal.SIGSTOP)
            yield server.pid, server.address, http_port
        finally:
            os.kill(engine, signal.SIGCONT)
            for call in calls:
                call.cancel()


def refusals(pid: int, call: Callable[[], str], seconds: float) -> tuple[Counter[str], float]:
    """What the calls of so many seconds ended with, and the server's seconds of processor time for each."""
    for _ in range(20):
        call()
    ends, before, found = time.monotonic() + seconds, _processor_seconds(pid), Counter[str]()
    while time.monotonic() < ends:
        found[call()] += 1
    return found, (_processor_seconds(pid) - before) / found.total()


def _processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=flags.duration, default=3.0, metavar="S", help="of each form (default: 3s)")


def run(args: argparse.Namespace) -> int:
    """Makes calls of every form and prints a table. Returns 0."""
    table = Table(title=f"Refused on a full queue ({machine.environment()['cpu']})")
    for name in ("call", "ended with", "processor time, ms", "refused in a second of one core"):
        table.add_column(name, justify="left" if name in ("call", "ended with") else "right")
    with tempfile.TemporaryDirectory() as folder, full_server(Path(folder) / "server.log") as (pid, address, port):
        connection = http.client.HTTPConnection("127.0.0.1", port)
        with contextlib.closing(connection), grpc.insecure_channel(address) as channel:
            stub: Any = InferenceStub(channel)

            def over_http(path: str, body: bytes) -> str:
                try:
                    connection.request("POST", path, body, {"content-type": "application/json"})
                    answer = connection.getresponse()
                    answer.read()
                    return str(answer.status)
                except ConnectionError:  # the server has closed it as idle
                    connection.close()
                    return over_http(path, body)

            def over_grpc(request: pb.GenerateRequest) -> str:
                try:
                    stub.Generate(request)
                except grpc.RpcError as error:
                    return error.code().name  # pyright: ignore[reportAttributeAccessIssue]
                return "OK"

            for name, (path, fields) in FORMS.items():
                body = json.dumps(fields).encode()
                message = None if path else pb.GenerateRequest(**fields)
                call = lambda: over_http(path, body) if message is None else over_grpc(message)  # noqa: B023, E731
                found, seconds = refusals(pid, call, args.seconds)
                statuses = ", ".join(found)
                table.add_row(name, statuses, f"{seconds * 1e3:.2f}", f"{1 / seconds:.0f}")
    tables().print(table)
    return 0
