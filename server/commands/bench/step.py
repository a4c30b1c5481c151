"""`jaxserve bench step`: times the compiled step alone, on synthetic plans."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.table import Table

from jaxserve import startup
from jaxserve.config import DtypeName, EngineConfig
from jaxserve.iteration import Admission, Chunk, IterationPlan, SamplerVariant
from jaxserve.loop import EngineLoop
from jaxserve.runner.batch import pack
from jaxserve.runner.layout import max_context
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduler.cache_groups import CacheGroups
from server import heap
from server.commands.bench import flags, machine, report, shapes
from server.commands.console import Progress, progress_bars, tables
from server.commands.flags import add_engine_flags, engine_config

HELP = """\
Times the engine's compiled step alone, without scheduler or requests: decodes at several contexts, a prefill, and
decodes mixed with a prompt."""

WARM_UP = 3  # steps that are not counted
LARGEST_BLOCK = 256  # slots are sized for block sizes up to this


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """The work of one timed step.

    Attributes:
      decodes: rows that decode one token each.
      context: tokens such a row holds before its first timed step.
      prompt: tokens of a new prompt computed in the same step.
    """

    decodes: int = 0
    context: int = 0
    prompt: int = 0

    @property
    def name(self) -> str:
        if not self.decodes:
            return f"prefill {self.prompt}"
        if self.prompt:
            return f"{self.decodes} decodes + {self.prompt} prompt tokens"
        return f"decode {self.decodes} row{'s' if self.decodes > 1 else ''} at {self.context}"

    @property
    def rows(self) -> int:
        return self.decodes + (self.prompt > 0)

    @property
    def tokens(self) -> int:
        return self.decodes + self.prompt

    def lengths(self, steps: int) -> list[int]:
        """The tokens of each row after `steps` steps."""
        return [self.context + steps + 1] * self.decodes + [self.prompt] * (self.prompt > 0)

    def slots(self, steps: int) -> int:
        """The slots that `steps` steps use, in whole blocks of any size up to the largest."""
        return sum(-(-length // LARGEST_BLOCK) * LARGEST_BLOCK for length in self.lengths(steps))


CASES = (
    Case(decodes=1, context=100),
    Case(decodes=8, context=100),
    Case(decodes=32, context=100),
    Case(decodes=8, context=480),
    Case(decodes=8, context=1500),
    Case(prompt=256),
    Case(decodes=8, context=100, prompt=120),
)
QUICK_CASES = (Case(decodes=3, context=10), Case(prompt=8), Case(decodes=2, context=10, prompt=6))


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """The milliseconds of each step of a case, in order."""

    case: Case
    milliseconds: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.milliseconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of the process at its largest, and of its first engine's weights and pool."""

    peak_rss: int | None
    weights: int
    pool: int


def measure(
    model: Path | str, dtype: DtypeName, cases: Sequence[Case], steps: int, config: EngineConfig, progress: Progress
) -> tuple[list[Steps], Memory]:
    """Times every case on the programs an engine would compile for it.

    Cases of more rows than `config.max_rows` run in an engine of as many rows; buckets are the cases' exact sizes.

    Args:
      model: a checkpoint directory (a path) or a shape (its name).
      steps: timed steps of each case.
    """
    results: dict[Case, Steps] = {}
    params = model_config = memory = None
    for max_rows in sorted({max(config.max_rows, case.rows) for case in cases}):
        group = [case for case in cases if max(config.max_rows, case.rows) == max_rows]
        settings = dataclasses.replace(
            config,
            dtype=dtype,
            max_rows=max_rows,
            replicas=1,
            buckets=tuple(sorted({case.tokens for case in group})),
            slots=max(case.slots(WARM_UP + steps) for case in group),
            scoring=False,
        )
        if params is None and isinstance(model, Path):
            started, _ = startup.from_checkpoint(model, settings, progress)
        else:
            if params is None:
                model_config, params = shapes.random_params(str(model), "float32" if dtype == "auto" else dtype)
            assert model_config is not None
            started = startup.from_params(model_config, params, settings, progress)
        (replica,) = started.loops
        params, model_config = replica.pipeline.params, replica.pipeline.model.config
        heap.settle()  # as servers do once they are ready
        for done, case in enumerate(group, start=1):
            results[case] = Steps(case=case, milliseconds=time_case(replica, case, steps))
            progress(f"timing steps ({max_rows} rows, {started.report.dtype})", done, len(group))
        memory = memory or Memory(
            peak_rss=machine.peak_rss(), weights=started.report.weight_bytes, pool=started.report.pool_bytes
        )
        gc.unfreeze()
        del started, replica  # its pool, before the next one is allocated
        gc.collect()
    assert memory is not None
    return [results[case] for case in cases], memory


def time_case(replica: EngineLoop, case: Case, steps: int) -> list[float]:
    """Milliseconds between ends of steps; the next is always launched before one ends."""
    pipeline, n_blocks = replica.pipeline, replica.scheduler.pool.n_blocks
    layout = pipeline.shape.layout(case.tokens)
    finished = []
    for index in range(WARM_UP + steps):
        plan = make_plan(case, index, WARM_UP + steps, layout.groups, n_blocks, pipeline.model.config.vocab_size)
        pipeline.launch(plan, pack(plan, layout, n_blocks))
        if not pipeline.has_capacity:
            pipeline.wait()
            finished.append(time.perf_counter())
    while pipeline.in_flight:
        pipeline.wait()
        finished.append(time.perf_counter())
    return (1000 * np.diff(finished[WARM_UP - 1 :])).tolist()


def make_plan(case: Case, index: int, steps: int, groups: CacheGroups, n_blocks: int, vocab_size: int) -> IterationPlan:
    """Makes step `index` of `steps`: decodes at `context + index` tokens, and a new prompt.

    The first plan admits every row with all the blocks that it will need. The context's keys are whatever the pool
    holds: their values do not affect the time.
    """
    lengths = case.lengths(steps)
    admissions, block = [], 0
    if index == 0:
        rng = np.random.default_rng(0)
        for row, length in enumerate(lengths):
            blocks = -(-length // groups.block_size)
            known = case.context + 1 if row < case.decodes else case.prompt
            admissions.append(
                Admission(
                    row=row,
                    request_id=str(row),
                    tokens=tuple(rng.integers(vocab_size, size=known).tolist()),
                    prompt_length=known,
                    blocks=groups.entries(row, range(block, block + blocks), n_blocks),
                    sampling=SamplingParams(temperature=0.0, max_tokens=1),
                )
            )
            block += blocks
    chunks = [Chunk(row, case.context + index, 1, True) for row in range(case.decodes)]
    if case.prompt:
        chunks.append(Chunk(case.decodes, 0, case.prompt, True))
    return IterationPlan(
        sequence=index,
        bucket=case.tokens,
        admissions=tuple(admissions),
        chunks=tuple(chunks),
        table_changes=(),
        sampler=SamplerVariant.PLAIN,
        scoring=False,
    )


def add_flags(parser: argparse.ArgumentParser) -> None:
    flags.add_output_flags(parser)
    flags.add_model_flags(parser)
    flags.add_step_flags(parser)
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Times every case in every dtype, prints a table and writes JSON; returns 0.

    Cases longer than a request may be are left out.
    """
    cases, steps = (QUICK_CASES, 3) if args.quick else (CASES, args.steps)
    model, dtypes, config, console = flags.model(args), flags.dtypes(args), engine_config(args), tables()
    most = max_context(config, shapes.config_of(model))
    too_long = [case for case in cases if max(case.lengths(WARM_UP + steps)) > most]
    if len(too_long) == len(cases):
        raise ValueError(f"every case is longer than the {most:,} tokens that a request may have here")
    for case in too_long:
        console.print(f"left out, since a request may have {most:,} tokens here: {case.name}", highlight=False)
    cases = [case for case in cases if case not in too_long]
    table = Table(title=f"{model}: ms a step (median, p95)", title_justify="left")
    table.add_column("case")
    columns, memories = [], {}
    with progress_bars() as progress:
        for dtype in dtypes:
            table.add_column(dtype, justify="right")
            timed, memories[dtype] = measure(model, dtype, cases, steps, config, progress)
            columns.append(timed)
    for row in zip(*columns, strict=True):
        cells = [f"{steps.median:.2f}, {np.percentile(steps.milliseconds, 95):.2f}" for steps in row]
        table.add_row(row[0].case.name, *cells)
    console.print(table)
    result = {
        "benchmark": "step",
        "model": str(model),
        "environment": machine.environment(),
        "memory": memories,
        "steps": dict(zip(dtypes, columns, strict=True)),
    }
    report.write_json(args.out / "step.json", result, console)
    return 0
