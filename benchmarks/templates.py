"""`python -m benchmarks templates`: how long a chat takes to be rendered, in the process for templates."""

from __future__ import annotations

import argparse
import time

import numpy as np
from rich.table import Table

from jaxserve.text.chat_template import ChatTemplate
from server.commands.bench import machine
from server.commands.console import tables

HELP = """\
Renders chats of 1, 10 and 100 messages with a template in the manner of published ones. The template's process runs
already; the times are those of a call from here to its answer."""

TARGET_MS = 2.0  # of a warm call
LENGTHS = (1, 10, 100)  # messages
_TEXT = "It was a dark and stormy night. " * 4
_SOURCE = """\
{%- if messages[0].role == 'system' %}{{ '<|system|>' + messages[0].content | trim }}{% endif -%}
{%- for message in messages %}
{%- if message.role not in ('system', 'user', 'assistant') %}{{ raise_exception('another role') }}{% endif -%}
{{ '<|' + message.role + '|>' + message.content | trim + eos_token }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif -%}"""


def milliseconds(count: int, times: int) -> list[float]:
    """The time of each of so many calls, for a chat with `count` messages."""
    template = ChatTemplate(_SOURCE, {"eos_token": "</s>"})
    messages = [{"role": ("user", "assistant")[i % 2], "content": _TEXT} for i in range(count)]
    found = []
    for _ in range(times + 1):
        began = time.perf_counter()
        template.render(messages, add_generation_prompt=True)
        found.append((time.perf_counter() - began) * 1e3)
    return found[1:]  # the first starts the process and compiles


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--times", type=int, default=1000, metavar="N", help="calls (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Prints a table. Returns 1 if a median misses the target."""
    table = Table(title=f"A chat is rendered ({machine.environment()['cpu']}); target {TARGET_MS:g} ms")
    for name in ("messages", "median, ms", "95th percentile, ms", "99th percentile, ms"):
        table.add_column(name, justify="right")
    medians = []
    for count in LENGTHS:
        figures = np.percentile(milliseconds(count, args.times), (50, 95, 99))
        medians.append(float(figures[0]))
        table.add_row(str(count), *(f"{figure:.2f}" for figure in figures))
    tables().print(table)
    return int(max(medians) > TARGET_MS)
