"""Our engine against others on this machine: the same checkpoint, the same dtype, one process at a time, in turn."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import signal
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks import compare as judge
from benchmarks import engines as contenders
from benchmarks import peer_tables
from benchmarks.compare import OURS
from benchmarks.engines import Contender
from benchmarks.environments import PEERS, PeerError
from benchmarks.results import Ledger, Turn
from jaxserve.config import EngineConfig
from jaxserve.simulate import workload as load
from jaxserve.simulate.outcome import Outcome
from jaxserve.simulate.workload import Workload
from server.commands.bench import flags, machine, report, shapes, step
from server.commands.bench.progress import Bars
from server.commands.bench.step import Case
from server.commands.flags import add_engine_flags, engine_config

HELP = """\
Compares our engine with transformers (static batches, and its continuous batching), CTranslate2 and llama.cpp on the
same random-weight checkpoints, in the same dtype, one process at a time and in turn. It checks their outputs against
each other first. Then it times steps, and serves the same requests at the same Poisson arrivals, at rates that are
shares of what our engine serves with everything waiting and no --target-tpot. All engines run in process, ours too.

Each peer has a Python environment of its own, which pip makes on first use (llama.cpp is compiled: it needs a C++
compiler) and --env-dir keeps. Settings of pip apply, for instance PIP_EXTRA_INDEX_URL for CPU builds of torch.
Answers are written as they come: --resume continues an interrupted run.

  python -m benchmarks peers --shape gpt2 --dtypes float32 --parts steps
  python -m benchmarks peers --load-rounds 3                  hours on two cores"""

MEMORY_MARGIN = 600 * 10**6  # bytes that a process may hold beside weights and pool
CHECK_PROMPTS, CHECK_LENGTH, CHECK_STEPS = 3, 24, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """What is measured of every engine.

    Attributes:
      steps / rounds: timed steps of each case in one turn, and turns.
      workload: what is served under load, made for a vocabulary's size.
      loads / load_rounds: rates, as shares of what our engine serves with everything waiting (and no objective for the
        time between tokens), and turns at each.
      seed: of the arrivals.
    """

    cases: tuple[Case, ...]
    steps: int
    rounds: int
    workload: Callable[[int], Workload]
    loads: tuple[float, ...]
    load_rounds: int
    seed: int


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of this benchmark."""
    flags.add_output_flags(parser)
    flags.add_model_flags(parser, "bloom-560m,gpt2, one after the other")
    flags.add_step_flags(parser, steps=8)
    flags.add_sizes(parser)
    group = parser.add_argument_group("turns")
    group.add_argument("--engines", default=",".join(PEERS), metavar="A,B", help="peers (default: %(default)s)")
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
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Checks the engines' outputs, times their steps and serves loads with them in turn, and prints tables.

    Results are written after each turn; an interrupted run prints those it has.

    Returns:
      The exit code: 1 when a peer could not be made or run, or its outputs differ from ours.
    """
    names, parts = args.engines.split(","), args.parts.split(",")
    for kind, given, known in (("peer", names, PEERS), ("part", parts, ("steps", "load"))):
        for name in given:
            if name not in known:
                raise ValueError(f"{name!r} is no known {kind}; there are {', '.join(known)}")
    checkpoints = [args.model]
    if args.model is None:
        chosen = (args.shape or ("tiny,tiny-gpt2" if args.quick else "bloom-560m,gpt2")).split(",")
        checkpoints = [shapes.cached_checkpoint(shape) for shape in chosen]
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell ignores SIGINT for commands in the background
        signal.signal(number, signal.default_int_handler)
    scope = Scope(
        cases=() if "steps" not in parts else step.QUICK_CASES if args.quick else step.PEER_CASES,
        steps=3 if args.quick else args.steps,
        rounds=1 if args.quick else args.rounds,
        workload=lambda vocab_size: flags.uniform(args, vocab_size),
        loads=tuple(args.loads) if "load" in parts else (),
        load_rounds=args.load_rounds,
        seed=args.seed,
    )
    return measure(
        checkpoints,
        names,
        flags.dtypes(args),
        scope,
        engine_config(args),
        env_dir=args.env_dir or shapes.cache_folder() / "peers",
        out=args.out,
        resume=args.resume,
        console=flags.console(),
    )


def measure(
    checkpoints: Sequence[Path],
    peers: Sequence[str],
    dtypes: Sequence[str],
    scope: Scope,
    config: EngineConfig,
    *,
    env_dir: Path,
    out: Path,
    resume: bool,
    console: Console,
) -> int:
    """Measures everything in scope; returns the exit code (see `run`)."""
    about = {
        "checkpoints": [str(checkpoint) for checkpoint in checkpoints],
        "cases": [case.name for case in scope.cases],
        "steps": scope.steps,
        "workload": scope.workload(2).name,
        "loads": scope.loads,
        "seed": scope.seed,
        "config": dataclasses.asdict(config),
    }
    ledger = Ledger(out / "peers.json", about, resume=resume)
    environment = machine.environment()
    try:
        with Bars() as bars, tempfile.TemporaryDirectory(prefix="jaxserve-peers-") as scratch:
            for checkpoint in checkpoints:
                group = gather(checkpoint, peers, dtypes, config, env_dir, Path(scratch), ledger, bars)
                group = check(group, ledger, bars)
                time_steps(group, scope, ledger, bars)
                if scope.loads:
                    serve_loads(group, scope, config.max_rows, ledger, bars)
    except KeyboardInterrupt:
        ledger.problem("interrupted: the tables have what there was")
    verdicts = peer_tables.print_all(console, out, ledger, scope.cases, scope.loads)
    ledger.write(environment=environment, verdicts=verdicts)
    console.print(f"written: {ledger.path}", highlight=False)
    return 1 if ledger.problems else 0


def gather(
    checkpoint: Path,
    peers: Sequence[str],
    dtypes: Sequence[str],
    config: EngineConfig,
    env_dir: Path,
    scratch: Path,
    ledger: Ledger,
    bars: Bars,
) -> list[Contender]:
    """Ours, and every peer that can be made, in every dtype that it can serve."""
    found = [contenders.ours(checkpoint, dtype, config, scratch) for dtype in dtypes]
    for name in peers:
        try:
            more, notes = contenders.peer(name, checkpoint, dtypes, env_dir, scratch, bars.say)
        except PeerError as error:
            ledger.problem(str(error))
            bars.say(str(error))
            continue
        found += more
        ledger.notes += notes
    return found


def check(group: Sequence[Contender], ledger: Ledger, bars: Bars) -> list[Contender]:
    """Keeps the contenders whose outputs agree with ours in their dtype."""
    kept, ours = [], {}
    for done, contender in enumerate(sorted(group, key=lambda each: each.engine != OURS)):
        bars(f"{contender.shape}: checking outputs against each other", done, len(group))
        mine = contender.engine == OURS
        if not mine and contender.dtype not in ours:
            continue
        work = _complete if mine else functools.partial(_score, ours=ours[contender.dtype])
        answer = _turn(contender, "check", 0, work, ledger, bars)
        if answer is None:
            continue
        if mine:
            ours[contender.dtype] = answer["completions"]
        kept.append(contender)
    return kept


def time_steps(group: Sequence[Contender], scope: Scope, ledger: Ledger, bars: Bars) -> None:
    """Times the contenders' steps in turn, round after round, each alone in a fresh process."""
    if not scope.cases:
        return
    for done, (turn, contender) in enumerate(_turns(scope.rounds, group)):
        bars(f"{contender.shape}: timing steps in turn", done, scope.rounds * len(group))
        _turn(contender, "steps", turn, functools.partial(_time, scope=scope, ledger=ledger), ledger, bars)


def serve_loads(group: Sequence[Contender], scope: Scope, rows: int, ledger: Ledger, bars: Bars) -> None:
    """Serves each load with every contender in turn. Rates are shares of what ours serves with everything waiting and
    no objective, in the same dtype; every engine gets the same requests at the same times."""
    capacity: dict[str, float] = {}
    for contender in group:
        if contender.engine == OURS:
            bars.say(f"{contender.name}: everything at once, for the capacity")
            workload = scope.workload(contender.vocab_size)
            work = functools.partial(_serve, workload=workload, rows=rows, ledger=ledger, name="capacity")
            answer = _turn(contender, "capacity", 0, work, ledger, bars)
            if answer is not None:
                capacity[contender.dtype] = answer["requests_per_second"]
    group = [contender for contender in group if contender.dtype in capacity]
    for share in scope.loads:
        name = f"load {share:g}"
        for done, (turn, contender) in enumerate(_turns(scope.load_rounds, group)):
            bars(f"{contender.shape}: {name}", done, scope.load_rounds * len(group))
            workload = scope.workload(contender.vocab_size)
            arriving = load.poisson(workload, rate=share * capacity[contender.dtype], seed=scope.seed)
            work = functools.partial(_serve, workload=arriving, rows=rows, ledger=ledger, name=name)
            _turn(contender, name, turn, work, ledger, bars)


def _turns(rounds: int, group: Sequence[Contender]) -> list[tuple[int, Contender]]:
    return [(turn, contender) for turn in range(rounds) for contender in group]


def _turn(
    contender: Contender,
    work: str,
    turn: int,
    do: Callable[[Contender], dict[str, Any]],
    ledger: Ledger,
    bars: Bars,
) -> dict[str, Any] | None:
    problems = len(ledger.problems)
    key = Turn(contender.shape, contender.dtype, contender.engine, work, turn)
    answer = ledger.do(key, lambda: do(contender))
    for problem in ledger.problems[problems:]:
        bars.say(problem)
    return answer


def _complete(contender: Contender) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    prompts = rng.integers(contender.vocab_size, size=(CHECK_PROMPTS, CHECK_LENGTH)).tolist()
    return contender.do(prompts=prompts, steps=CHECK_STEPS)


def _score(contender: Contender, ours: Sequence[dict[str, Any]]) -> dict[str, Any]:
    sequences = [completion["tokens"] for completion in ours]
    scores = contender.do(sequences=sequences, prompt_length=CHECK_LENGTH)["scores"]
    found = judge.agreement(ours, scores, contender.dtype)
    if not found.holds:
        raise PeerError(f"its outputs are not ours: {found}; it is left out")
    return dataclasses.asdict(found)


def _time(contender: Contender, scope: Scope, ledger: Ledger) -> dict[str, Any]:
    cases = [dataclasses.asdict(case) for case in scope.cases]
    settings = _settings(contender, "steps", ledger)
    answer = contender.do(cases=cases, steps=scope.steps, settings=settings)
    times = zip(scope.cases, answer.pop("milliseconds"), strict=True)
    answer["milliseconds"] = {case.name: statistics.median(each) for case, each in times if each is not None}
    if contender.engine == OURS:
        answer["allowed_rss"] = answer["weights"] + answer["pool"] + MEMORY_MARGIN
    return answer


def _serve(contender: Contender, workload: Workload, rows: int, ledger: Ledger, name: str) -> dict[str, Any]:
    arrivals = [job.arrival for job in workload.jobs]
    asked = {
        "prompts": [job.prompt.tolist() for job in workload.jobs],
        "outputs": [job.max_tokens for job in workload.jobs],
        "arrivals": arrivals,
        "rows": rows,
    }
    answer = contender.do(load=asked, capacity=name == "capacity", settings=_settings(contender, name, ledger))
    tokens, times = answer.pop("tokens"), answer.pop("times")
    if [len(each) for each in tokens] != asked["outputs"]:
        raise PeerError("some answers are not as long as they were to be")
    outcomes = [
        Outcome(arrival=job.arrival, prompt_tokens=len(job.prompt), token_times=each)
        for job, each in zip(workload.jobs, times, strict=True)
    ]
    answer |= _summary(report.summarise(contender.engine, outcomes))
    answer["openings"] = [each[: judge.OPENING] for each in tokens]
    if contender.engine != OURS:
        mine = ledger.rounds(contender.shape, contender.dtype, OURS, "capacity")[0]["openings"]
        answer["same"] = judge.same_openings(mine, answer["openings"])
        if answer["same"] < judge.SAME_OPENINGS:
            raise PeerError(f"only {answer['same']:.0%} of its answers begin as ours do")
    return answer


def _summary(found: report.RunReport) -> dict[str, Any]:
    """The figures of a load that are kept."""
    samples = {name: getattr(found, name) for name in ("first_token_ms", "between_tokens_ms", "normalised_ms")}
    return {
        "seconds": found.seconds,
        "tokens_per_second": found.tokens_per_second,
        "requests_per_second": found.requests_per_second,
        **{name: sample and dataclasses.asdict(sample) for name, sample in samples.items()},
    }


def _settings(contender: Contender, work: str, ledger: Ledger) -> Any:
    """What the engine found best when it did the same kind of work before."""
    kind = work.split()[0]
    known = (
        answer.get("settings")
        for turn, answer in ledger.answers.items()
        if turn[:3] == (contender.shape, contender.dtype, contender.engine) and turn.work.split()[0] == kind
    )
    return next(known, None)
