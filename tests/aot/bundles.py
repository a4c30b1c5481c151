"""Reads the final code of TPU kernels from the compiler's dumps. One bundle of instructions is one cycle."""

from __future__ import annotations

import os
import re
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

_BUNDLE = re.compile(r"\s*(?:0x[0-9a-f]+|0) ")
_TARGET = re.compile(r"\s*\S+ (?:LB|LH|LE|PF|PB|CT)")  # of a branch


class Block(NamedTuple):
    """Consecutive bundles of a kernel between two branches.

    Attributes:
      depth: loops around it.
      products: instructions for the matrix units.
      spills: registers stored for want of others.
    """

    depth: int
    bundles: int
    products: int
    spills: int


def dump_to(folder: Path) -> None:
    """Has the compiler write the final code of what it compiles into a folder; before it is loaded."""
    options = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=.*final.*"
    os.environ["LIBTPU_INIT_ARGS"] = f"{os.environ.get('LIBTPU_INIT_ARGS', '')} {options}"


def blocks(folder: Path, kernel: str) -> list[Block]:
    """The blocks of the first kernel of this name that was compiled since the folder was empty."""
    code = min(folder.glob(f"*-{kernel}.*-[0-9][0-9]-final_bundles.txt"))
    bundles = [line for line in code.read_text().splitlines() if _BUNDLE.match(line)]
    name = re.sub(r"-\d\d-final_bundles.txt", "", code.name)
    (use,) = folder.glob(f"{name}-*-final_hlo-static-per-bundle-utilization.txt")
    _, units, *lines = (line for line in use.read_text().splitlines() if line.strip())
    counts = [dict(zip(units.split(", "), map(int, line.split()), strict=True)) for line in lines[2:]]
    assert len(bundles) == len(counts)
    starts = [i for i, line in enumerate(bundles) if not i or _TARGET.match(line) or " sbr." in bundles[i - 1]]
    found = []
    for start, end in pairwise([*starts, len(bundles)]):
        part = counts[start:end]
        found.append(
            Block(
                depth=bundles[start].partition("{")[0].count(">"),
                bundles=end - start,
                products=sum(count["MXU"] for count in part),
                spills=sum(count["VSTORE:SPILL"] for count in part),
            )
        )
    return found
