"""Several answers to one prompt, drawn or searched for, on the command line."""

from __future__ import annotations

import argparse
from typing import Any


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `jaxserve generate` and `jaxserve client`; `fields` reads those that were given."""
    group = parser.add_argument_group("several answers", "They are printed whole, one after the other.")
    group.add_argument("--n", type=int, metavar="N", help="answers (default: 1)")
    group.add_argument(
        "--best-of",
        type=int,
        metavar="N",
        help="draw so many and print those whose tokens are the likeliest on average; with --use-beam-search the "
        "beams (default: as many as --n)",
    )
    group.add_argument(
        "--use-beam-search",
        action="store_true",
        default=None,
        help="search for the likeliest answers instead of drawing them; best first",
    )
    group.add_argument(
        "--length-penalty",
        type=float,
        metavar="X",
        help="power of the length that an answer's logprobs are divided by in the search (default: 1)",
    )
    group.add_argument(
        "--early-stopping",
        action="store_true",
        default=None,
        help="end the search as soon as there are as many answers as beams",
    )


def fields(args: argparse.Namespace) -> dict[str, Any]:
    """What was given of them, under the names that a call has for them."""
    from jaxserve.generation.beam_search import FIELDS

    return {name: getattr(args, name) for name in FIELDS if getattr(args, name) is not None}
