"""One prompt many times under random other load: how many different answers there are with `--deterministic` and
without, and what the mode costs."""

from __future__ import annotations

import dataclasses
import queue
import statistics
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
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

_PROMPT, _TOKENS = 55, 32  # of what is asked again and again
_ROUNDS = 4  # in which the engines take turns

Answer = tuple[tuple[int, ...], tuple[float, ...]]  # tokens and their logprobs, to the bit


@dataclass(slots=True, kw_only=True)
class Mode:
    """One engine's answers, and what they took.

    Attributes:
      rates: generated tokens a second, of each round.
      processor: seconds of processors for a thousand generated tokens, of each round.
    """

    name: str
    answers: Counter[Answer] = field(default_factory=Counter)
    rates: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)

    @property
    def unique_tokens(self) -> int:
        """Different answers, logprobs left out."""
        return len({tokens for tokens, _ in self.answers})


def run(model: Path | str, config: EngineConfig, runs: int, seed: int, out: Path, console: Console) -> int:
    """`jaxserve bench deterministic`: asks both engines, prints and writes what they said.

    Returns:
      The exit code: 1 where the mode gave more than one answer.
    """
    config = dataclasses.replace(config, scoring=False, slot_policy="reserve", target_tpot=None)
    modes = []
    with Bars() as bars:
        engines = []
        for on in (False, True):
            buckets = config.buckets[-1:] if on and config.buckets else config.buckets
            settings = dataclasses.replace(config, deterministic=on, buckets=buckets)
            engines.append(make_engine(model, settings, bars))
            modes.append(Mode(name="--deterministic" if on else "default"))
        for engine in engines:
            engine.start()
        shares = [len(part) for part in np.array_split(np.arange(runs), _ROUNDS)]
        for index, share in enumerate(shares):
            for mode, engine in zip(modes, engines, strict=True):
                bars(f"asking ({mode.name})", index, _ROUNDS)
                ask(engine, mode, share, [seed, index])
                bars(f"asking ({mode.name})", index + 1, _ROUNDS)
        for engine in engines:
            engine.stop()
    table = Table(title=f"{model}: one prompt {runs} times under other load", title_justify="left")
    for column in ("mode", "different answers", "different tokens", "most frequent", "tokens/s", "cpu s / 1000 tokens"):
        table.add_column(column, justify="left" if column == "mode" else "right")
    for mode in modes:
        table.add_row(
            mode.name,
            str(len(mode.answers)),
            str(mode.unique_tokens),
            str(max(mode.answers.values())),
            f"{statistics.median(mode.rates):.0f}",
            f"{statistics.median(mode.processor):.2f}",
        )
    console.print(table)
    (default, on) = modes
    rate, processor = (
        statistics.median(a / b for a, b in zip(getattr(on, name), getattr(default, name), strict=True))
        for name in ("rates", "processor")
    )
    console.print(f"the mode serves {rate:.2f} times the tokens a second, for {processor:.2f} times the processor time")
    result = {"benchmark": "deterministic", "environment": machine.environment(), "runs": runs, "rate": rate}
    result["modes"] = [
        {
            "name": mode.name,
            "unique": len(mode.answers),
            "unique_tokens": mode.unique_tokens,
            "rates": mode.rates,
            "processor": mode.processor,
        }
        for mode in modes
    ]
    report.write_json(out / "deterministic.json", result | {"processor": processor})
    console.print(f"written: {out / 'deterministic.json'}", highlight=False)
    return 1 if len(on.answers) > 1 else 0


def ask(engine: Engine, mode: Mode, runs: int, seed: Sequence[int]) -> None:
    """Asks one thing so many times, each time among other requests, and adds what came to `mode`."""
    rng = np.random.default_rng(seed)
    room = threading.Semaphore(2 * engine.config.max_rows)
    ended: queue.SimpleQueue[str] = queue.SimpleQueue()
    told: dict[str, tuple[list[int], list[float]]] = {}

    def sink(events: Sequence[TokenEvent]) -> None:
        for event in events:
            tokens, logprobs = told[event.request_id]
            tokens.extend(event.token_ids)
            logprobs.extend(event.logprobs)
            if event.finish_reason is not None:
                ended.put(event.request_id)
                room.release()

    requests = [request for run in range(runs) for request in _asked(run, engine.model_config.vocab_size, rng)]
    started, used = time.monotonic(), time.process_time()
    for request in requests:
        room.acquire()
        told[request.request_id] = ([], [])
        engine.submit(request, sink)
    for _ in requests:
        ended.get()
    seconds, used = time.monotonic() - started, time.process_time() - used
    generated = sum(len(tokens) for tokens, _ in told.values())
    mode.rates.append(generated / seconds)
    mode.processor.append(1000 * used / generated)
    mode.answers.update((tuple(told[f"{run}"][0]), tuple(told[f"{run}"][1])) for run in range(runs))


def _asked(run: int, vocab_size: int, rng: np.random.Generator) -> list[Request]:
    """The one request, and none to three others before it: some begin as it does, some are sampled."""
    same = np.random.default_rng(0).integers(vocab_size, size=_PROMPT).tolist()
    requests = []
    for index in range(int(rng.integers(4))):
        prompt = rng.integers(vocab_size, size=int(rng.integers(1, 100))).tolist()
        if rng.random() < 0.3:
            prompt = [*same[: int(rng.integers(1, _PROMPT))], *prompt]
        sampling = SamplingParams(
            max_tokens=int(rng.integers(1, 48)),
            temperature=float(rng.choice((0.0, 1.0))),
            top_p=float(rng.choice((1.0, 0.9))),
            frequency_penalty=float(rng.choice((0.0, 0.5))),
            seed=index,
            ignore_eos=True,
        )
        requests.append(Request(request_id=f"{run}, other {index}", prompt=tuple(prompt), sampling=sampling))
    sampling = SamplingParams(max_tokens=_TOKENS, temperature=0.0, ignore_eos=True)
    return [*requests, Request(request_id=f"{run}", prompt=tuple(same), sampling=sampling)]
