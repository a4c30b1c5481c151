"""What commands print and check: messages, progress, the start-up report, files to write.

Messages go to standard error, so that standard output has only answers.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from jaxserve import progress_bars as bars

if TYPE_CHECKING:
    from jaxserve.startup_report import StartupReport
    from jaxserve.text.chat_template import ChatTemplate

Progress = Callable[[str, int, int], None]  # (step, done, total)

_PICTURES = (".png", ".svg", ".pdf")  # suffixes of what --plot can draw
_WIDTH = 190  # of tables in a file or a pipe


_NO_MEMORY = "not enough memory for weights and slots; try fewer --slots or --max-rows, or --dtype bfloat16"


class UserError(Exception):
    """A mistake of the user, shown as one sentence without a traceback."""


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """Turns errors that the user can correct into UserError."""
    try:
        yield
    except (ValueError, OSError) as problem:  # wrong settings, checkpoints that cannot be served, unreadable files
        raise UserError(str(problem)) from problem
    except (MemoryError, RuntimeError) as problem:  # jax reports a full device as JaxRuntimeError
        if isinstance(problem, RuntimeError) and "RESOURCE_EXHAUSTED" not in str(problem):
            raise
        raise UserError(_NO_MEMORY) from problem


def console() -> Console:
    """A console on standard error. Made anew each time, because tests replace standard error."""
    return Console(stderr=True, highlight=False, soft_wrap=True)


def tables() -> Console:
    """A console on standard output, for tables."""
    return Console(width=None if sys.stdout.isatty() else _WIDTH, highlight=False)


def say(message: str) -> None:
    print(f"jaxserve: {message}", file=sys.stderr, flush=True)


def say_defaults(defaults: Mapping[str, Any]) -> None:
    """Prints the checkpoint's recommended sampling parameters: the defaults of requests."""
    from jaxserve.generation.defaults import describe

    if (line := describe(defaults)) is not None:
        say(line)


def say_tools(template: ChatTemplate | None) -> None:
    """Prints in what form the model calls tools, if its chat template has them."""
    if template is not None and "tools" in template.with_tools.variables:
        form = template.tool_form or "not known, so the server reads no calls"
        say(f"form of tool calls: {form} (--tool-parser sets another)")


def say_outcome(finish_reason: str, prompt_tokens: int, completion_tokens: int, seed: int | None) -> None:
    drawn = "" if seed is None else f", seed {seed}"
    say(f"{finish_reason} after {completion_tokens} tokens (prompt {prompt_tokens}{drawn})")


def print_json(value: Any) -> None:
    """Prints JSON on standard output."""
    json.dump(value, sys.stdout, indent=1)
    print()


def check_positive(args: argparse.Namespace, *names: str) -> None:
    """Raises UserError if one of these flags was given a number below 1."""
    for name in names:
        value = getattr(args, name)
        if value is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} is {value}; it must be at least 1")


def check_output(flag: str, file: Path | None, *, is_picture: bool = False) -> None:
    """Raises UserError if a file cannot be written, before the work for it starts.

    Args:
      is_picture: whether its name must end as that of a picture.
    """
    if file is None:
        return
    if is_picture and file.suffix.lower() not in _PICTURES:
        raise UserError(f"{flag} {file} must end in {', '.join(_PICTURES[:-1])} or {_PICTURES[-1]}")
    if is_picture:
        from jaxserve.planning import drawing

        if not drawing.is_installed():
            raise UserError(f"{flag} {file}: {drawing.MISSING}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        was_there = file.exists()
        with open(file, "ab"):
            pass
        if not was_there:
            file.unlink()
    except OSError as problem:
        raise UserError(f"cannot write {flag} {file}: {problem.strerror}") from None


def check_folder(flag: str, folder: Path | None) -> None:
    """Raises UserError if nothing can be written to a directory."""
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as problem:
        raise UserError(f"cannot write to {flag} {folder}: {problem.strerror}") from None


def progress_bars() -> contextlib.AbstractContextManager[Progress]:
    """Shows the progress of steps: bars in a terminal, a line for each step elsewhere."""
    return bars.progress_bars(console(), say)


def show(report: StartupReport, *, model: str) -> None:
    """Prints the start-up report of an engine."""
    out = console()
    facts = Table.grid(padding=(0, 2))
    each = ", in each replica" if report.replicas > 1 else ""
    rounded = f" ({report.quantize})" if report.quantize else ""
    for name, value in (
        ("model", f"{model} ({report.family}, {_count(report.parameters)} parameters, {report.dtype})"),
        ("device", f"{report.device} ({report.platform}){_layout(report)}"),
        ("attention", f"{report.attention}: {report.attention_reason}"),
        ("padding", report.padding),
        ("memory", f"weights {_bytes(report.weight_bytes)}{rounded}, pool {_bytes(report.pool_bytes)}"),
        ("slots", f"{report.slots:,} in blocks of {report.block_size}, {report.kv_cache_dtype}{each}"),
        ("batch", f"{report.max_rows} rows of up to {report.max_context:,} tokens{each}"),
        ("buckets", f"{report.buckets_reason}{_for_decodes(report)}"),
        (
            "start",
            f"load {report.load_seconds:.1f} s, compile {report.compile_seconds:.1f} s ({report.programs_loaded} of "
            f"{report.programs} cached), measure {report.measure_seconds:.1f} s",
        ),
    ):
        if value:
            facts.add_row(name, value)
    out.print(facts)
    table = Table(box=None, padding=(0, 2))
    for column in ("bucket (tokens)", "compile (s)", "iteration (ms)", "tokens/s"):
        table.add_column(column, justify="right")
    for cost in report.buckets:
        rate = f"{cost.tokens_per_second:,.0f}"
        table.add_row(str(cost.size), f"{cost.compile_seconds:.2f}", f"{cost.milliseconds:.2f}", rate)
    out.print(table)


def _for_decodes(report: StartupReport) -> str:
    """The buckets that have a program without prompts."""
    sizes = ", ".join(map(str, report.decode_buckets))
    return f"; {sizes} also for iterations of decodes only" if sizes else ""


def _layout(report: StartupReport) -> str:
    """How the devices share the work."""
    layers = report.layers_per_stage
    copies = f", {report.replicas} replicas" if report.replicas > 1 else ""
    if len(layers) == 1:
        return copies + (f", {report.tensor} for each layer" if report.tensor > 1 else "")
    each = f"{report.tensor} device{'s' * (report.tensor > 1)}"
    return f"{copies}, {len(layers)} stages of {each} with {', '.join(map(str, layers))} layers"


def _count(number: int) -> str:
    for unit, size in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number)


def _bytes(number: int) -> str:
    return f"{number / 2**30:.2f} GiB" if number >= 2**30 else f"{number / 2**20:.1f} MiB"
