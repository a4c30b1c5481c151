"""Mesh axes as data: names and sizes, from `data=2,tensor=4` or a spec file's [mesh].

No jax.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

STAGE, TENSOR = "stage", "tensor"
_EXAMPLE = "write names and sizes such as data=2,tensor=4"


def read(text: str | None, file: str | Path | Mapping[str, Any] | None) -> dict[str, int]:
    """The axes in a text or, without one, in the [mesh] of a spec file; none if neither has any.

    Args:
      file: its path, or its contents.

    Raises ValueError if an axis has no name or a wrong size, or if the file cannot be read.
    """
    if text is not None:
        return _parse(text)
    table = {} if file is None else entries(file).get("mesh", {})
    if not isinstance(table, dict):
        raise ValueError(f"{named(file)}: mesh is {table!r}; write a section [mesh]")
    return {name: _size(f"{named(file)}: [mesh] {name}", size) for name, size in table.items()}


def text_of(axes: Mapping[str, int]) -> str:
    """Axes as the text that `read` takes."""
    return ",".join(f"{name}={size}" for name, size in axes.items())


def named(file: str | Path | Mapping[str, Any] | None) -> str:
    """A spec file in errors: its path, or "spec" for contents without a file."""
    return "spec" if isinstance(file, Mapping) else str(file)


def entries(path: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """The contents of a TOML file, or a copy of contents. Raises ValueError if unreadable."""
    if isinstance(path, Mapping):
        return dict(path)
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not TOML: {error}") from None


def of_stage(axes: Mapping[str, int], tensor: int) -> dict[str, int]:
    """Axes of one stage's devices, the last fastest; one is always named "tensor"."""
    own = {name: size for name, size in axes.items() if name != STAGE}
    return own if TENSOR in own else {**own, TENSOR: tensor}


def product(axes: Mapping[str, int]) -> str:
    """The sizes as text: "data 2 times tensor 4"."""
    used = {name: size for name, size in axes.items() if size > 1} or {TENSOR: 1}
    return " times ".join(f"{name} {size}" for name, size in used.items())


def members(mesh: Mapping[str, int], over: tuple[str, ...]) -> list[int]:
    """Places in a stage's devices of the first group that shares an array split over some axes."""
    places, stride = [0], math.prod(mesh.values())
    for name, size in mesh.items():
        stride //= size
        if name in over:
            places = [place + index * stride for place in places for index in range(size)]
    return places


def _parse(text: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for part in text.split(","):
        name, sign, size = part.partition("=")
        if not sign or not name.strip().isidentifier():
            raise ValueError(f"mesh is {text!r}; {_EXAMPLE}")
        if name.strip() in found:
            raise ValueError(f"mesh is {text!r}; it has the axis {name.strip()!r} twice")
        found[name.strip()] = _size(f"mesh is {text!r}; {name.strip()}", int(size) if size.isdecimal() else size)
    return found


def _size(where: str, size: Any) -> int:
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ValueError(f"{where} is {size!r}; it must be a whole number of at least 1")
    return size
