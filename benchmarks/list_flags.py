"""Flags that are lists of numbers."""

from __future__ import annotations

import argparse
import math


def shares(text: str) -> list[float]:
    """Parses a list of numbers above 0."""
    try:
        shares = [float(part) for part in text.split(",")]
    except ValueError:
        shares = []
    if not shares or not all(0 < share < math.inf for share in shares):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers above 0 such as 0.5,0.9")
    return shares


def integers(text: str) -> list[int]:
    """Parses a list of whole numbers."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of whole numbers such as 8,256") from None
