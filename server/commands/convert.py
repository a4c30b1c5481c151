"""`jaxserve convert`: rewrites a Hugging Face checkpoint as Orbax."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import get_args

from jaxserve.config import DtypeName
from server.commands.console import UserError, progress_bars, say, user_errors

HELP = """\
Rewrites a Hugging Face checkpoint as Orbax, which restores in parallel and straight into any sharding.
Tokenizer and configuration are copied, so OUT serves like DIR:

  jaxserve convert DIR OUT
  jaxserve serve --model OUT"""


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, metavar="DIR", help="Hugging Face directory to read")
    parser.add_argument("target", type=Path, metavar="OUT", help="directory to write; must not exist, or be empty")
    parser.add_argument(
        "--dtype",
        choices=get_args(DtypeName),
        default="auto",
        help="dtype to store; auto: that of the checkpoint (default: auto)",
    )


def run(args: argparse.Namespace) -> int:
    """Returns 0 once `OUT` is complete; until then that directory does not exist."""
    if not args.source.is_dir():
        raise UserError(f"{args.source} is not a directory")
    with user_errors():
        import jax.numpy as jnp

        from jaxserve import weights

        with progress_bars() as progress:
            dtype = None if args.dtype == "auto" else jnp.dtype(args.dtype)
            weights.convert(args.source, args.target, dtype, progress)
    say(f"wrote {args.target}; serve it with --model {args.target}")
    return 0
