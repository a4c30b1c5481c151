"""Command-line flags for several answers to one prompt: samples, or a beam search."""

from __future__ import annotations

import argparse
from typing import Any


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags for several answers; `fields` reads them."""
    group = parser.add_argument_group("several answers", "Answers are printed when all are complete.")
    group.add_argument("--n", type=int, metavar="N", help="number of answers (default: 1)")
    group.add_argument(
        "--best-of",
        type=int,
        metavar="N",
        help="number of samples, of which the --n with the highest mean logprob are printed; with --use-beam-search "
        "the number of beams (default: --n)",
    )
    group.add_argument(
        "--use-beam-search",
        action="store_true",
        default=None,
        help="search for the likeliest answers instead of sampling; best first",
    )
    group.add_argument(
        "--length-penalty",
        type=float,
        metavar="X",
        help="beam search divides an answer's logprob by its length to this power (default: 1)",
    )
    group.add_argument(
        "--early-stopping",
        action="store_true",
        default=None,
        help="end the search once as many answers as beams are complete",
    )


def fields(args: argparse.Namespace) -> dict[str, Any]:
    """The flags that were given, by the field names of calls."""
    from jaxserve.generation.beam_search import FIELDS

    return {name: getattr(args, name) for name in FIELDS if getattr(args, name) is not None}
