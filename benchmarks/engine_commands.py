"""What measures an engine in this process: `jaxserve bench offline`, step, host, stages, control, hosts, speculate,
deterministic."""

from __future__ import annotations

import argparse
from pathlib import Path

from server.commands.bench import flags
from server.commands.bench.flags import Benchmarks

_OFFLINE = """\
Serves all requests at once through an engine in this process, and reports throughput, latencies, padding and the
host's work. By default the workload and shape of Orca's evaluation, scaled to a CPU:

  jaxserve bench offline --compare-schedulers            request-level against iteration-level batching
  jaxserve bench offline --model DIR --requests 50       on your own checkpoint"""
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
_CONTROL = """\
Measures what several hosts add to an iteration beside their devices: decodes go as plans to a worker process over the
loopback and come back as answers, with stages that are made up. Once through stages that compute nothing, an iteration
at a time: what it takes of the engine's thread, and the round trip. And once with as many in flight as the engine has,
through two stages of 5 ms: by how much the time between answers grows, which is what a deployment pays."""
_HOSTS = """\
Decodes with a model in two stages, in one process and on two hosts over the loopback, in turn, and compares the time
of an iteration. Each device has one thread; two cores should have nothing else to do."""
_SPECULATE = """\
Serves one request at a time with and without speculation, in turn: a greedy answer to a passage that is repeated, and
one drawn at temperature 1, which hardly repeats anything (weights may be random: their greedy answers go round in
circles). The first is to be 1.8 times as fast, the second no slower."""
_DETERMINISTIC = """\
Asks one thing many times under random other load, of an engine with --deterministic and of one without it, in turn:
how many different answers each gives, logprobs compared to the bit, and what the mode costs."""


def add(benchmarks: Benchmarks) -> None:
    """Adds these benchmarks to the command line."""
    offline = benchmarks.add("offline", "all requests at once, in this process", _OFFLINE, _run_offline)
    flags.add_model_flags(offline)
    flags.add_workload_flags(offline)
    flags.add_timeline_flag(offline)
    benchmarks.add_engine_flags(offline)
    offline.set_defaults(max_rows=8)

    step = benchmarks.add("step", "the compiled step alone", _STEP, _run_step)
    flags.add_model_flags(step)
    flags.add_step_flags(step)
    benchmarks.add_engine_flags(step)

    host = benchmarks.add("host", "the host's work for an iteration", _HOST, _run_host)
    host.add_argument(
        "--rows", type=flags.integers, default=[8, 256], metavar="N,...", help="batch sizes (default: 8,256)"
    )
    host.add_argument(
        "--waiting",
        type=flags.integers,
        default=[0, 1_000, 100_000],
        metavar="N,...",
        help="requests in the queue (default: 0,1000,100000)",
    )
    host.add_argument("--iterations", type=flags.positive, default=300, metavar="N", help="(default: %(default)s)")
    benchmarks.add_engine_flags(host)

    stages = benchmarks.add("stages", "whether stages work at the same time", _STAGES, _run_stages)
    stages.add_argument(
        "--counts", type=flags.integers, default=[1, 2, 4], metavar="N,...", help="numbers of stages (default: 1,2,4)"
    )
    stages.add_argument(
        "--sleep", type=float, default=40.0, metavar="MS", help="sleep of an iteration in all (default: %(default)g)"
    )
    stages.add_argument("--iterations", type=flags.positive, default=200, metavar="N", help="(default: %(default)s)")
    flags.add_timeline_flag(stages)
    benchmarks.add_engine_flags(stages)
    stages.set_defaults(max_rows=4)

    control = benchmarks.add("control", "what several hosts add to an iteration", _CONTROL, _run_control)
    control.add_argument("--rows", type=flags.integers, default=[64], metavar="N,...", help="batch sizes (default: 64)")
    control.add_argument("--iterations", type=flags.positive, default=2000, metavar="N", help="(default: %(default)s)")

    hosts = benchmarks.add("hosts", "a model on one host and on two", _HOSTS, _run_hosts)
    hosts.add_argument("--model", type=Path, metavar="DIR", help="a checkpoint directory (default: the demo model)")
    hosts.add_argument("--rows", type=flags.positive, default=64, metavar="N", help="batch size (default: 64)")
    hosts.add_argument("--iterations", type=flags.positive, default=200, metavar="N", help="(default: %(default)s)")
    hosts.add_argument("--turns", type=flags.positive, default=5, metavar="N", help="of each (default: %(default)s)")

    speculate = benchmarks.add("speculate", "what drafted tokens bring", _SPECULATE, _run_speculate)
    flags.add_model_flags(speculate)
    speculate.add_argument(
        "--tokens", type=flags.positive, default=128, metavar="N", help="of each answer (default: 128)"
    )
    speculate.add_argument("--turns", type=flags.positive, default=5, metavar="N", help="of each engine (default: 5)")
    benchmarks.add_engine_flags(speculate)

    deterministic = benchmarks.add("deterministic", "one prompt many times", _DETERMINISTIC, _run_deterministic)
    group = deterministic.add_mutually_exclusive_group()
    group.add_argument("--model", type=Path, metavar="DIR", help="a checkpoint directory (default: the demo model)")
    group.add_argument("--shape", metavar="NAME", help="random weights of a known shape")
    deterministic.add_argument("--runs", type=flags.positive, default=1000, metavar="N", help="(default: %(default)s)")
    deterministic.add_argument("--seed", type=int, default=0, metavar="N", help="of the load (default: %(default)s)")
    benchmarks.add_engine_flags(deterministic)
    deterministic.set_defaults(max_context=512)


# What is heavy is imported when a benchmark runs, so that --help stays quick.


def _run_offline(args: argparse.Namespace) -> int:
    from server.commands.bench import offline

    model = flags.model(args)
    config = args.engine_config(args)
    workload = flags.uniform(args, flags.vocab_size(model))
    return offline.run(
        model, config, workload, flags.schedulers(args, config), args.timeline, args.out, flags.console()
    )


def _run_step(args: argparse.Namespace) -> int:
    from server.commands.bench import step

    cases, steps = (step.QUICK_CASES, 3) if args.quick else (step.CASES, args.steps)
    return step.run(
        flags.model(args), flags.dtypes(args), cases, steps, args.engine_config(args), args.out, flags.console()
    )


def _run_host(args: argparse.Namespace) -> int:
    from benchmarks import host

    rows, waiting, iterations = args.rows, args.waiting, args.iterations
    if args.quick:
        rows, waiting, iterations = [4], [0, 20], 20
    return host.run(rows, waiting, iterations, args.engine_config(args), args.out, flags.console())


def _run_stages(args: argparse.Namespace) -> int:
    from benchmarks import stages

    counts, sleep, iterations = ([1, 2], 4.0, 20) if args.quick else (args.counts, args.sleep, args.iterations)
    return stages.run(counts, sleep, iterations, args.engine_config(args), args.timeline, args.out, flags.console())


def _run_control(args: argparse.Namespace) -> int:
    from benchmarks import control

    rows, iterations = ([4], 50) if args.quick else (args.rows, args.iterations)
    return control.run(rows, iterations, args.out, flags.console())


def _run_hosts(args: argparse.Namespace) -> int:
    from benchmarks import hosts
    from jaxserve.demo import DEMO_MODEL

    rows, iterations, turns = (4, 40, 1) if args.quick else (args.rows, args.iterations, args.turns)
    return hosts.run(args.model or DEMO_MODEL, rows, iterations, turns, args.out, flags.console())


def _run_speculate(args: argparse.Namespace) -> int:
    from benchmarks import speculate

    tokens, turns = (24, 1) if args.quick else (args.tokens, args.turns)
    return speculate.run(flags.model(args), tokens, turns, args.engine_config(args), args.out, flags.console())


def _run_deterministic(args: argparse.Namespace) -> int:
    from benchmarks import deterministic
    from jaxserve.demo import DEMO_MODEL

    model, runs = args.shape or args.model or DEMO_MODEL, 20 if args.quick else args.runs
    return deterministic.run(model, args.engine_config(args), runs, args.seed, args.out, flags.console())
