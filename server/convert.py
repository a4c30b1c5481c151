"""`jaxserve convert`: a Hugging Face checkpoint rewritten as Orbax."""

from __future__ import annotations

import argparse
from pathlib import Path

from server.flags import add_dtype_flag

HELP = """\
Rewrites a Hugging Face checkpoint as Orbax, which restores in parallel and straight into any sharding.
Tokenizer and configuration are copied, so OUT serves like DIR:

  jaxserve convert DIR OUT
  jaxserve serve --model OUT"""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `jaxserve convert`."""
    parser.add_argument("source", type=Path, metavar="DIR", help="Hugging Face directory to read")
    parser.add_argument("target", type=Path, metavar="OUT", help="directory to write; must not exist, or be empty")
    add_dtype_flag(parser)
