"""Reads from a scheduled program which collectives run beside the matmuls and which do not."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from jaxserve.planning.hlo import KINDS, channel_of, collectives

_COMPUTATION = re.compile(r"(?:ENTRY )?%(?P<name>[\w.-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"%(?P<name>[\w.-]+) = (?:\(.*?\)|\S+) (?P<op>[a-z][a-z0-9-]*)\((?:%(?P<operand>[\w.-]+))?")
_CALLED = re.compile(r"(?:calls|to_apply|body)=%([\w.-]+)")
_RING = re.compile(r" collective-permute(?:-start)?\(.*source_target_pairs=\{(.*?)\}\}")
_PRODUCT = re.compile(
    r" (?:dot|convolution)\(| fusion\(.*kind=kOutput|__triton_(?:nested_)?gemm"
    r'|custom_call_target="(?:tpu_custom_call|__cublas|__cudnn|__gpu\$xla)'
)


class Exchange(NamedTuple):
    """A collective of a scheduled program.

    Attributes:
      sent: bytes that a device sends.
      under: whether the device multiplies or attends between its start and its end.
    """

    kind: str
    sent: float
    under: bool


def exchanges(text: str) -> Iterator[Exchange]:
    """The collectives of a scheduled HLO module, those in loops as often as they run."""
    parts: dict[str, list[str]] = {}
    lines: list[str] = []
    entry = ""
    for line in text.splitlines():
        if (opening := _COMPUTATION.match(line)) is not None:
            lines = parts.setdefault(opening["name"], [])
            entry = opening["name"] if line.startswith("ENTRY") else entry
        else:
            lines.append(line)
    yield from _scheduled(parts, entry, 1)


def _scheduled(parts: dict[str, list[str]], name: str, times: int) -> Iterator[Exchange]:
    """The exchanges of a computation that runs so often."""
    lines = parts[name]
    ends = {
        found["operand"]: index
        for index, line in enumerate(lines)
        if (found := _INSTRUCTION.search(line)) is not None and found["op"].endswith("-done")
    }
    steps = _steps(parts, lines)
    for index, line in enumerate(lines):
        found, called = _INSTRUCTION.search(line), _CALLED.search(line)
        inside = parts.get(called[1], []) if called is not None else []
        first, last = steps.get(index, (index, index))
        if first < index:
            continue
        op = "" if found is None else found["op"].removesuffix("-start")
        if op == "while" and called is not None:
            yield from _scheduled(parts, called[1], times * _trips(inside))
        elif found is not None and (op in KINDS or op in ("fusion", "call", "async")):
            until = ends.get(found["name"], last)
            under = any(_PRODUCT.search(between) for between in lines[index + 1 : until])
            for kind, sent in _sent([line] if op in KINDS else inside, line):
                yield from [Exchange(kind, sent, under)] * times


def _steps(parts: dict[str, list[str]], lines: list[str]) -> dict[int, tuple[int, int]]:
    """The first and the last of the fusions that a collective is in, by the index of each."""
    of: dict[str, list[int]] = {}
    for index, line in enumerate(lines):
        if " fusion(" in line and (called := _CALLED.search(line)) is not None:
            for inside in parts.get(called[1], ()):
                if (channel := channel_of(inside)) is not None:
                    of.setdefault(channel, []).append(index)
    return {index: (indices[0], indices[-1]) for indices in of.values() for index in indices}


def _trips(body: list[str]) -> int:
    """How often a ring loop of matmuls by parts runs: until each part has come once."""
    rings = [match[1].count("},{") + 1 for line in body if (match := _RING.search(line)) is not None]
    return max(rings[0] // len(rings), 1) if rings else 1


def _sent(lines: list[str], caller: str) -> Iterator[tuple[str, float]]:
    """(kind, bytes sent by a device) of collectives among instructions, called ones included."""
    for op in collectives("\n".join(lines)):
        share = (op.group - 1) / op.group if op.group and op.kind != "collective-permute" else 1.0
        scattered = op.kind == "all-reduce" and "calls=%all-reduce-scatter" in caller  # so TPUs have reduce-scatters
        kind = "reduce-scatter" if scattered else op.kind
        size = op.nbytes * (op.group if op.kind == "reduce-scatter" else 1)
        yield from [(kind, size * share * (2 if kind == "all-reduce" else 1))] * op.times
