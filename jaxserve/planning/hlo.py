"""Reads collectives from HLO modules as text."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "collective-permute", "all-to-all")
_INSTRUCTION = re.compile(r"= (?P<shape>\(.*?\)|\S+) (?P<op>[a-z][a-z0-9-]*?)(?P<start>-start)?\(")
_COMPUTATION = re.compile(r"\s*(ENTRY )?%?(?P<name>[\w.-]+) \(.*\{$")
_FUSED = re.compile(r" fusion\(.*calls=%?([\w.-]+)")
_ARRAY = re.compile(r"(?P<dtype>[a-z]+[0-9]*)\[(?P<sizes>[0-9,]*)\]")
_GROUPS = re.compile(
    r"replica_groups=(?:\{\{(?P<first>[\d,]+)\}|\[\d+,(?P<size>\d+)\]"
    r"|mesh\[(?P<axes>[^\]]*)\](?:, device_ids=\S+)? \{(?P<over>[^}]*)\})"
)
_PAIRS = re.compile(r"source_target_pairs=\{(.*?)\}\}")
_CHANNEL = re.compile(r"channel_id=(\d+)")
_WIDTHS = {"pred": 1, "bf16": 2}


class CollectiveOp(NamedTuple):
    """Collectives of one kind and result in a compiled program.

    Attributes:
      arrays: the results, as the program writes them: bf16[64,14336].
      nbytes: bytes of one of them on each device.
      group: devices that take part in one, of a permute those of a cycle; 0 if the program does not say.
    """

    kind: str
    arrays: str
    nbytes: int
    times: int
    group: int = 0


def collectives(text: str) -> list[CollectiveOp]:
    """The collectives in an HLO module; one in a loop counts once."""
    found: Counter[tuple[str, str, int, int]] = Counter()
    for op, arrays, line in instructions(text):
        if op in KINDS:
            size, names = sum(nbytes for _, nbytes in arrays), ", ".join(name for name, _ in arrays)
            found[op, names, size, _group(line)] += 1
    return [CollectiveOp(*key[:3], count, key[3]) for key, count in found.items()]


def _group(line: str) -> int:
    """Devices of a group: `replica_groups=` and `{{0,1}}`, `[2,2]<=[4]` or `mesh['x'=2] {'x'}`."""
    match = _GROUPS.search(line)
    if match is None:
        pairs = _PAIRS.search(line)
        return 0 if pairs is None else _cycle(dict(re.findall(r"(\d+),(\d+)", pairs[1])))
    if match["axes"] is None:
        return int(match["size"]) if match["size"] else match["first"].count(",") + 1
    sizes = dict(re.findall(r"'(\w+)'=(\d+)", match["axes"]))
    # A part of an axis is written 'x':(1)2, of size 2.
    over = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", match["over"])
    return math.prod(int(part or sizes[axis]) for axis, part in over)


def _cycle(to: dict[str, str]) -> int:
    """Devices that a part comes by until it is back at the first; 0 if it never is."""
    first = device = next(iter(to), "")
    for count in range(1, len(to) + 1):
        device = to.get(device, "")
        if device == first:
            return count
    return 0


def instructions(text: str) -> Iterator[tuple[str, list[tuple[str, int]], str]]:
    """(operation, [(array, bytes), ...] of its result, the whole line) of each instruction.

    Instructions within fusions are left out, because their results are never in memory, unless they are collectives. An
    all-reduce in a fusion `all-reduce-scatter` is a reduce-scatter with the fusion's result; so TPUs have them. One
    that runs beside other work there is in several fusions (its start, that work, its end) and comes once.
    """
    fused, inside, given = set(_FUSED.findall(text)), "", ""
    known: set[str] = set()  # channels of collectives within fusions
    for line in text.splitlines():
        if (opening := _COMPUTATION.match(line)) is not None:
            inside, given = opening["name"] if opening["name"] in fused else "", line.rpartition("->")[2]
        match = _INSTRUCTION.search(line)
        if match is None or (inside and match["op"] not in KINDS):
            continue
        if inside and (channel := channel_of(line)) is not None:
            if channel in known:
                continue
            known.add(channel)
        if inside.startswith("all-reduce-scatter"):
            yield "reduce-scatter", _arrays(given), line
            continue
        arrays = _arrays(match["shape"])
        # An all-reduce has its results only, on TPUs and CPUs.
        if match["start"] and (match["op"] != "all-reduce" or match["shape"].startswith("((")):
            arrays = _results(arrays, match["op"])
        yield match["op"], arrays, line


def channel_of(line: str) -> str | None:
    """The channel of a collective; each in a program has its own."""
    match = _CHANNEL.search(line)
    return match and match[1]


def _arrays(shape: str) -> list[tuple[str, int]]:
    """(array, bytes) of each array in a shape."""
    return [(f"{a['dtype']}[{a['sizes']}]", _nbytes(a)) for a in _ARRAY.finditer(shape)]


def _results(arrays: list[tuple[str, int]], op: str) -> list[tuple[str, int]]:
    """Results of a start with array operands: as many, and for permutes two contexts of u32[]."""
    if op == "collective-permute":
        arrays = [each for each in arrays if each[0] != "u32[]"]
    return arrays[len(arrays) // 2 :] if op in KINDS else arrays[:1]


def _nbytes(array: re.Match[str]) -> int:
    width = _WIDTHS.get(array["dtype"]) or max(int(re.sub(r"\D", "", array["dtype"]) or 8) // 8, 1)
    return width * math.prod(int(size) for size in array["sizes"].split(",") if size)


def sizes_of(array: str) -> tuple[int, ...]:
    """The sizes of an array such as bf16[64,128]."""
    match = _ARRAY.match(array)
    assert match is not None
    return tuple(int(size) for size in match["sizes"].split(",") if size)
