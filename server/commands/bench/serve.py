"""`jaxserve bench serve`: sends a workload over gRPC to a running or a new server."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import grpc
from google.protobuf import json_format
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jaxserve.config import EngineConfig
from jaxserve.simulate import workload as traffic
from jaxserve.simulate.workload import Workload
from server.commands.bench import flags, load_generator, machine, plot, report
from server.commands.bench.progress import Bars
from server.commands.flags import add_engine_flags, engine_arguments, engine_config
from server.proto.jaxserve.v1.inference_pb2 import GetLoadResponse

HELP = """\
Sends requests to a running server over gRPC, each at its time whether or not earlier ones have ended.

  jaxserve bench serve --address 127.0.0.1:50051 --rate 2          Poisson arrivals at a server of yours
  jaxserve bench serve --model DIR --trace FILE --requests 500     recorded traffic, on a server started for it
  jaxserve bench serve --model DIR --rate 2 --compare-schedulers

Traces: Azure LLM inference (CSV: TIMESTAMP,ContextTokens,GeneratedTokens) and Mooncake (a JSON object a line:
timestamp, input_length, output_length, hash_ids). Requests longer than the server's context are clipped."""

_STOP_SECONDS = 60.0  # how long a server may take to drain
_COUNTERS = (
    "iterations",
    "prompt_tokens",
    "generated_tokens",
    "cached_tokens",
    "preemptions",
    "drafted_tokens",
    "accepted_tokens",
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `jaxserve bench serve`."""
    flags.add_output_flags(parser)
    group = parser.add_argument_group("server").add_mutually_exclusive_group()
    group.add_argument("--address", metavar="HOST:PORT", help="a server that runs already")
    group.add_argument("--model", type=Path, metavar="DIR", help="start a server on this checkpoint")
    group.add_argument("--shape", metavar="NAME", help=f"start one on random weights (default: {flags.SHAPE})")
    flags.add_workload_flags(parser)
    group = parser.add_argument_group("arrivals")
    arrivals = group.add_mutually_exclusive_group()
    arrivals.add_argument("--rate", type=float, metavar="R", help="Poisson arrivals, requests a second (default: 1)")
    arrivals.add_argument("--trace", type=Path, metavar="FILE", help="recorded arrivals and lengths")
    group.add_argument(
        "--speed", type=float, default=1.0, metavar="X", help="replay a trace X times as fast (default: %(default)s)"
    )
    add_engine_flags(parser)
    parser.set_defaults(max_rows=8)


def run(args: argparse.Namespace) -> int:
    """Sends the workload once for each scheduler, and prints, plots and writes the result.

    Returns:
      The exit code: 1 when a request failed.
    """
    address, out, console, config = args.address, args.out, flags.console(), engine_config(args)
    if address is not None and args.compare_schedulers:
        raise ValueError("--compare-schedulers needs servers of its own; leave --address out")
    model = flags.checkpoint(args) if address is None else None
    schedulers = flags.schedulers(args, config)
    reports, outcomes, models = [], {}, []
    workload = None
    with Bars() as bars:
        for name in schedulers:
            with contextlib.ExitStack() as stack:
                where: str = args.address
                if model is not None:
                    log = out / f"server-{name}.log"
                    bars.say(f"starting a server on {model} ({name}); its output goes to {log}")
                    server = started_server(model, dataclasses.replace(config, scheduler=name), log)
                    where = stack.enter_context(server).address
                served = load_generator.get_model(where)
                workload = _workload(args, served.max_context, served.vocab_size)
                before = load_generator.get_load(where)
                sent = load_generator.send(
                    where, workload, lambda done, n=name, w=workload: bars(f"serving ({n})", done, len(w.jobs))
                )
                after = load_generator.get_load(where)
            label = "server" if address is not None else name
            reports.append(report.summarise(label, sent.outcomes, extra=_counted(before, after, sent)))
            outcomes[label] = sent.outcomes
            models.append(json_format.MessageToDict(served, preserving_proto_field_name=True))
    assert workload is not None
    comparison = report.compare(reports[0], reports[1]) if len(reports) == 2 else None
    title = f"{models[0]['name']}: {workload.name}, {models[0]['max_rows']} rows"
    notes = [*workload.notes, *([report.REQUEST_NOTE] if "request" in schedulers else [])]
    report.print_runs(console, title, reports, notes)
    if comparison is not None:
        report.print_comparison(console, comparison)
    result = {
        "benchmark": "serve",
        "workload": workload.name,
        "notes": notes,
        "environment": machine.environment(),
        "models": models,
        "runs": reports,
        "comparison": comparison,
    }
    plot.serving(out / "serve.png", title, outcomes, {}, comparison)
    report.write_json(out / "serve.json", result, console)
    return 1 if any(r.failed for r in reports) else 0


def _workload(args: argparse.Namespace, max_context: int, vocab_size: int) -> Workload:
    """The workload that the flags describe, for a server of this context and vocabulary size."""
    if args.trace is not None:
        return traffic.read_trace(
            args.trace,
            max_context=max_context,
            vocab_size=vocab_size,
            seed=args.seed,
            limit=args.requests,
            speed=args.speed,
        )
    workload = flags.uniform(args, vocab_size)
    traffic.fit(workload, max_context)
    return traffic.poisson(workload, rate=args.rate or (50.0 if args.quick else 1.0), seed=args.seed)


def _counted(before: GetLoadResponse, after: GetLoadResponse, sent: load_generator.Sent) -> dict[str, Any]:
    """The server's counters during the run, and the delay of the load generator."""

    def grown(name: str) -> float:
        return getattr(after, name) - getattr(before, name)

    counted: dict[str, Any] = {name.replace("_", " "): grown(name) for name in _COUNTERS}
    counted["padding waste"] = f"{grown('padding_seconds') / (grown('bucket_seconds') or 1.0):.1%}"
    counted["host time an iteration, ms"] = round(1000 * grown("host_seconds") / (grown("iterations") or 1), 3)
    counted["compiled after ready"] = after.compiled_after_ready
    counted["load sent late by at most, ms"] = round(1000 * sent.late, 1)
    return counted


class Server(NamedTuple):
    """A server that was started here."""

    address: str
    pid: int


@contextlib.contextmanager
def started_server(model: Path, config: EngineConfig, log: Path) -> Iterator[Server]:
    """Runs `jaxserve serve` while the block lasts; yields it once it is healthy.

    Raises:
      ValueError: the server ended before it was ready; the message holds the end of its output.
    """
    port = free_port()
    address = f"127.0.0.1:{port}"
    command = [sys.executable, "-m", "server.commands.cli", "serve", "--model", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--http-port", "off", *engine_arguments(config)]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        try:
            _await_healthy(address, process, log)
            yield Server(address, process.pid)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _await_healthy(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    with grpc.insecure_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        while True:
            if process.poll() is not None:
                tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-5:])
                raise ValueError(f"the server ended with code {process.returncode} before it was ready:\n{tail}")
            try:
                answer = stub.Check(health_pb2.HealthCheckRequest(service=load_generator.SERVICE), timeout=5.0)
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return
            except grpc.RpcError:
                pass  # not listening yet, or the service is not registered yet
            time.sleep(0.2)


def free_port() -> int:
    """A port that is free at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
