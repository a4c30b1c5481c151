"""`jaxserve bench accuracy`: answers with eight bits against those at full width."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import math
import queue
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from jaxserve.demo import DEMO_MODEL
from jaxserve.engine import Engine
from jaxserve.request import FinishReason, Request, TokenEvent
from jaxserve.sampling_params import SamplingParams
from jaxserve.text.tokenizer import Tokenizer
from server.commands.bench import flags, machine, report
from server.commands.bench.progress import Bars
from server.commands.flags import add_engine_flags, engine_config

HELP = """\
Compares the answers of one checkpoint at full width and with eight bits: the perplexity of a text, read in windows of
256 tokens that overlap by half, and greedy continuations of passages from it. By default it compares the demo model on
the text that was held out of its training.

  jaxserve bench accuracy
  jaxserve bench accuracy --model DIR --text FILE --dtype bfloat16"""

WINDOW = 256  # tokens scored together; windows overlap by half
OPENING, GENERATED = 32, 64  # tokens of the passages that are continued, and of their continuations
_HELD_OUT = DEMO_MODEL / "held_out.txt"

# Each is compared with the first: names and the settings that differ.
VARIANTS: dict[str, dict[str, Any]] = {
    "full width": {"kv_cache_dtype": "auto", "quantize": None},
    "int8 keys and values": {"kv_cache_dtype": "int8", "quantize": None},
    "int8 weights": {"kv_cache_dtype": "auto", "quantize": "int8"},
    "int8 both": {"kv_cache_dtype": "int8", "quantize": "int8"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """The answers of one engine about the text.

    Attributes:
      losses: float64[tokens - 1], -log p of each token given those before it in its window, natural logarithm.
      continuations: greedy tokens after each opening.
      memory: bytes of the weights and of a slot.
    """

    losses: np.ndarray
    continuations: list[tuple[int, ...]]
    dtype: str
    memory: tuple[int, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One variant against full width.

    Attributes:
      moved: mean absolute change of a token's log probability.
      agreement: share of greedy tokens before the first that differs, over all continuations.
      equal: share of continuations that are wholly equal.
    """

    name: str
    perplexity: float
    moved: float
    agreement: float
    equal: float
    weight_bytes: int
    slot_bytes: float


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `jaxserve bench accuracy`."""
    flags.add_output_flags(parser)
    parser.add_argument("--model", type=Path, metavar="DIR", help="a checkpoint directory (default: the demo model)")
    parser.add_argument("--text", type=Path, metavar="FILE", help="UTF-8 text (default: held out of the demo's)")
    parser.add_argument(
        "--passages", type=flags.positive, default=200, metavar="N", help="that are continued (default: %(default)s)"
    )
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Prints and writes a row for each variant; returns 0."""
    model, passages, console = args.model or DEMO_MODEL, 8 if args.quick else args.passages, flags.console()
    tokenizer = Tokenizer.from_directory(model)
    if tokenizer is None:
        raise ValueError(f"{model} has no tokenizer.json; perplexity is of a text")
    tokens = [token for document in _documents(args.text or _HELD_OUT) for token in tokenizer.encode(document)]
    tokens = tokens[: 2 * WINDOW if args.quick else None]
    if len(tokens) < 2 * WINDOW:
        raise ValueError(f"the text has {len(tokens)} tokens; at least {2 * WINDOW} are needed")
    config = engine_config(args)
    config = dataclasses.replace(
        config,
        scoring=True,
        max_context=WINDOW + 1,
        max_queued_requests=len(tokens) + passages,
        max_queued_tokens=2 * len(tokens) + passages * OPENING,
    )
    answers: dict[str, Answers] = {}
    with Bars() as bars:
        for name, changes in VARIANTS.items():
            engine = Engine.from_checkpoint(model, dataclasses.replace(config, **changes), progress=bars)
            answers[name] = ask(engine, tokens, passages, name, bars)
            del engine
            gc.collect()
    rows, dtype = compare(answers), next(iter(answers.values())).dtype
    title = f"{model.name}: {len(tokens):,} tokens of text, {dtype}; {passages} continuations of {GENERATED} tokens"
    show(rows, title, console)
    result = {"benchmark": "accuracy", "title": title, "environment": machine.environment(), "rows": rows}
    report.write_json(args.out / "accuracy.json", result, console)
    return 0


def _documents(path: Path) -> list[str]:
    """The documents of a UTF-8 file, separated by form feeds; raises ValueError."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read as UTF-8 text: {error}") from error
    return [document for part in text.split("\f") if (document := part.strip())]


def ask(engine: Engine, tokens: Sequence[int], passages: int, name: str, bars: Bars) -> Answers:
    """Lets an engine score the text and continue passages of it."""
    half = WINDOW // 2
    starts = range(0, max(len(tokens) - half, 1), half)
    scored = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    greedy = SamplingParams(max_tokens=GENERATED, temperature=0.0, ignore_eos=True)
    openings = np.linspace(0, len(tokens) - OPENING, passages).astype(int).tolist()
    requests = [Request(request_id=f"s{at}", prompt=tuple(tokens[at : at + WINDOW]), sampling=scored) for at in starts]
    requests += [
        Request(request_id=f"g{at}", prompt=tuple(tokens[at : at + OPENING]), sampling=greedy) for at in openings
    ]
    logprobs, continuations = _serve(engine, requests, name, bars)
    losses = []
    for at in starts:
        own = logprobs[f"s{at}"]  # of the window's tokens but the first
        losses += own[half - 1 :] if at else own
    assert len(losses) == len(tokens) - 1
    return Answers(
        losses=-np.array(losses, np.float64),
        continuations=[tuple(continuations[f"g{at}"]) for at in openings],
        dtype=engine.report.dtype,
        memory=(engine.report.weight_bytes, engine.report.pool_bytes / engine.report.slots),
    )


def _serve(
    engine: Engine, requests: Sequence[Request], name: str, bars: Bars
) -> tuple[dict[str, list[float]], dict[str, list[int]]]:
    """Serves the requests; returns the logprobs of each prompt, and the tokens of each answer."""
    logprobs: dict[str, list[float]] = {request.request_id: [] for request in requests}
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    ended: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()

    def sink(events: Iterable[TokenEvent]) -> None:
        for event in events:
            logprobs[event.request_id] += [logprob for logprob, _ in event.prompt_logprobs]
            tokens[event.request_id] += event.token_ids
            if event.finish_reason is not None:
                ended.put(event)

    with engine:
        for request in requests:
            engine.submit(request, sink)
        for done in range(1, len(requests) + 1):
            last = ended.get()
            bars(f"reading ({name})", done, len(requests))
            if last.finish_reason not in (FinishReason.LENGTH, FinishReason.EOS):
                raise RuntimeError(f"request {last.request_id} ended with {last.finish_reason}: {last.error}")
    return logprobs, tokens


def compare(answers: dict[str, Answers]) -> list[Row]:
    """Compares each variant with the first."""
    base = next(iter(answers.values()))
    rows = []
    for name, each in answers.items():
        pairs = list(zip(base.continuations, each.continuations, strict=True))
        agreed = sum(
            next((i for i, (a, b) in enumerate(zip(*pair, strict=True)) if a != b), GENERATED) for pair in pairs
        )
        rows.append(
            Row(
                name=name,
                perplexity=math.exp(each.losses.mean()),
                moved=float(np.abs(each.losses - base.losses).mean()),
                agreement=agreed / (GENERATED * len(pairs)),
                equal=sum(a == b for a, b in pairs) / len(pairs),
                weight_bytes=each.memory[0],
                slot_bytes=each.memory[1],
            )
        )
    return rows


def show(rows: Sequence[Row], title: str, console: Console) -> None:
    """Prints the rows as a table."""
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for name in ("perplexity", "change", "logprobs move by", "same greedy tokens", "wholly equal", "weights", "a slot"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row.name,
            f"{row.perplexity:.3f}",
            f"{100 * (row.perplexity / rows[0].perplexity - 1):+.2f}%",
            f"{row.moved:.4f}",
            f"{100 * row.agreement:.1f}%",
            f"{100 * row.equal:.0f}%",
            f"{row.weight_bytes / 2**20:.1f} MiB",
            f"{row.slot_bytes:,.0f} B",
        )
    console.print(table)
