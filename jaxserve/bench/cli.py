"""The command line of `jaxserve bench`: offline, serve, step, host, stages, speculate, simulate, peers, accuracy."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxserve.config import EngineConfig

AddEngineFlags = Callable[[argparse.ArgumentParser], None]
ReadEngineFlags = Callable[[argparse.Namespace], EngineConfig]

_SHAPE = "bloom-560m"
_OFFLINE = """\
Serves all requests at once through an engine in this process, and reports throughput, latencies, padding and the
host's work. By default the workload and shape of Orca's evaluation, scaled to a CPU:

  jaxserve bench offline --compare-schedulers            request-level against iteration-level batching
  jaxserve bench offline --model DIR --requests 50       on your own checkpoint"""
_SERVE = """\
Sends requests to a running server over gRPC, each at its time whether or not earlier ones have ended.

  jaxserve bench serve --address 127.0.0.1:50051 --rate 2          Poisson arrivals at a server of yours
  jaxserve bench serve --model DIR --trace FILE --requests 500     recorded traffic, on a server started for it
  jaxserve bench serve --model DIR --rate 2 --compare-schedulers

Traces: Azure LLM inference (CSV: TIMESTAMP,ContextTokens,GeneratedTokens) and Mooncake (a JSON object a line:
timestamp, input_length, output_length, hash_ids). Requests longer than the server's context are clipped."""
_STEP = """\
Times the engine's compiled step alone, without scheduler or requests: decodes at several contexts, a prefill, and
decodes mixed with a prompt."""
_HOST = """\
Measures the host's work for an iteration (schedule, pack, launch, complete) on a model so small that little else is
left, with few and with very many requests waiting."""
_STAGES = """\
Serves a tiny model whose attention sleeps in 1, 2, 4, ... stages of one virtual CPU device each, and compares their
iterations a second: stages that sleep at the same time show that they work at the same time, on as few cores as there
are. Needs a C++ compiler."""
_SPECULATE = """\
Serves one request at a time with and without speculation, in turn: a greedy answer to a passage that is repeated, and
one drawn at temperature 1, which hardly repeats anything (weights may be random: their greedy answers go round in
circles). The first is to be 1.8 times as fast, the second no slower."""
_SIMULATE = """\
Serves Poisson arrivals at several loads with an engine in this process, and the same arrivals with the simulator: the
engine's scheduler on a virtual clock, with the costs that the engine measured of its buckets and its host's median
times. Throughput and latencies are to agree within 10%. Buckets are measured once, at the start: leave the machine
alone meanwhile."""
_PEERS = """\
Times our step against transformers and llama.cpp on the same random-weight checkpoint, in the same dtype, one process
at a time and in turn, after checking their outputs against ours. Each peer gets a Python environment of its own, which
is made on first use with pip (llama.cpp is compiled: a C++ compiler is needed) and kept in --env-dir. Which index pip
uses is pip's own setting, for instance PIP_EXTRA_INDEX_URL for CPU builds of torch."""
_ACCURACY = """\
Compares the answers of one checkpoint at full width and with eight bits: the perplexity of a text, read in windows of
256 tokens that overlap by half, and greedy continuations of passages from it. By default the demo model on the text
that was held out of its training, which comes out of a Debian package (apt-get download).

  jaxserve bench accuracy
  jaxserve bench accuracy --model DIR --text FILE --dtype bfloat16"""


def add_arguments(
    parser: argparse.ArgumentParser, add_engine_flags: AddEngineFlags, engine_config: ReadEngineFlags
) -> None:
    """Adds the benchmarks as subcommands of `parser`.

    Args:
      add_engine_flags: adds the engine's flags, which are the same in every command, to a parser.
      engine_config: makes a configuration of them.
    """
    parser.set_defaults(engine_config=engine_config)
    commands = parser.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True)

    offline = _command(commands, "offline", "all requests at once, in this process", _OFFLINE, _run_offline)
    _add_model_flags(offline)
    _add_workload_flags(offline)
    _add_timeline_flag(offline)
    add_engine_flags(offline)
    offline.set_defaults(max_rows=8)

    serve = _command(commands, "serve", "load a server over gRPC", _SERVE, _run_serve)
    group = serve.add_argument_group("server")
    where = group.add_mutually_exclusive_group()
    where.add_argument("--address", metavar="HOST:PORT", help="a server that runs already")
    where.add_argument("--model", type=Path, metavar="DIR", help="start a server on this checkpoint")
    where.add_argument("--shape", metavar="NAME", help=f"start one on random weights (default: {_SHAPE})")
    _add_workload_flags(serve)
    group = serve.add_argument_group("arrivals")
    arrivals = group.add_mutually_exclusive_group()
    arrivals.add_argument("--rate", type=float, metavar="R", help="Poisson arrivals, requests a second (default: 1)")
    arrivals.add_argument("--trace", type=Path, metavar="FILE", help="recorded arrivals and lengths")
    group.add_argument(
        "--speed", type=float, default=1.0, metavar="X", help="replay a trace X times as fast (default: %(default)s)"
    )
    add_engine_flags(serve)
    serve.set_defaults(max_rows=8)

    step = _command(commands, "step", "the compiled step alone", _STEP, _run_step)
    _add_model_flags(step)
    _add_step_flags(step)
    add_engine_flags(step)

    host = _command(commands, "host", "the host's work for an iteration", _HOST, _run_host)
    host.add_argument("--rows", type=_integers, default=[8, 256], metavar="N,...", help="batch sizes (default: 8,256)")
    host.add_argument(
        "--waiting",
        type=_integers,
        default=[0, 1_000, 100_000],
        metavar="N,...",
        help="requests in the queue (default: 0,1000,100000)",
    )
    host.add_argument("--iterations", type=_positive, default=300, metavar="N", help="(default: %(default)s)")
    add_engine_flags(host)

    stages = _command(commands, "stages", "whether stages work at the same time", _STAGES, _run_stages)
    stages.add_argument(
        "--counts", type=_integers, default=[1, 2, 4], metavar="N,...", help="numbers of stages (default: 1,2,4)"
    )
    stages.add_argument(
        "--sleep", type=float, default=40.0, metavar="MS", help="sleep of an iteration in all (default: %(default)g)"
    )
    stages.add_argument("--iterations", type=_positive, default=200, metavar="N", help="(default: %(default)s)")
    _add_timeline_flag(stages)
    add_engine_flags(stages)
    stages.set_defaults(max_rows=4)

    speculate = _command(commands, "speculate", "what drafted tokens bring", _SPECULATE, _run_speculate)
    _add_model_flags(speculate)
    speculate.add_argument("--tokens", type=_positive, default=128, metavar="N", help="of each answer (default: 128)")
    speculate.add_argument("--turns", type=_positive, default=5, metavar="N", help="of each engine (default: 5)")
    add_engine_flags(speculate)

    simulate = _command(commands, "simulate", "the simulator held to an engine", _SIMULATE, _run_simulate)
    _add_model_flags(simulate)
    _add_sizes(simulate)
    simulate.add_argument(
        "--loads",
        type=_shares,
        default=[0.3, 0.5, 0.7, 0.9, 1.1],
        metavar="X,...",
        help="rates, as shares of what is served with everything waiting (default: 0.3,0.5,0.7,0.9,1.1)",
    )
    add_engine_flags(simulate)
    simulate.set_defaults(max_rows=8)

    peers = _command(commands, "peers", "our step against other engines'", _PEERS, _run_peers)
    _add_model_flags(peers)
    _add_step_flags(peers)
    peers.add_argument("--rounds", type=_positive, default=3, metavar="N", help="turns of each (default: %(default)s)")
    peers.add_argument("--peers", default="transformers,llama.cpp", metavar="A,B", help="(default: %(default)s)")
    peers.add_argument(
        "--env-dir", type=Path, metavar="DIR", help="where environments are kept (default: in your cache folder)"
    )
    add_engine_flags(peers)

    accuracy = _command(commands, "accuracy", "what fewer bits cost in answers", _ACCURACY, _run_accuracy)
    accuracy.add_argument("--model", type=Path, metavar="DIR", help="a checkpoint directory (default: the demo model)")
    accuracy.add_argument("--text", type=Path, metavar="FILE", help="UTF-8 text (default: held out of the demo's)")
    accuracy.add_argument(
        "--passages", type=_positive, default=200, metavar="N", help="that are continued (default: %(default)s)"
    )
    add_engine_flags(accuracy)


def run(args: argparse.Namespace) -> int:
    """Runs the benchmark that was chosen; returns the exit code (2 for a mistake of the user's)."""
    from jaxserve.bench import machine

    if (warning := machine.busy()) is not None:
        print(f"jaxserve: note: {warning}", file=sys.stderr)
    try:
        return args.benchmark(args)
    except ValueError as problem:
        print(f"jaxserve: error: {problem}", file=sys.stderr)
        return 2


def _command(
    commands: Any, name: str, summary: str, text: str, benchmark: Callable[[argparse.Namespace], int]
) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name,
        help=summary,
        description=text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(benchmark=benchmark)
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("bench-results"),
        metavar="DIR",
        help="where JSON and plots are written (default: %(default)s)",
    )
    parser.add_argument("--quick", action="store_true", help="a tiny model and workload, to see that everything runs")
    return parser


def _add_model_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model").add_mutually_exclusive_group()
    group.add_argument("--model", type=Path, metavar="DIR", help="a checkpoint directory")
    group.add_argument("--shape", metavar="NAME", help=f"random weights of a known shape (default: {_SHAPE})")


def _add_workload_flags(parser: argparse.ArgumentParser) -> None:
    group = _add_sizes(parser)
    group.add_argument(
        "--compare-schedulers", action="store_true", help="serve it twice, by iteration and by request-level batching"
    )


def _add_sizes(parser: argparse.ArgumentParser) -> Any:
    group = parser.add_argument_group("workload")
    group.add_argument("--requests", type=_positive, metavar="N", help="(default: 200; of a trace: all)")
    group.add_argument("--prompt", default="32:256", metavar="LOW:HIGH", help="prompt tokens (default: %(default)s)")
    group.add_argument(
        "--output", default="1:128", metavar="LOW:HIGH", help="tokens to generate (default: %(default)s)"
    )
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of the workload (default: %(default)s)")
    return group


def _add_timeline_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--timeline", type=Path, metavar="FILE", help="write when each stage ran which iteration, for ui.perfetto.dev"
    )


def _add_step_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("steps")
    group.add_argument("--steps", type=_positive, default=20, metavar="N", help="of each case (default: %(default)s)")
    group.add_argument(
        "--dtypes", default="float32,bfloat16", metavar="A,B", help="compute dtypes (default: %(default)s)"
    )


# What is heavy is imported when a benchmark runs, so that --help stays quick.


def _run_offline(args: argparse.Namespace) -> int:
    from jaxserve.bench import offline

    model = _model(args)
    config = args.engine_config(args)
    workload = _uniform(args, _vocab_size(model))
    return offline.run(model, config, workload, _schedulers(args, config), args.timeline, args.out, _console())


def _run_serve(args: argparse.Namespace) -> int:
    from jaxserve.bench import load, serve, shapes

    config = args.engine_config(args)
    model = None
    if args.address is not None:
        if args.compare_schedulers:
            raise ValueError("--compare-schedulers needs servers of its own; leave --address out")
    else:
        model = _model(args)
        if isinstance(model, str):
            model = shapes.checkpoint(model, shapes.cache_folder() / "checkpoints")

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
        workload = _uniform(args, vocab_size)
        load.fit(workload, max_context)
        return load.poisson(workload, rate=args.rate or (50.0 if args.quick else 1.0), seed=args.seed)

    return serve.run(args.address, model, config, make_workload, _schedulers(args, config), args.out, _console())


def _run_step(args: argparse.Namespace) -> int:
    from jaxserve.bench import step

    cases, steps = (step.QUICK_CASES, 3) if args.quick else (step.CASES, args.steps)
    return step.run(_model(args), _dtypes(args), cases, steps, args.engine_config(args), args.out, _console())


def _run_host(args: argparse.Namespace) -> int:
    from jaxserve.bench import host

    rows, waiting, iterations = args.rows, args.waiting, args.iterations
    if args.quick:
        rows, waiting, iterations = [4], [0, 20], 20
    return host.run(rows, waiting, iterations, args.engine_config(args), args.out, _console())


def _run_stages(args: argparse.Namespace) -> int:
    from jaxserve.bench import stages

    counts, sleep, iterations = ([1, 2], 4.0, 20) if args.quick else (args.counts, args.sleep, args.iterations)
    return stages.run(counts, sleep, iterations, args.engine_config(args), args.timeline, args.out, _console())


def _run_speculate(args: argparse.Namespace) -> int:
    from jaxserve.bench import speculate

    tokens, turns = (24, 1) if args.quick else (args.tokens, args.turns)
    return speculate.run(_model(args), tokens, turns, args.engine_config(args), args.out, _console())


def _run_simulate(args: argparse.Namespace) -> int:
    from jaxserve.bench import reality

    model, config = _model(args), args.engine_config(args)
    loads = [0.5] if args.quick else args.loads
    return reality.run(model, config, _uniform(args, _vocab_size(model)), loads, args.seed, args.out, _console())


def _run_peers(args: argparse.Namespace) -> int:
    from jaxserve.bench import environments, peers, shapes, step

    names = args.peers.split(",")
    for name in names:
        if name not in environments.PEERS:
            raise ValueError(f"{name!r} is no known peer; there are {', '.join(environments.PEERS)}")
    model = _model(args)
    if isinstance(model, str):
        model = shapes.checkpoint(model, shapes.cache_folder() / "checkpoints")
    config = args.engine_config(args)
    return peers.run(
        model,
        names,
        _dtypes(args),
        step.QUICK_CASES if args.quick else step.PEER_CASES,
        steps=3 if args.quick else args.steps,
        rounds=1 if args.quick else args.rounds,
        env_dir=args.env_dir or shapes.cache_folder() / "peers",
        compilation_cache=config.compilation_cache,
        out=args.out,
        console=_console(),
    )


def _run_accuracy(args: argparse.Namespace) -> int:
    from jaxserve.bench import accuracy
    from jaxserve.demo import DEMO_MODEL

    return accuracy.run(
        args.model or DEMO_MODEL,
        args.text,
        8 if args.quick else args.passages,
        2 * accuracy.WINDOW if args.quick else None,
        args.engine_config(args),
        args.out,
        _console(),
    )


def _uniform(args: argparse.Namespace, vocab_size: int) -> Any:
    """The workload that the flags describe, all at once."""
    from jaxserve.bench import load

    return load.uniform(
        requests=args.requests or (12 if args.quick else 200),
        prompt=load.Range.parse("4:16" if args.quick else args.prompt),
        output=load.Range.parse("1:8" if args.quick else args.output),
        vocab_size=vocab_size,
        seed=args.seed,
    )


def _vocab_size(model: Path | str) -> int:
    from jaxserve import weights
    from jaxserve.bench import shapes

    return (weights.read_config(model) if isinstance(model, Path) else shapes.config_of(model)).vocab_size


def _model(args: argparse.Namespace) -> Path | str:
    """A checkpoint directory as a path, or a shape by its name."""
    if args.model is not None:
        return args.model
    return args.shape or ("tiny" if args.quick else _SHAPE)


def _schedulers(args: argparse.Namespace, config: EngineConfig) -> list[Any]:
    return ["iteration", "request"] if args.compare_schedulers else [config.scheduler]


def _dtypes(args: argparse.Namespace) -> list[Any]:
    dtypes = args.dtypes.split(",")
    for dtype in dtypes:
        if dtype not in ("float32", "bfloat16"):
            raise ValueError(f"{dtype!r} is no dtype to measure; there are float32 and bfloat16")
    return dtypes


def _console() -> Any:
    from rich.console import Console

    # Where standard output is no terminal it has no width: a log should hold whole tables.
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=160)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


def _shares(text: str) -> list[float]:
    try:
        shares = [float(part) for part in text.split(",")]
    except ValueError:
        shares = []
    if not shares or min(shares) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers above 0 such as 0.5,0.9")
    return shares


def _integers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of whole numbers such as 8,256") from None
