"""What holds the engine against something else: `jaxserve bench simulate`, peers, guard, accuracy."""

from __future__ import annotations

import argparse
from pathlib import Path

from server.commands.bench import flags
from server.commands.bench.flags import Benchmarks

_SIMULATE = """\
Serves Poisson arrivals at several loads with an engine in this process, and the same arrivals with the simulator: the
engine's scheduler on a virtual clock, with the costs that the engine measured of its buckets and its host's median
times. Throughput and latencies are to agree within 10%. Machines change their pace within minutes: every load is served
in parts, the loads in turn, each part by an engine of its own, with the means of what its start and the next one's have
measured for its costs; figures are medians over the parts. Leave the machine alone meanwhile."""
_PEERS = """\
Compares our engine with transformers (static batches, and its continuous batching), CTranslate2 and llama.cpp on the
same random-weight checkpoints, in the same dtype, one process at a time and in turn. Outputs are checked against each
other first. Then steps are timed, and the same requests are served at the same Poisson arrivals, at rates that are
shares of what our engine serves with everything waiting and no --target-tpot. All engines run in process, ours too.

Each peer gets a Python environment of its own, which is made on first use with pip (llama.cpp is compiled: a C++
compiler is needed) and kept in --env-dir. Which index pip uses is pip's own setting, for instance PIP_EXTRA_INDEX_URL
for CPU builds of torch. Answers are written as they come: --resume goes on where a run was cut short.

  jaxserve bench peers --shape gpt2 --dtypes float32 --parts steps
  jaxserve bench peers --load-rounds 3                        hours on two cores"""
_GUARD = """\
Measures a few figures as multiples of a calibration loop that runs between them (a matmul, a read of memory, a loop of
plain Python), and compares them with those kept in the repository, so that another machine or a busy one does not look
like a slowdown. Exits with 1 when a figure is above what it may be."""
_ACCURACY = """\
Compares the answers of one checkpoint at full width and with eight bits: the perplexity of a text, read in windows of
256 tokens that overlap by half, and greedy continuations of passages from it. By default the demo model on the text
that was held out of its training, which comes out of a Debian package (apt-get download).

  jaxserve bench accuracy
  jaxserve bench accuracy --model DIR --text FILE --dtype bfloat16"""


def add(benchmarks: Benchmarks) -> None:
    """Adds these benchmarks to the command line."""
    simulate = benchmarks.add("simulate", "the simulator held to an engine", _SIMULATE, _run_simulate)
    flags.add_model_flags(simulate)
    flags.add_sizes(simulate)
    simulate.add_argument(
        "--loads",
        type=flags.shares,
        default=[0.3, 0.5, 0.7, 0.9, 1.1],
        metavar="X,...",
        help="rates, as shares of what is served with everything waiting (default: 0.3,0.5,0.7,0.9,1.1)",
    )
    benchmarks.add_engine_flags(simulate)
    simulate.set_defaults(max_rows=8)

    peers = benchmarks.add("peers", "our engine against others", _PEERS, _run_peers)
    flags.add_model_flags(peers, "bloom-560m,gpt2, one after the other")
    flags.add_step_flags(peers)
    flags.add_sizes(peers)
    group = peers.add_argument_group("turns")
    group.add_argument(
        "--engines",
        default="transformers,continuous,ctranslate2,llama.cpp",
        metavar="A,B",
        help="to compare with (default: %(default)s)",
    )
    group.add_argument("--parts", default="steps,load", metavar="A,B", help="what to measure (default: %(default)s)")
    group.add_argument("--rounds", type=flags.positive, default=2, metavar="N", help="of steps (default: %(default)s)")
    group.add_argument(
        "--loads", type=flags.shares, default=[0.5, 0.8, 1.2], metavar="X,...", help="(default: 0.5,0.8,1.2)"
    )
    group.add_argument(
        "--load-rounds", type=flags.positive, default=1, metavar="N", help="of each load (default: %(default)s)"
    )
    group.add_argument("--resume", action="store_true", help="keep what an earlier run wrote to --out")
    group.add_argument(
        "--env-dir", type=Path, metavar="DIR", help="where environments are kept (default: in your cache folder)"
    )
    benchmarks.add_engine_flags(peers)
    peers.set_defaults(steps=8)

    guard = benchmarks.add("guard", "whether something has become slower", _GUARD, _run_guard, has_results=False)
    guard.add_argument("--write", action="store_true", help="keep what is measured now")

    accuracy = benchmarks.add("accuracy", "what fewer bits cost in answers", _ACCURACY, _run_accuracy)
    accuracy.add_argument("--model", type=Path, metavar="DIR", help="a checkpoint directory (default: the demo model)")
    accuracy.add_argument("--text", type=Path, metavar="FILE", help="UTF-8 text (default: held out of the demo's)")
    accuracy.add_argument(
        "--passages", type=flags.positive, default=200, metavar="N", help="that are continued (default: %(default)s)"
    )
    benchmarks.add_engine_flags(accuracy)


# What is heavy is imported when a benchmark runs, so that --help stays quick.


def _run_simulate(args: argparse.Namespace) -> int:
    from benchmarks import simulator_validation as reality

    model, config = flags.checkpoint(args), args.engine_config(args)
    loads = [0.5] if args.quick else args.loads
    return reality.run(
        model, config, flags.uniform(args, flags.vocab_size(model)), loads, args.seed, args.out, flags.console()
    )


def _run_peers(args: argparse.Namespace) -> int:
    import signal

    from benchmarks import peers
    from benchmarks.environments import PEERS
    from server.commands.bench import shapes, step

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
        workload=lambda vocab_size: flags.uniform(args, vocab_size),
        loads=tuple(args.loads) if "load" in parts else (),
        load_rounds=args.load_rounds,
        seed=args.seed,
    )
    return peers.run(
        checkpoints,
        names,
        flags.dtypes(args),
        scope,
        args.engine_config(args),
        env_dir=args.env_dir or shapes.cache_folder() / "peers",
        out=args.out,
        resume=args.resume,
        console=flags.console(),
    )


def _run_guard(args: argparse.Namespace) -> int:
    from benchmarks import regression as guard

    return guard.run(args.write, flags.console())


def _run_accuracy(args: argparse.Namespace) -> int:
    from jaxserve.demo import DEMO_MODEL
    from server.commands.bench import accuracy

    return accuracy.run(
        args.model or DEMO_MODEL,
        args.text,
        8 if args.quick else args.passages,
        2 * accuracy.WINDOW if args.quick else None,
        args.engine_config(args),
        args.out,
        flags.console(),
    )
