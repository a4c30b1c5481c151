"""The command line of `jaxserve bench`."""

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
_SOAK = """\
Starts a server and sends it requests of every kind, by many clients at once: some are cancelled, some run out of time,
some share prefixes, and there are too few slots for all of them, so that requests are preempted. Memory, slots, threads
and open files of the server are watched. At the end no request may be lost, every slot must be free and memory flat."""
_START = """\
Starts a server with an empty compilation cache, and again with what that one left there. The steps of each start are
told in seconds, with the processor seconds of the whole: those vary less where something else runs beside it."""
_DETERMINISTIC = """\
Asks one thing many times under random other load, of an engine with --deterministic and of one without it, in turn:
how many different answers each gives, logprobs compared to the bit, and what the mode costs."""
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
Compares our engine with transformers (static batches, and its continuous batching), CTranslate2 and llama.cpp on the
same random-weight checkpoints, in the same dtype, one process at a time and in turn. Outputs are checked against each
other first. Then steps are timed, and the same requests are served at the same Poisson arrivals, at rates that are
shares of what our engine serves with everything waiting. All engines run in process, ours too.

Each peer gets a Python environment of its own, which is made on first use with pip (llama.cpp is compiled: a C++
compiler is needed) and kept in --env-dir. Which index pip uses is pip's own setting, for instance PIP_EXTRA_INDEX_URL
for CPU builds of torch. Answers are written as they come: --resume goes on where a run was cut short.

  jaxserve bench peers --shape gpt2 --dtypes float32 --parts steps
  jaxserve bench peers --requests 200 --load-rounds 3         hours on two cores"""
_GUARD = """\
Measures a few figures as multiples of a calibration loop that runs between them (a matmul, a read of memory, a loop of
plain Python), and compares them with those kept in the repository, so that another machine or a busy one does not look
like a slowdown. Exits with 1 when a figure is above what it may be."""
_SURFACE = """\
Starts a server and measures, over the wire, what its front door costs and what it stands: the time of an iteration with
so many streams against the same work without a server, the processors' time for a token, how quickly calls are refused
at ten times the load that can be served, and what that does to those that are accepted. The load generator's own
processor time is reported apart; on a machine with few cores it is part of what is measured. Servers that answer
callers in a process of their own, and in a thread of the engine's, take turns.

  jaxserve bench surface --shape bloom-560m
  jaxserve bench surface --model DIR --streams 16 --seconds 20"""
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

    soak = _command(commands, "soak", "whether a server lets go of everything", _SOAK, _run_soak)
    soak.add_argument("--model", type=Path, metavar="DIR", help="a checkpoint directory (default: the demo model)")
    soak.add_argument("--requests", type=_positive, default=20_000, metavar="N", help="(default: %(default)s)")
    soak.add_argument(
        "--clients", type=_positive, default=48, metavar="N", help="that ask at a time (default: %(default)s)"
    )
    soak.add_argument("--seed", type=int, default=0, metavar="N", help="of the requests (default: %(default)s)")
    add_engine_flags(soak)
    soak.set_defaults(slots=1536, max_context=1024)

    start = _command(commands, "start", "how long a server takes to be ready", _START, _run_start)
    group = start.add_mutually_exclusive_group()
    group.add_argument("--model", type=Path, metavar="DIR", help="a checkpoint directory (default: the demo model)")
    group.add_argument("--shape", metavar="NAME", help="random weights of a known shape")
    start.add_argument("--warm", type=_positive, default=3, metavar="N", help="further starts (default: %(default)s)")
    add_engine_flags(start)

    deterministic = _command(commands, "deterministic", "one prompt many times", _DETERMINISTIC, _run_deterministic)
    group = deterministic.add_mutually_exclusive_group()
    group.add_argument("--model", type=Path, metavar="DIR", help="a checkpoint directory (default: the demo model)")
    group.add_argument("--shape", metavar="NAME", help="random weights of a known shape")
    deterministic.add_argument("--runs", type=_positive, default=1000, metavar="N", help="(default: %(default)s)")
    deterministic.add_argument("--seed", type=int, default=0, metavar="N", help="of the load (default: %(default)s)")
    add_engine_flags(deterministic)
    deterministic.set_defaults(max_context=512)

    surface = _command(commands, "surface", "what the front door costs and stands", _SURFACE, _run_surface)
    _add_model_flags(surface)
    group = surface.add_argument_group("load")
    group.add_argument("--streams", type=_positive, metavar="N", help="at once; rows of the engine (default: 64)")
    group.add_argument("--prompt", type=_positive, default=32, metavar="N", help="tokens (default: %(default)s)")
    group.add_argument("--output", type=_positive, default=64, metavar="N", help="tokens (default: %(default)s)")
    group.add_argument(
        "--queue", type=_positive, metavar="N", help="requests that may wait (default and least: as many)"
    )
    group.add_argument(
        "--overload", type=float, default=10.0, metavar="X", help="times the sustainable load (default: %(default)g)"
    )
    group.add_argument("--seconds", type=float, default=60.0, metavar="S", help="of each load (default: %(default)g)")
    group.add_argument("--turns", type=_positive, default=3, metavar="N", help="of the streams (default: %(default)s)")
    group.add_argument(
        "--front",
        choices=("process", "thread"),
        action="append",
        help="of the server, see `jaxserve serve --help` (default: one after the other)",
    )
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of the prompts (default: %(default)s)")
    add_engine_flags(surface)

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

    peers = _command(commands, "peers", "our engine against others", _PEERS, _run_peers)
    _add_model_flags(peers, "bloom-560m,gpt2, one after the other")
    _add_step_flags(peers)
    _add_sizes(peers)
    group = peers.add_argument_group("turns")
    group.add_argument(
        "--engines",
        default="transformers,continuous,ctranslate2,llama.cpp",
        metavar="A,B",
        help="to compare with (default: %(default)s)",
    )
    group.add_argument("--parts", default="steps,load", metavar="A,B", help="what to measure (default: %(default)s)")
    group.add_argument("--rounds", type=_positive, default=2, metavar="N", help="of steps (default: %(default)s)")
    group.add_argument("--loads", type=_shares, default=[0.5, 0.8, 1.2], metavar="X,...", help="(default: 0.5,0.8,1.2)")
    group.add_argument(
        "--load-rounds", type=_positive, default=1, metavar="N", help="of each load (default: %(default)s)"
    )
    group.add_argument("--resume", action="store_true", help="keep what an earlier run wrote to --out")
    group.add_argument(
        "--env-dir", type=Path, metavar="DIR", help="where environments are kept (default: in your cache folder)"
    )
    add_engine_flags(peers)
    peers.set_defaults(steps=8, requests=40)

    guard = _command(commands, "guard", "whether something has become slower", _GUARD, _run_guard)
    guard.add_argument("--write", action="store_true", help="keep what is measured now")

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


def _add_model_flags(parser: argparse.ArgumentParser, default: str = _SHAPE) -> None:
    group = parser.add_argument_group("model").add_mutually_exclusive_group()
    group.add_argument("--model", type=Path, metavar="DIR", help="a checkpoint directory")
    group.add_argument("--shape", metavar="NAME", help=f"random weights of a known shape (default: {default})")


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


def _run_soak(args: argparse.Namespace) -> int:
    from jaxserve.bench import soak
    from jaxserve.demo import DEMO_MODEL

    model, requests = args.model or DEMO_MODEL, 200 if args.quick else args.requests
    return soak.run(model, args.engine_config(args), requests, args.clients, args.seed, args.out, _console())


def _run_start(args: argparse.Namespace) -> int:
    from jaxserve.bench import shapes, start
    from jaxserve.demo import DEMO_MODEL

    model = args.model or DEMO_MODEL
    if args.shape is not None:
        model = shapes.checkpoint(args.shape, shapes.cache_folder() / "checkpoints")
    return start.run(model, args.engine_config(args), 1 if args.quick else args.warm, args.out, _console())


def _run_deterministic(args: argparse.Namespace) -> int:
    from jaxserve.bench import deterministic
    from jaxserve.demo import DEMO_MODEL

    model, runs = args.shape or args.model or DEMO_MODEL, 20 if args.quick else args.runs
    return deterministic.run(model, args.engine_config(args), runs, args.seed, args.out, _console())


def _run_surface(args: argparse.Namespace) -> int:
    from jaxserve.bench import load, shapes, surface

    model = _model(args)
    if isinstance(model, str):
        model = shapes.checkpoint(model, shapes.cache_folder() / "checkpoints")
    streams = args.streams or (3 if args.quick else 64)
    prompt, output = (8, 16) if args.quick else (args.prompt, args.output)
    workload = load.uniform(
        requests=streams,
        prompt=load.Range(low=prompt, high=prompt),
        output=load.Range(low=output, high=output),
        vocab_size=_vocab_size(model),
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
        console=_console(),
    )


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
    import signal

    from jaxserve.bench import peers, shapes, step
    from jaxserve.bench.environments import PEERS

    names, parts = args.engines.split(","), args.parts.split(",")
    for kind, given, known in (("peer", names, PEERS), ("part", parts, ("steps", "load"))):
        for name in given:
            if name not in known:
                raise ValueError(f"{name!r} is no known {kind}; there are {', '.join(known)}")
    if args.model is not None:
        checkpoints = [args.model]
    else:
        chosen = (args.shape or ("tiny,tiny-gpt2" if args.quick else "bloom-560m,gpt2")).split(",")
        checkpoints = [shapes.checkpoint(shape, shapes.cache_folder() / "checkpoints") for shape in chosen]
    for number in (signal.SIGINT, signal.SIGTERM):  # in the background, too, it is to print what there is
        signal.signal(number, signal.default_int_handler)
    scope = peers.Scope(
        cases=() if "steps" not in parts else step.QUICK_CASES if args.quick else step.PEER_CASES,
        steps=3 if args.quick else args.steps,
        rounds=1 if args.quick else args.rounds,
        workload=lambda vocab_size: _uniform(args, vocab_size),
        loads=tuple(args.loads) if "load" in parts else (),
        load_rounds=args.load_rounds,
        seed=args.seed,
    )
    return peers.run(
        checkpoints,
        names,
        _dtypes(args),
        scope,
        args.engine_config(args),
        env_dir=args.env_dir or shapes.cache_folder() / "peers",
        out=args.out,
        resume=args.resume,
        console=_console(),
    )


def _run_guard(args: argparse.Namespace) -> int:
    from jaxserve.bench import guard

    return guard.run(args.write, _console())


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
