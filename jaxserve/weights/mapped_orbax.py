"""Reads other programs' Orbax checkpoints by a mapping file; writes safetensors.

The mapping file is TOML. It names the tensors of a Hugging Face checkpoint, which every family can be read from, and
says which array of the Orbax checkpoint holds each, and how:

    checkpoint = "0/items"          # the Orbax directory, relative to the directory of config.json

    [[tensors]]
    name = "model.layers.{layer}.self_attn.q_proj.weight"
    array = "params.decoder.layers.self_attention.query.kernel"
    layers = 1                      # the array's axis that counts the layers, if there is one
    transpose = [1, 2, 0]           # order of the other axes
    deinterleave = 1                # the axis of a head, if rotary pairs are side by side: evens first, then odds
    scale = 11.3137                 # multiplies the values
    merge = [0, 1]                  # makes one axis of these neighbours, from the first to the last

Each step that is given is done in this order.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from jaxserve.weights.stored import CheckpointError

_LAYER = "{layer}"


def _is_axes(value: Any) -> bool:
    return isinstance(value, list) and all(type(axis) is int for axis in value)


# What a field of an entry may be, and in words.
_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("name", "array"), (lambda value: isinstance(value, str), "a text")),
    **dict.fromkeys(("layers", "deinterleave"), (lambda value: type(value) is int, "an axis")),
    "scale": (lambda value: type(value) in (int, float), "a number"),
    "transpose": (_is_axes, "a list of axes"),
    "merge": (lambda value: _is_axes(value) and len(value) == 2, "the first and the last axis"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MappedTensor:
    """One entry of a mapping file; the module's text says what its fields do."""

    name: str
    array: str
    layers: int | None = None
    transpose: tuple[int, ...] | None = None
    deinterleave: int | None = None
    scale: float | None = None
    merge: tuple[int, int] | None = None

    def tensors(self, values: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        """An array's tensors by name. Raises ValueError if a step does not fit its shape."""
        if self.layers is None:
            yield self.name, self._changed(values)
            return
        for layer, part in enumerate(np.moveaxis(values, self.layers, 0)):
            yield self.name.replace(_LAYER, str(layer)), self._changed(part)

    def _changed(self, values: np.ndarray) -> np.ndarray:
        if self.transpose is not None:
            values = values.transpose(self.transpose)
        if self.deinterleave is not None:
            axis = self.deinterleave
            order = np.concatenate([np.arange(first, values.shape[axis], 2) for first in (0, 1)])
            values = np.take(values, order, axis)
        if self.scale is not None:
            values = (values.astype(np.float32) * np.float32(self.scale)).astype(values.dtype)
        if self.merge is not None:
            first, last = self.merge
            merged = math.prod(values.shape[first : last + 1])
            values = values.reshape(*values.shape[:first], merged, *values.shape[last + 1 :])
        return np.ascontiguousarray(values)


def read_mapping(file: Path) -> tuple[str, tuple[MappedTensor, ...]]:
    """The Orbax directory that a mapping file names, and its entries. Raises CheckpointError."""
    try:
        given = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as problem:
        raise CheckpointError(f"{file} cannot be read: {problem.strerror}") from None
    except ValueError as problem:
        raise CheckpointError(f"{file} is not TOML: {problem}") from None
    if unknown := given.keys() - {"checkpoint", "tensors"}:
        raise CheckpointError(f"{file} has {min(unknown)!r}; it may have checkpoint and [[tensors]]")
    tables = given.get("tensors")
    if not isinstance(tables, list) or not tables:
        raise CheckpointError(f"{file} has no [[tensors]]")
    return str(given.get("checkpoint", ".")), tuple(_entry(file, table) for table in tables)


def _entry(file: Path, table: Any) -> MappedTensor:
    """One entry. Raises CheckpointError."""
    where = f"{file}: the tensor {table.get('name')!r}" if isinstance(table, Mapping) else str(file)
    if not isinstance(table, Mapping) or not all(isinstance(table.get(name), str) for name in ("name", "array")):
        raise CheckpointError(f"{where} needs a name and an array")
    for name, value in table.items():
        if name not in _KINDS:
            raise CheckpointError(f"{where} has {name!r}; there are {', '.join(_KINDS)}")
        fits, kind = _KINDS[name]
        if not fits(value):
            raise CheckpointError(f"{where} has {name} = {value!r}; it must be {kind}")
    if (_LAYER in table["name"]) != ("layers" in table):
        raise CheckpointError(f"{where} must have {_LAYER} in its name if it has layers, and only then")
    lists = {name: tuple(table[name]) for name in ("transpose", "merge") if name in table}
    return MappedTensor(**{**table, **lists})


def write_safetensors(directory: Path, mapping: Path, out: Path) -> Iterator[tuple[int, int]]:
    """Writes an Orbax checkpoint as indexed safetensors; yields (arrays done, total).

    Needs memory for one array at a time.

    Args:
      directory: the mapping's `checkpoint` is relative to it.

    Raises:
      CheckpointError: an array is missing or cannot be read, or a step does not fit its shape.
    """
    import orbax.checkpoint as ocp

    checkpoint, entries = read_mapping(mapping)
    folder = (directory / checkpoint).resolve()
    places: dict[str, str] = {}
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            names = _leaves(checkpointer.metadata(folder).item_metadata.tree)
            for index, entry in enumerate(entries):
                yield index, len(entries)
                if entry.array not in names:
                    known = ", ".join(sorted(names)[:8])
                    raise CheckpointError(f"{folder} has no array {entry.array!r}; it has {known}, ...")
                tensors = dict(_tensors_of(entry, _restored(checkpointer, folder, names[entry.array])))
                file = f"model-{index + 1:05}-of-{len(entries):05}.safetensors"
                if twice := places.keys() & tensors:
                    raise CheckpointError(f"{mapping} has {min(twice)!r} twice")
                places |= dict.fromkeys(tensors, file)
                save_file(tensors, out / file, metadata={"format": "pt"})
                (out / file).chmod(0o644)  # save_file makes it readable by the owner only
    except CheckpointError:
        raise
    except Exception as error:  # Orbax and its storage raise various types for missing or damaged files
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"{folder} cannot be read: {reason}") from error
    index = {"metadata": {}, "weight_map": places}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    yield len(entries), len(entries)


def _tensors_of(entry: MappedTensor, values: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    try:
        yield from entry.tensors(values)
    except (ValueError, IndexError) as problem:
        shape = list(values.shape)
        raise CheckpointError(f"array {entry.array!r} {shape} does not make {entry.name!r}: {problem}") from None


def _leaves(tree: Any, before: tuple[str, ...] = ()) -> dict[str, tuple[str, ...]]:
    """The path of each array in a tree, by its dotted name."""
    found: dict[str, tuple[str, ...]] = {}
    items = tree.items() if isinstance(tree, Mapping) else enumerate(tree)
    for key, value in items:
        path = (*before, str(key))
        if isinstance(value, Mapping | list | tuple):
            found |= _leaves(value, path)
        else:
            found[".".join(path)] = path
    return found


def _restored(checkpointer: Any, folder: Path, path: tuple[str, ...]) -> np.ndarray:
    """One array of a checkpoint, on the host."""
    import orbax.checkpoint as ocp

    item: Any = 0
    restore: Any = ocp.RestoreArgs(restore_type=np.ndarray)
    for key in reversed(path):
        item, restore = {key: item}, {key: restore}
    options = ocp.args.PyTreeRestore(item=item, restore_args=restore, partial_restore=True)
    found = checkpointer.restore(folder, options)
    for key in path:
        found = found[key]
    return np.asarray(found)
