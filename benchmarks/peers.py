"""`python -m benchmarks peers`: our engine and others on the same checkpoints, in turn."""

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

from benchmarks import checkpoints, engines, list_flags, peer_results
from benchmarks.engines import Contender
from benchmarks.environments import OURS, PEERS, PeerError
from benchmarks.peer_results import PeerResults, PeerTurn
from jaxserve.config import EngineConfig
from jaxserve.simulate import workload as traffic
from jaxserve.simulate.outcome import Outcome
from jaxserve.simulate.workload import Workload
from server.commands.bench import flags, machine, report, step
from server.commands.bench.step import Case
from server.commands.console import Progress, progress_bars, say, tables
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

# Other engines would take minutes to fill long contexts.
CASES = (
    Case(decodes=1, context=100),
    Case(decodes=8, context=100),
    Case(decodes=32, context=100),
    Case(prompt=256),
    Case(prompt=1024),
    Case(decodes=8, context=100, prompt=120),
)
CHECK_PROMPTS, CHECK_LENGTH, CHECK_STEPS = 3, 24, 8
_KEPT_FIGURES = (
    "seconds",
    "tokens_per_second",
    "requests_per_second",
    "first_token_ms",
    "between_tokens_ms",
    "normalised_ms",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """The measurements of every engine.

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
    flags.add_workload_flags(parser)
    group = parser.add_argument_group("turns")
    group.add_argument("--engines", default=",".join(PEERS), metavar="A,B", help="peers (default: %(default)s)")
    group.add_argument("--parts", default="steps,load", metavar="A,B", help="what to measure (default: %(default)s)")
    group.add_argument("--cases", metavar="A,B", help="steps to time, as tables name them (default: all)")
    group.add_argument("--rounds", type=flags.positive, default=2, metavar="N", help="of steps (default: %(default)s)")
    group.add_argument(
        "--loads", type=list_flags.shares, default=[0.5, 0.8, 1.2], metavar="X,...", help="(default: 0.5,0.8,1.2)"
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
    """Checks the engines' outputs, times their steps, serves loads, and prints tables.

    Results are written after each turn; an interrupted run prints those it has.

    Returns:
      The exit code: 1 when a peer could not be made or run, or its outputs differ from ours.
    """
    names, parts = args.engines.split(","), args.parts.split(",")
    cases = {case.name: case for case in (step.QUICK_CASES if args.quick else CASES)}
    chosen_cases = list(cases) if args.cases is None else args.cases.split(",")
    named = (("peer", names, PEERS), ("part", parts, ("steps", "load")), ("case", chosen_cases, cases))
    for kind, given, known in named:
        for name in given:
            if name not in known:
                raise ValueError(f"{name!r} is no known {kind}; there are {', '.join(known)}")
    models = [args.model]
    if args.model is None:
        chosen = (args.shape or ("tiny,tiny-gpt2" if args.quick else "bloom-560m,gpt2")).split(",")
        models = [checkpoints.cached(shape) for shape in chosen]
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell ignores SIGINT for commands in the background
        signal.signal(number, signal.default_int_handler)
    scope = Scope(
        cases=tuple(cases[name] for name in chosen_cases) if "steps" in parts else (),
        steps=3 if args.quick else args.steps,
        rounds=1 if args.quick else args.rounds,
        workload=lambda vocab_size: flags.uniform(args, vocab_size),
        loads=tuple(args.loads) if "load" in parts else (),
        load_rounds=args.load_rounds,
        seed=args.seed,
    )
    return measure(
        models,
        names,
        flags.dtypes(args),
        scope,
        engine_config(args),
        env_dir=args.env_dir or checkpoints.cache_folder() / "peers",
        out=args.out,
        resume=args.resume,
        console=tables(),
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
    results = PeerResults(out / "peers.json", about, resume=resume)
    environment = machine.environment()
    try:
        with progress_bars() as bars, tempfile.TemporaryDirectory(prefix="jaxserve-peers-") as scratch:
            turns = _Turns(scope, config, results, bars)
            for checkpoint in checkpoints:
                group = gather(checkpoint, peers, dtypes, config, env_dir, Path(scratch), results, bars)
                turns.take(group)
    except KeyboardInterrupt:
        results.problem("interrupted: the tables hold the results so far")
    ratios = peer_results.print_all(console, results, scope.cases, scope.loads)
    results.write(environment=environment, ratios=ratios)
    console.print(f"written: {results.path}", highlight=False)
    return 1 if results.problems else 0


def gather(
    checkpoint: Path,
    peers: Sequence[str],
    dtypes: Sequence[str],
    config: EngineConfig,
    env_dir: Path,
    scratch: Path,
    results: PeerResults,
    bars: Progress,
) -> list[Contender]:
    """Our engine, and every peer that can be made, in every dtype that it can serve."""
    found = [engines.ours(checkpoint, dtype, config, scratch) for dtype in dtypes]
    for name in peers:
        try:
            more, notes = engines.peer(name, checkpoint, dtypes, config.quantize, env_dir, scratch, say)
        except PeerError as error:
            results.problem(str(error))
            say(str(error))
            continue
        found += more
        results.notes += notes
    return found


class _Turns:
    """The turns of the engines on one checkpoint after another."""

    def __init__(self, scope: Scope, config: EngineConfig, results: PeerResults, bars: Progress) -> None:
        self._scope, self._results, self._bars = scope, results, bars
        self._rows, self._quantize = config.max_rows, config.quantize

    def take(self, group: Sequence[Contender]) -> None:
        """Checks outputs; times steps of the contenders that agree with ours, and serves loads."""
        group = self._check(group)
        if self._scope.cases:
            self._take_rounds("steps", self._scope.rounds, group, self._time)
        if self._scope.loads:
            self._serve_loads(group)

    def _check(self, group: Sequence[Contender]) -> list[Contender]:
        """The contenders whose outputs agree with ours in their dtype."""
        kept, ours = [], {}
        for contender in sorted(group, key=lambda each: each.engine != OURS):
            say(f"{contender.shape}: checking the outputs of {contender.engine} in {contender.dtype}")
            if contender.engine == OURS:
                answer = self._turn(contender, "check", 0, _complete)
                ours[contender.dtype] = answer and answer["completions"]
            elif (completions := ours[contender.dtype]) is not None:
                answer = self._turn(
                    contender, "check", 0, functools.partial(_score, ours=completions, quantize=self._quantize)
                )
            else:
                continue
            kept += [contender] if answer is not None else []
        return kept

    def _serve_loads(self, group: Sequence[Contender]) -> None:
        """Serves each load with every contender in turn.

        Rates are shares of what our engine serves with everything waiting and no objective, in the same dtype. Every
        engine gets the same requests at the same times.
        """
        capacity: dict[str, float] = {}
        for contender in group:
            if contender.engine == OURS:
                say(f"{contender.shape}, {contender.dtype}: everything at once, for the capacity")
                work = functools.partial(self._serve, name="capacity", rate=None)
                answer = self._turn(contender, "capacity", 0, work)
                if answer is not None:
                    capacity[contender.dtype] = answer["requests_per_second"]
        group = [contender for contender in group if contender.dtype in capacity]
        for share in self._scope.loads:
            name = f"load {share:g}"

            def serve(contender: Contender, name: str = name, share: float = share) -> dict[str, Any]:
                return self._serve(contender, name, share * capacity[contender.dtype])

            self._take_rounds(name, self._scope.load_rounds, group, serve)

    def _take_rounds(
        self, work: str, rounds: int, group: Sequence[Contender], do: Callable[[Contender], dict[str, Any]]
    ) -> None:
        """The same work by every contender in turn, round after round, each in a fresh process."""
        turns = [(turn, contender) for turn in range(rounds) for contender in group]
        for done, (turn, contender) in enumerate(turns):
            self._bars(f"{contender.shape}: {work}", done, len(turns))
            self._turn(contender, work, turn, do)

    def _turn(
        self, contender: Contender, work: str, turn: int, do: Callable[[Contender], dict[str, Any]]
    ) -> dict[str, Any] | None:
        problems = len(self._results.problems)
        key = PeerTurn(contender.shape, contender.dtype, contender.engine, work, turn)
        answer = self._results.do(key, lambda: do(contender))
        for problem in self._results.problems[problems:]:
            say(problem)
        return answer

    def _time(self, contender: Contender) -> dict[str, Any]:
        cases = self._scope.cases
        answer = contender.do(
            cases=[dataclasses.asdict(case) for case in cases],
            steps=self._scope.steps,
            settings=self._settings(contender, "steps"),
        )
        times = zip(cases, answer.pop("milliseconds"), strict=True)
        answer["milliseconds"] = {case.name: statistics.median(each) for case, each in times if each is not None}
        return answer

    def _serve(self, contender: Contender, name: str, rate: float | None) -> dict[str, Any]:
        """One load, at `rate` requests a second or with everything waiting."""
        workload = self._scope.workload(contender.vocab_size)
        if rate is not None:
            workload = traffic.poisson(workload, rate=rate, seed=self._scope.seed)
        load = {
            "prompts": [job.prompt.tolist() for job in workload.jobs],
            "outputs": [job.max_tokens for job in workload.jobs],
            "arrivals": [job.arrival for job in workload.jobs],
            "rows": self._rows,
        }
        answer = contender.do(load=load, capacity=rate is None, settings=self._settings(contender, name))
        tokens, times = answer.pop("tokens"), answer.pop("times")
        if [len(each) for each in tokens] != load["outputs"]:
            raise PeerError("some answers have a wrong length")
        outcomes = [
            Outcome(arrival=job.arrival, prompt_tokens=len(job.prompt), token_times=each)
            for job, each in zip(workload.jobs, times, strict=True)
        ]
        found = dataclasses.asdict(report.summarise(contender.engine, outcomes))
        answer |= {name: found[name] for name in _KEPT_FIGURES}
        answer["openings"] = [each[: peer_results.OPENING] for each in tokens]
        if contender.engine != OURS:
            mine = self._results.rounds(contender.shape, contender.dtype, OURS, "capacity")[0]["openings"]
            answer["same"] = peer_results.same_openings(mine, answer["openings"])
            if answer["same"] < peer_results.SAME_OPENINGS:
                raise PeerError(f"only {answer['same']:.0%} of its answers begin as ours do")
        return answer

    def _settings(self, contender: Contender, work: str) -> Any:
        """The settings that the engine found best in earlier work of the same kind."""
        kind, whose = work.split()[0], (contender.shape, contender.dtype, contender.engine)
        answers = self._results.answers.items()
        known = (answer.get("settings") for turn, answer in answers if turn[:3] == whose and turn.work.startswith(kind))
        return next(known, None)


def _complete(contender: Contender) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    prompts = rng.integers(contender.vocab_size, size=(CHECK_PROMPTS, CHECK_LENGTH)).tolist()
    return contender.do(prompts=prompts, steps=CHECK_STEPS)


def _score(contender: Contender, ours: Sequence[dict[str, Any]], quantize: str | None) -> dict[str, Any]:
    sequences = [completion["tokens"] for completion in ours]
    scores = contender.do(sequences=sequences, prompt_length=CHECK_LENGTH)["scores"]
    found = peer_results.agreement(ours, scores, quantize or contender.dtype)
    if not found.holds:
        raise PeerError(f"its outputs are not ours: {found}; it is left out")
    return dataclasses.asdict(found)
