"""`jaxserve convert`: a checkpoint to Orbax, or another program's Orbax to safetensors."""

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
  jaxserve serve --model OUT

With --mapping, an Orbax checkpoint of another program becomes a Hugging Face directory: the file says which of its
arrays are which tensors. DIR has config.json and the tokenizer:

  jaxserve convert DIR OUT --mapping FILE.toml         see docs/getting-started.md"""


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, metavar="DIR", help="Hugging Face directory to read")
    parser.add_argument("target", type=Path, metavar="OUT", help="directory to write; must not exist, or be empty")
    parser.add_argument(
        "--dtype",
        choices=get_args(DtypeName),
        default="auto",
        help="dtype to store; auto: that of the checkpoint (default: auto)",
    )
    parser.add_argument(
        "--mapping", type=Path, metavar="FILE.toml", help="description of another program's Orbax checkpoint"
    )


def run(args: argparse.Namespace) -> int:
    """Returns 0 once `OUT` is complete; until then that directory does not exist."""
    if not args.source.is_dir():
        raise UserError(f"{args.source} is not a directory")
    if args.mapping is not None and args.dtype != "auto":
        raise UserError(f"--dtype {args.dtype} does not go with --mapping, which keeps the dtype; serve with --dtype")
    with user_errors():
        import jax.numpy as jnp

        from jaxserve import weights

        with progress_bars() as progress:
            dtype = None if args.dtype == "auto" else jnp.dtype(args.dtype)
            if args.mapping is not None:
                weights.convert_mapped(args.source, args.target, args.mapping, progress)
            else:
                weights.convert(args.source, args.target, dtype, progress)
    say(f"wrote {args.target}; serve it with --model {args.target}")
    return 0
