"""`jaxserve top`: a running server, with a column an iteration and a line a row."""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import time
import urllib.error
import urllib.request
from collections import deque
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from server.commands.console import UserError

HELP = """\
Shows ten times a second what a running server does: a column for each iteration, a line for each row of the batch.

  jaxserve top
  jaxserve top --server http://10.0.0.7:8000 --api-key KEY
  jaxserve top --once                                   one view, for scripts"""

_SECONDS = 0.1  # between two polls
_TIMEOUT = 5.0  # seconds to wait for an answer
_LABEL = 14  # characters before the columns
_PROMPT, _DECODE, _QUEUE = "blue", "green", "dark_orange"
_EXPECTED = {"next", "healthy", "iterations", "load", "latencies", "tokens_per_second"}  # of any answer
_BARS = " ▁▂▃▄▅▆▇█"


class Board:
    """The view of a server: its last iterations and its load.

    Args:
      news: the first answer of `/live` (see `server.live.LiveStats.since`).
    """

    def __init__(self, news: dict[str, Any]) -> None:
        self._columns: deque[list[Any]] = deque(maxlen=512)
        self._names: dict[tuple[int, int], str] = {}
        self.take(news)

    def take(self, news: dict[str, Any]) -> None:
        """Takes one answer of `/live`."""
        self._news = news
        if "about" in news:  # the first answer, or the first after a restart, perhaps with another model
            self._about = news["about"]
            self._columns.clear()
            self._names.clear()
        for iteration in news["iterations"]:
            for row, name in iteration[6]:
                self._names[iteration[0], row] = name
            self._columns.append(iteration)

    def __rich_console__(self, console: Console, options: Any) -> Any:
        yield Group(self._head(), self._body(options.max_width, options.height or console.height))

    def _head(self) -> RenderableType:
        news, about = self._news, self._about
        load, latencies = news["load"], news["latencies"]
        serving = Text("serving", "bold green") if news["healthy"] else Text("not serving", "bold red")
        title = Text.assemble((f"{about['model']} ", "bold"), f"{about['family']} on {about['device']}  ", serving)
        table = Table.grid(padding=(0, 3))
        used, cached = (load[f"slots_{what}"] / load["slots_total"] for what in ("used", "cached"))
        table.add_row(
            f"{news['tokens_per_second']:,.0f} tokens/s",
            f"running {load['running']}, {about['rows'] * about['replicas']} rows",  # more can run (see page.html)
            f"waiting {load['waiting']:,} ({load['waiting_tokens']:,} tokens)",
            f"slots {used:.0%} used, {cached:.0%} cached",
        )
        table.add_row(
            f"first token {_span(latencies['first_token'])}",
            f"gap {_span(latencies['gap'])}",
            f"preemptions {load['preemptions']:,}",
            f"iterations {load['iterations']:,}",
        )
        return Group(title, table, Text())

    def _body(self, width: int, height: int) -> RenderableType:
        """The columns that fit: the queue, the rows, and how full the buckets were."""
        shown = list(self._columns)[-max(1, width - _LABEL) :]
        rows = self._about["rows"]
        places = list(itertools.product(range(self._about["replicas"]), range(rows)))
        most, largest = max((c[3] for c in shown), default=0), max(self._about["buckets"])
        lines = [_line("queue", [(_bar(c[3], most), _QUEUE) for c in shown])]
        fits = max(1, height - 8)
        for replica, row in places[:fits]:
            cells = [_cell(c, row) if c[0] == replica else (" ", "") for c in shown]
            name = self._names.get((replica, row), "")
            lines.append(_line(f"{replica * rows + row:>3} {name[: _LABEL - 5]}", cells))
        if len(places) > fits:
            lines.append(Text(f"{len(places) - fits} more rows; a taller window shows them", "grey50"))
        lines.append(_line("fill", [_fill(c, largest) for c in shown]))
        colours = ("█ prompt  ", _PROMPT), ("█ decode  ", _DECODE), ("█ waiting  ", _QUEUE)
        return Group(*lines, Text.assemble(*colours, "fill: of the largest bucket"))


def _line(label: str, cells: list[tuple[str, str]]) -> Text:
    return Text.assemble(label.ljust(_LABEL), *cells, no_wrap=True)


def _cell(iteration: list[Any], row: int) -> tuple[str, str]:
    for its_row, start, length, samples in iteration[5]:
        if its_row == row:
            return ("█", _DECODE if length == 1 and samples and start else _PROMPT)
    return (" ", "")


def _fill(iteration: list[Any], largest: int) -> tuple[str, str]:
    used = sum(length for _, _, length, _ in iteration[5])
    return (_bar(used, largest), _PROMPT if used > len(iteration[5]) else _DECODE)


def _bar(value: int, most: int) -> str:
    return _BARS[-(-value * (len(_BARS) - 1) // most)] if most else " "


def _span(quantiles: list[float] | None) -> str:
    return "–" if quantiles is None else " / ".join(f"{1000 * seconds:,.0f}" for seconds in quantiles[:2]) + " ms"


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--server", metavar="URL", default="http://127.0.0.1:8000", help="HTTP address (default: %(default)s)"
    )
    parser.add_argument("--api-key", metavar="KEY", help="API key, if the server requires one")
    parser.add_argument("--once", action="store_true", help="show one view and end")


def run(args: argparse.Namespace) -> int:
    """Shows the view until Ctrl-C. Returns 0."""
    news = _ask(args, 0)
    board = Board(news)
    if args.once:
        Console().print(board)
        return 0
    try:
        with Live(board, screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(_SECONDS)
                news = _ask(args, news["next"])
                board.take(news)
                live.refresh()
    except KeyboardInterrupt:
        return 0


def _ask(args: argparse.Namespace, since: int) -> dict[str, Any]:
    """One answer of `/live`. Raises UserError if there is none."""
    address = args.server.rstrip("/")
    if not address.startswith(("http://", "https://")):
        raise UserError(f"--server {args.server} is not an HTTP address such as http://127.0.0.1:8000")
    try:
        request = urllib.request.Request(f"{address}/live?since={since}")
        if args.api_key:
            request.add_header("Authorization", f"Bearer {args.api_key}")
        with urllib.request.urlopen(request, timeout=_TIMEOUT) as answer:
            news = json.load(answer)
    except urllib.error.HTTPError as problem:
        with problem:
            hint = "; give --api-key" if problem.code == 401 else ""
        raise UserError(f"{address} answered {problem.code} {problem.reason}{hint}") from None
    except (OSError, ValueError, http.client.InvalidURL) as problem:
        raise UserError(f"{address} does not answer: {getattr(problem, 'reason', problem)}") from None
    except http.client.HTTPException as problem:  # such as the gRPC port
        raise UserError(f"{address} does not speak HTTP ({type(problem).__name__})") from None
    if not isinstance(news, dict) or _EXPECTED - news.keys() or not (since or "about" in news):
        raise UserError(f"{address} is not a jaxserve server: its answer at /live has other fields")
    return news
