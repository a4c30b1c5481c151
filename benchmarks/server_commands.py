"""What starts or loads a server: `jaxserve bench serve`, soak, start, surface."""

from __future__ import annotations

import argparse
from pathlib import Path

from server.commands.bench import flags
from server.commands.bench.flags import Benchmarks

_SERVE = """\
Sends requests to a running server over gRPC, each at its time whether or not earlier ones have ended.

  jaxserve bench serve --address 127.0.0.1:50051 --rate 2          Poisson arrivals at a server of yours
  jaxserve bench serve --model DIR --trace FILE --requests 500     recorded traffic, on a server started for it
  jaxserve bench serve --model DIR --rate 2 --compare-schedulers

Traces: Azure LLM inference (CSV: TIMESTAMP,ContextTokens,GeneratedTokens) and Mooncake (a JSON object a line:
timestamp, input_length, output_length, hash_ids). Requests longer than the server's context are clipped."""
_SOAK = """\
Starts a server and sends it requests of every kind, by many clients at once: some are cancelled, some run out of time,
some share prefixes, and there are too few slots for all of them, so that requests are preempted. Memory, slots, threads
and open files of the server are watched. At the end no request may be lost, every slot must be free and memory flat."""
_START = """\
Starts a server with an empty compilation cache, and again with what that one left there. The steps of each start are
told in seconds, with the processor seconds of the whole: those vary less where something else runs beside it."""
_SURFACE = """\
Starts a server and measures, over the wire, what its front door costs and what it stands: the time of an iteration with
so many streams against the same work without a server, the processors' time for a token, how quickly calls are refused
at ten times the load that can be served, and what that does to those that are accepted. The load generator's own
processor time is reported apart; on a machine with few cores it is part of what is measured. Servers that answer
callers in a process of their own, and in a thread of the engine's, take turns.

  jaxserve bench surface --shape bloom-560m
  jaxserve bench surface --model DIR --streams 16 --seconds 20"""


def add(benchmarks: Benchmarks) -> None:
    """Adds these benchmarks to the command line."""
    serve = benchmarks.add("serve", "load a server over gRPC", _SERVE, _run_serve)
    group = serve.add_argument_group("server")
    where = group.add_mutually_exclusive_group()
    where.add_argument("--address", metavar="HOST:PORT", help="a server that runs already")
    where.add_argument("--model", type=Path, metavar="DIR", help="start a server on this checkpoint")
    where.add_argument("--shape", metavar="NAME", help=f"start one on random weights (default: {flags.SHAPE})")
    flags.add_workload_flags(serve)
    group = serve.add_argument_group("arrivals")
    arrivals = group.add_mutually_exclusive_group()
    arrivals.add_argument("--rate", type=float, metavar="R", help="Poisson arrivals, requests a second (default: 1)")
    arrivals.add_argument("--trace", type=Path, metavar="FILE", help="recorded arrivals and lengths")
    group.add_argument(
        "--speed", type=float, default=1.0, metavar="X", help="replay a trace X times as fast (default: %(default)s)"
    )
    benchmarks.add_engine_flags(serve)
    serve.set_defaults(max_rows=8)

    soak = benchmarks.add("soak", "whether a server lets go of everything", _SOAK, _run_soak)
    soak.add_argument("--model", type=Path, metavar="DIR", help="a checkpoint directory (default: the demo model)")
    soak.add_argument("--requests", type=flags.positive, default=20_000, metavar="N", help="(default: %(default)s)")
    soak.add_argument(
        "--clients", type=flags.positive, default=48, metavar="N", help="that ask at a time (default: %(default)s)"
    )
    soak.add_argument("--seed", type=int, default=0, metavar="N", help="of the requests (default: %(default)s)")
    benchmarks.add_engine_flags(soak)
    soak.set_defaults(slots=1536, max_context=1024)

    start = benchmarks.add("start", "how long a server takes to be ready", _START, _run_start)
    group = start.add_mutually_exclusive_group()
    group.add_argument("--model", type=Path, metavar="DIR", help="a checkpoint directory (default: the demo model)")
    group.add_argument("--shape", metavar="NAME", help="random weights of a known shape")
    start.add_argument(
        "--warm", type=flags.positive, default=3, metavar="N", help="further starts (default: %(default)s)"
    )
    benchmarks.add_engine_flags(start)

    surface = benchmarks.add("surface", "what the front door costs and stands", _SURFACE, _run_surface)
    flags.add_model_flags(surface)
    group = surface.add_argument_group("load")
    group.add_argument("--streams", type=flags.positive, metavar="N", help="at once; rows of the engine (default: 64)")
    group.add_argument("--prompt", type=flags.positive, default=32, metavar="N", help="tokens (default: %(default)s)")
    group.add_argument("--output", type=flags.positive, default=64, metavar="N", help="tokens (default: %(default)s)")
    group.add_argument(
        "--queue", type=flags.positive, metavar="N", help="requests that may wait (default and least: as many)"
    )
    group.add_argument(
        "--overload", type=float, default=10.0, metavar="X", help="times the sustainable load (default: %(default)g)"
    )
    group.add_argument("--seconds", type=float, default=60.0, metavar="S", help="of each load (default: %(default)g)")
    group.add_argument(
        "--turns", type=flags.positive, default=3, metavar="N", help="of the streams (default: %(default)s)"
    )
    group.add_argument(
        "--front",
        choices=("process", "thread"),
        action="append",
        help="of the server, see `jaxserve serve --help` (default: one after the other)",
    )
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of the prompts (default: %(default)s)")
    benchmarks.add_engine_flags(surface)


# What is heavy is imported when a benchmark runs, so that --help stays quick.


def _run_serve(args: argparse.Namespace) -> int:
    from jaxserve.simulate import workload as load
    from server.commands.bench import serve

    config = args.engine_config(args)
    model = None
    if args.address is not None:
        if args.compare_schedulers:
            raise ValueError("--compare-schedulers needs servers of its own; leave --address out")
    else:
        model = flags.checkpoint(args)

    def make_workload(max_context: int, vocab_size: int) -> load.Workload:
        if args.trace is not None:
            return load.read_trace(
                args.trace,
                max_context=max_context,
                vocab_size=vocab_size,
                seed=args.seed,
                limit=args.requests,
                speed=args.speed,
            )
        workload = flags.uniform(args, vocab_size)
        load.fit(workload, max_context)
        return load.poisson(workload, rate=args.rate or (50.0 if args.quick else 1.0), seed=args.seed)

    return serve.run(
        args.address, model, config, make_workload, flags.schedulers(args, config), args.out, flags.console()
    )


def _run_soak(args: argparse.Namespace) -> int:
    from benchmarks import soak
    from jaxserve.demo import DEMO_MODEL

    model, requests = args.model or DEMO_MODEL, 200 if args.quick else args.requests
    return soak.run(model, args.engine_config(args), requests, args.clients, args.seed, args.out, flags.console())


def _run_start(args: argparse.Namespace) -> int:
    from benchmarks import start
    from jaxserve.demo import DEMO_MODEL
    from server.commands.bench import shapes

    model = args.model or DEMO_MODEL
    if args.shape is not None:
        model = shapes.checkpoint(args.shape, shapes.cache_folder() / "checkpoints")
    return start.run(model, args.engine_config(args), 1 if args.quick else args.warm, args.out, flags.console())


def _run_surface(args: argparse.Namespace) -> int:
    from benchmarks import server_overhead as surface
    from jaxserve.simulate import workload as load

    model = flags.checkpoint(args)
    streams = args.streams or (3 if args.quick else 64)
    prompt, output = (8, 16) if args.quick else (args.prompt, args.output)
    workload = load.uniform(
        requests=streams,
        prompt=load.Range(low=prompt, high=prompt),
        output=load.Range(low=output, high=output),
        vocab_size=flags.vocab_size(model),
        seed=args.seed,
    )
    return surface.run(
        model,
        args.engine_config(args),
        workload,
        queue=max(args.queue or 0, streams),
        overload=args.overload,
        seconds=0.5 if args.quick else args.seconds,
        turns=1 if args.quick else args.turns,
        fronts=args.front or surface.FRONTS,
        out=args.out,
        console=flags.console(),
    )
