"""Names of parameters, and the globs over them: `layers.*.qkv.bias`, `layers.0-9.*`."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

_LAYERS = re.compile(r"(?<![^.])\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*(?![^.])")  # a part of a glob, such as 0,4-7


def pattern(name: str, layers: str = "*") -> str:
    """A glob for a parameter in other layers, by default all: `layers` replaces the index."""
    return ".".join(layers if part.isdigit() else part for part in name.split("."))


def layer_of(name: str) -> int | None:
    """The layer of a parameter; None outside the layers."""
    return next((int(part) for part in name.split(".") if part.isdigit()), None)


def matches(name: str, glob: str) -> bool:
    """Whether a glob matches a name; `layers.0,4-7.*` matches those of layers 0 and 4 to 7."""
    index = layer_of(name)
    if index is not None:
        glob = _LAYERS.sub(lambda found: str(index) if _has(found[0], index) else found[0], glob)
    return fnmatchcase(name, glob)


def _has(text: str, layer: int) -> bool:
    return any(layer in part for part in _layers(text))


def _layers(text: str) -> list[range]:
    """The layers of a list of indices and ranges, such as 0,4-7."""
    ends = (part.partition("-") for part in text.split(","))
    return [range(int(first), int(last or first) + 1) for first, _, last in ends]


def check_layers(glob: str, parameters: Iterable[str]) -> None:
    """ValueError if a part of a glob names layers that the model lacks, or an empty range."""
    have = {layer for name in parameters if (layer := layer_of(name)) is not None}
    for found in _LAYERS.finditer(glob):
        for part, layers in zip(found[0].split(","), _layers(found[0]), strict=True):
            if not layers:
                raise ValueError(f'[parameters."{glob}"]: {part} has no layers; write {layers.stop - 1}-{layers.start}')
            if layers.stop - 1 not in have:
                raise ValueError(f'[parameters."{glob}"]: there are no layers {part}; the model has 0-{max(have)}')


def instead(name: str, known: Iterable[Any]) -> str:
    """The end of an error about an unknown name: the nearest one, or all."""
    others = [str(each) for each in known]
    close = difflib.get_close_matches(name, others, n=1)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; there are {', '.join(map(repr, others))}" if others else "; there are none"
