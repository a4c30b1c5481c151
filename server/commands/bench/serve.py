"""`jaxserve bench serve`: sends a workload over gRPC to a running server."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from google.protobuf import json_format

from jaxserve.simulate import workload as traffic
from jaxserve.simulate.workload import Workload
from server.commands.bench import flags, load_generator, machine, report
from server.commands.console import progress_bars, tables
from server.proto.jaxserve.v1.inference_pb2 import GetLoadResponse

HELP = """\
Sends requests to a running server over gRPC, each at its time whether or not earlier ones have ended.

  jaxserve bench serve --rate 2                                                 Poisson arrivals
  jaxserve bench serve --address HOST:PORT --trace FILE --requests 500          recorded traffic

Traces: Azure LLM inference (CSV: TIMESTAMP,ContextTokens,GeneratedTokens) and Mooncake (a JSON object a line:
timestamp, input_length, output_length, hash_ids). Requests longer than the server's context are clipped."""

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
    flags.add_output_flags(parser)
    parser.add_argument(
        "--address", metavar="HOST:PORT", default="127.0.0.1:50051", help="of the server (default: %(default)s)"
    )
    flags.add_workload_flags(parser)
    group = parser.add_argument_group("arrivals")
    arrivals = group.add_mutually_exclusive_group()
    arrivals.add_argument("--rate", type=float, metavar="R", help="Poisson arrivals, requests a second (default: 1)")
    arrivals.add_argument("--trace", type=Path, metavar="FILE", help="recorded arrivals and lengths")
    group.add_argument(
        "--speed", type=float, default=1.0, metavar="X", help="replay a trace X times as fast (default: %(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    """Sends the workload, and prints, plots and writes the result.

    Returns:
      The exit code: 1 when a request failed.
    """
    address, console = args.address, tables()
    model = load_generator.get_model(address)
    workload = _workload(args, model.max_context, model.vocab_size)
    before = load_generator.get_load(address)
    with progress_bars() as progress:
        sent = load_generator.send(address, workload, lambda done: progress("serving", done, len(workload.jobs)))
    after = load_generator.get_load(address)
    served = report.summarise("server", sent.outcomes, extra=_counted(before, after, sent))
    title = f"{model.name}: {workload.name}, {model.max_rows} rows"
    report.print_runs(console, title, [served], workload.notes)
    result = {
        "benchmark": "serve",
        "workload": workload.name,
        "notes": workload.notes,
        "environment": machine.environment(),
        "models": [json_format.MessageToDict(model, preserving_proto_field_name=True)],
        "runs": [served],
    }
    report.plot(args.out / "serve.png", title, {"server": sent.outcomes}, console)
    report.write_json(args.out / "serve.json", result, console)
    return 1 if served.failed else 0


def _workload(args: argparse.Namespace, max_context: int, vocab_size: int) -> Workload:
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
