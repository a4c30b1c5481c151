"""`jaxserve bench accuracy`: compares answers with narrow numbers with those at full width."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from jaxserve.demo import DEMO_MODEL
from jaxserve.engine import Engine
from jaxserve.text.tokenizer import Tokenizer
from server.commands.bench import flags, machine, report
from server.commands.console import Progress, progress_bars, tables
from server.commands.flags import add_engine_flags, engine_config

HELP = """\
Compares the answers of one checkpoint at full width and with fewer bits: the perplexity of a text, read in windows of
256 tokens that overlap by half, and greedy continuations of passages from it. By default it compares the demo model on
the text that was held out of its training.

  jaxserve bench accuracy
  jaxserve bench accuracy --model DIR --text FILE --dtype bfloat16"""

WINDOW = 256  # tokens scored together; windows overlap by half
OPENING, GENERATED = 32, 64  # tokens of the passages that are continued, and of their continuations
_TOGETHER = 64  # prompts given to the engine at once
_HELD_OUT = DEMO_MODEL / "held_out.txt"

# Name -> settings. Each variant is compared with the first.
VARIANTS: dict[str, dict[str, Any]] = {
    "full width": {"kv_cache_dtype": "auto", "quantize": None},
    "int8 keys and values": {"kv_cache_dtype": "int8", "quantize": None},
    "int8 weights": {"kv_cache_dtype": "auto", "quantize": "int8"},
    "int8 both": {"kv_cache_dtype": "int8", "quantize": "int8"},
    "float8 weights": {"kv_cache_dtype": "auto", "quantize": "float8"},
    "int4 weights": {"kv_cache_dtype": "auto", "quantize": "int4"},
}


class Answers(NamedTuple):
    """What one engine made of the text.

    Attributes:
      losses: float64[tokens - 1], -ln p of each token given those before it in its window.
      continuations: the greedy tokens after each opening.
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
    flags.add_output_flags(parser)
    parser.add_argument("--model", type=Path, metavar="DIR", help="a checkpoint directory (default: the demo model)")
    parser.add_argument("--text", type=Path, metavar="FILE", help="UTF-8 text (default: held out of the demo's)")
    parser.add_argument(
        "--passages", type=flags.positive, default=200, metavar="N", help="to continue (default: %(default)s)"
    )
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Prints and writes a row for each variant; returns 0."""
    model, passages, console = args.model or DEMO_MODEL, 8 if args.quick else args.passages, tables()
    tokenizer = Tokenizer.from_directory(model)
    if tokenizer is None:
        raise ValueError(f"{model} has no tokenizer.json; perplexity is of a text")
    tokens = [token for document in _documents(args.text or _HELD_OUT) for token in tokenizer.encode(document)]
    tokens = tokens[: 2 * WINDOW if args.quick else None]
    if len(tokens) < 2 * WINDOW:
        raise ValueError(f"the text has {len(tokens)} tokens; at least {2 * WINDOW} are needed")
    config = dataclasses.replace(engine_config(args), scoring=True, max_context=WINDOW + 1)
    answers: dict[str, Answers] = {}
    with progress_bars() as progress:
        for name, changes in VARIANTS.items():
            engine = Engine.from_checkpoint(model, dataclasses.replace(config, **changes), progress=progress)
            with engine:
                answers[name] = ask(engine, tokens, passages, name, progress)
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


def ask(engine: Engine, tokens: Sequence[int], passages: int, name: str, progress: Progress) -> Answers:
    """Has an engine score the text and continue passages of it."""
    half = WINDOW // 2
    starts = range(0, max(len(tokens) - half, 1), half)
    scored = {"max_tokens": 1, "prompt_logprobs": 0}
    greedy = {"max_tokens": GENERATED, "ignore_eos": True}
    prompts = [{"prompt_token_ids": tokens[at : at + WINDOW]} | scored for at in starts]
    openings = np.linspace(0, len(tokens) - OPENING, passages).astype(int)
    prompts += [{"prompt_token_ids": tokens[at : at + OPENING]} | greedy for at in openings]
    made = []
    for first in range(0, len(prompts), _TOGETHER):
        progress(f"reading ({name})", first, len(prompts))
        made += engine.generate(prompts[first : first + _TOGETHER], temperature=0.0)
    progress(f"reading ({name})", len(prompts), len(prompts))
    if wrong := next((completion.error for completion in made if completion.error is not None), None):
        raise RuntimeError(f"a request failed: {wrong}")
    losses = []
    for at, completion in zip(starts, made, strict=False):
        assert completion.prompt_logprobs is not None
        losses += completion.prompt_logprobs[half if at else 1 :]  # the first has none; the overlap counts once
    assert len(losses) == len(tokens) - 1
    return Answers(
        losses=-np.array(losses, np.float64),
        continuations=[completion.token_ids for completion in made[len(starts) :]],
        dtype=engine.report.dtype,
        memory=(engine.report.weight_bytes, engine.report.pool_bytes / engine.report.slots),
    )


def compare(answers: dict[str, Answers]) -> list[Row]:
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
