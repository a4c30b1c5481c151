"""One request at a time with and without speculation: tokens a second of an answer that repeats itself, and of one that
does not."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from jaxserve.config import EngineConfig
from jaxserve.engine import Engine
from jaxserve.request import Request, TokenEvent
from jaxserve.sampling_params import SamplingParams
from server.commands.bench import machine, report
from server.commands.bench.offline import make_engine
from server.commands.bench.progress import Bars

TARGET = 1.8  # times as fast where the answer repeats itself
NOISE = 0.95  # what a ratio of two runs of the same may come to
_PASSAGE, _TIMES = 16, 4  # tokens of the prompt's passage, and how often it stands there


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One kind of text with and without speculation.

    Attributes:
      without / with_: tokens a second between the first and the last, of each turn.
      drafted / accepted: tokens, in all turns.
      same: whether both gave the same tokens in every turn.
    """

    text: str
    without: list[float]
    with_: list[float]
    drafted: int
    accepted: int
    same: bool

    @property
    def ratio(self) -> float:
        """Median of the turns' ratios."""
        return statistics.median(b / a for a, b in zip(self.without, self.with_, strict=True))


def requests(vocab_size: int, tokens: int, turn: int) -> dict[str, Request]:
    """A request of each kind. The weights need not be trained: their greedy answer to a passage that is repeated soon
    goes round in circles, and what is drawn from them at temperature 1 hardly ever repeats."""
    rng = np.random.default_rng(turn)
    passage = tuple(rng.integers(3, vocab_size, size=_PASSAGE).tolist())
    other = tuple(rng.integers(3, vocab_size, size=_PASSAGE * _TIMES).tolist())
    greedy = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    drawn = SamplingParams(max_tokens=tokens, temperature=1.0, ignore_eos=True, seed=turn)
    return {
        "repeats itself": Request(request_id="repeats", prompt=passage * _TIMES, sampling=greedy),
        "does not": Request(request_id="other", prompt=other, sampling=drawn),
    }


def serve(engine: Engine, request: Request) -> tuple[list[int], float]:
    """The answer's tokens, and how many came a second after the first."""
    tokens: list[int] = []
    times: list[float] = []
    counts: list[int] = []

    def sink(events: Sequence[TokenEvent]) -> None:
        for event in events:
            tokens.extend(event.token_ids)
            counts.append(len(event.token_ids))
            times.append(time.perf_counter())

    engine.submit(request, sink)
    while engine.step():
        pass
    return tokens, sum(counts[1:]) / (times[-1] - times[0])


def measure(model: Path | str, tokens: int, turns: int, config: EngineConfig, bars: Bars) -> list[Compared]:
    """Serves every kind of text by both engines in turn, after a turn that does not count."""
    config = dataclasses.replace(config, speculate=config.speculate or "ngram", scoring=False)
    engines = [make_engine(model, dataclasses.replace(config, speculate=None), bars), make_engine(model, config, bars)]
    drafting = engines[1]
    results = []
    for kind in requests(drafting.model_config.vocab_size, tokens, 0):
        rates: list[list[float]] = [[], []]
        same, before = True, drafting.load()
        for turn in range(turns + 1):
            if turn == 1:
                before = drafting.load()
            request = requests(drafting.model_config.vocab_size, tokens, turn)[kind]
            order = (0, 1) if turn % 2 else (1, 0)
            served = {which: serve(engines[which], request) for which in order}
            if turn:
                for which, (_, rate) in served.items():
                    rates[which].append(rate)
                same = same and served[0][0] == served[1][0]
            bars(f"text that {kind}", turn, turns)
        after = drafting.load()
        results.append(
            Compared(
                text=kind,
                without=rates[0],
                with_=rates[1],
                drafted=after.drafted_tokens - before.drafted_tokens,
                accepted=after.accepted_tokens - before.accepted_tokens,
                same=same,
            )
        )
    return results


def run(model: Path | str, tokens: int, turns: int, config: EngineConfig, out: Path, console: Console) -> int:
    """`jaxserve bench speculate`: prints the comparison against its targets and writes JSON."""
    with Bars() as bars:
        results = measure(model, tokens, turns, config, bars)
    table = Table(title=f"{model}: one request, tokens/s (medians of {turns})", title_justify="left")
    for column in ("text", "without", "with", "ratio", "target", "", "drafted", "accepted", "same answers"):
        table.add_column(column, justify="left" if column == "text" else "right")
    for each, target in zip(results, (TARGET, NOISE), strict=True):
        table.add_row(
            each.text,
            f"{statistics.median(each.without):.1f}",
            f"{statistics.median(each.with_):.1f}",
            f"{each.ratio:.2f}x",
            f"{target:.2f}x",
            "reached" if each.ratio >= target else "missed",
            f"{each.drafted:,}",
            f"{each.accepted:,}",
            "yes" if each.same else "no",
        )
    console.print(table)
    result = {"benchmark": "speculate", "environment": machine.environment(), "model": str(model), "results": results}
    report.write_json(out / "speculate.json", result)
    console.print(f"written: {out / 'speculate.json'}", highlight=False)
    return 0
