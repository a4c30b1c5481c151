"""`jaxserve replay`: runs a flight record of several hosts again on one machine."""

from __future__ import annotations

import argparse
from pathlib import Path

from jaxserve.runner import cache_folder
from server.commands.console import console, progress_bars, say, user_errors
from server.commands.engine_start import model_directory

HELP = """\
Runs the iterations of a flight record again, on one device of this machine, and compares the tokens, so that a failure
in production can be examined elsewhere. A group of hosts writes a record when a host fails, and on SIGUSR2 to host 0.

  jaxserve replay jaxserve-20261122T034500.000000.flight --model DIR

A request's tokens are compared up to its first difference. Rounding may differ between the two runs, and change the
choice between tokens of nearly the same logprob; a difference shows both logprobs. Returns 1 if tokens differ."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="the flight record")
    parser.add_argument(
        "--model", type=Path, metavar="DIR", help="checkpoint that it was made with (default: the built-in demo model)"
    )
    parser.add_argument(
        "--compilation-cache",
        metavar="DIR|off",
        default=str(cache_folder.default()),
        help="directory that keeps compiled programs between runs (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Returns 0 if all tokens are as recorded, 1 if some differ."""
    with user_errors():
        path = model_directory(args)
        from jaxserve.multihost.flight_recorder import read
        from jaxserve.multihost.flight_replay import replay

        recording = read(args.file)
        cache = None if args.compilation_cache == "off" else args.compilation_cache
        with progress_bars() as report:
            found = replay(recording, path, cache=cache, progress=report)
    out = console()
    replica = f"replica {recording.replica}, " if recording.HasField("replica") else ""
    out.print(f"{args.file}: {replica}{recording.reason}", markup=False)
    for difference in found.differences:
        out.print(str(difference), markup=False)
    say(
        f"{found.iterations} iterations run again ({found.unanswered} without a recorded result), "
        f"{found.tokens} tokens of {found.requests} requests compared, {len(found.differences)} requests differ"
    )
    return 1 if found.differences else 0
