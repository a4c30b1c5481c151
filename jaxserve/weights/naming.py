"""Maps tensor names of a checkpoint to parameters of a model."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve import models
from jaxserve.models.model import is_tuple
from jaxserve.models.schema import Stored
from jaxserve.weights.checkpoint import CheckpointError, StoredTensors
from jaxserve.weights.regions import tensor_shapes
from jaxserve.weights.stored import StoredTensor

_COMPARE_BYTES = 16 * 2**20  # bytes that are compared before their pages are freed


class Parameter(NamedTuple):
    """A parameter of a model. Its name is its path in the tree: layers.3.qkv.kernel."""

    name: str
    shape: jax.ShapeDtypeStruct
    axes: tuple[str, ...]
    stored: Stored


@functools.lru_cache(maxsize=4)  # plans ask for the same ones again and again
def parameters(model: models.Model, dtype: jnp.dtype) -> tuple[Parameter, ...]:
    """All parameters of a model, in the order of its tree's leaves."""
    shapes = jax.tree_util.tree_leaves_with_path(model.shapes(dtype))
    axes, stored = (jax.tree.leaves(tree, is_leaf=is_tuple) for tree in (model.axes(), model.stored()))
    return tuple(
        Parameter(jax.tree_util.keystr(path, simple=True, separator="."), shape, names, source)
        for (path, shape), names, source in zip(shapes, axes, stored, strict=True)
    )


def match(
    tensors: StoredTensors, model: models.Model, wanted: list[Parameter], directory: Path
) -> list[tuple[StoredTensor, ...]]:
    """Finds the tensors of each parameter and checks their names, shapes and dtypes.

    Raises:
      CheckpointError: a tensor is missing or unknown, or its shape or dtype is wrong.
    """
    name_of = TensorNames(model, tensors.names())
    listing = tensors.files[0] if len(tensors.files) == 1 else directory
    names = [tuple(map(name_of, parameter.stored.names)) for parameter in wanted]
    missing = [name for several in names for name in several if name not in tensors]
    if missing:
        raise CheckpointError(f"{listing}: tensor {missing[0]!r} is missing{_and_more(missing)}")
    ignored = {name_of(name) for name in model.no_parameters()}
    parts = tuple(f".{name}" for name in model.no_parameters() if name.endswith("."))
    head, table = name_of(name_of.head), name_of(name_of.table)
    head_twice = model.config.tie_embeddings and head in tensors
    if head_twice:
        ignored.add(head)
    extra = sorted(set(tensors.names()).difference(*names) - ignored)
    extra = [name for name in extra if not any(part in f".{name}" for part in parts)]
    if extra:
        raise CheckpointError(
            f"{tensors[extra[0]].file}: tensor {extra[0]!r}{_and_more(extra)} does not belong to the "
            f"{model.config.family} model of {model.config.num_layers} layers that config.json describes"
        )
    sources = [tuple(tensors[name] for name in several) for several in names]
    for parameter, several in zip(wanted, sources, strict=True):
        name, shape, _, stored = parameter
        for source, stored_shape in zip(several, tensor_shapes(model.config, name, shape.shape, stored), strict=True):
            _check(parameter, source, stored_shape)
    if head_twice:
        _check_tied(tensors, head, table)
    return sources


class TensorNames:
    """Adds prefixes, which depend on the library's version, to the names in a model's table.

    Args:
      names: names of the stored tensors.
    """

    def __init__(self, model: models.Model, names: tuple[str, ...]) -> None:
        tensors = model.stored_table()
        self.table: str = tensors["embed"]["tokens"]["table"].name
        self.head: str = tensors["head"]["tokens"]["table"].name
        self._prefix = _prefix(self.table, names)
        self._head_prefix = _prefix(self.head, names)

    def __call__(self, name: str) -> str:
        of_head = name.rpartition(".")[0] == self.head.rpartition(".")[0]  # the head's bias too
        return (self._head_prefix if of_head else self._prefix) + name


def _prefix(name: str, names: tuple[str, ...]) -> str:
    found = [each for each in names if each == name or each.endswith("." + name)]
    return min(found, key=len, default=name).removesuffix(name)


def _and_more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def _check_tied(tensors: StoredTensors, head: str, table: str) -> None:
    """Raises CheckpointError if a stored head differs from the tied token table."""
    ours, theirs = tensors[head], tensors[table]
    rows, columns = theirs.shape
    step = max(1, _COMPARE_BYTES // (columns * theirs.dtype.itemsize))
    same = ours.shape == theirs.shape
    for start in range(0, rows if same else 0, step):
        part = slice(start, min(start + step, rows)), slice(0, columns)
        same = same and np.array_equal(ours.read(part), theirs.read(part))
        tensors.release(ours)
        tensors.release(theirs)
    if not same:
        raise CheckpointError(
            f"{ours.file}: tensor {head!r} differs from {table!r}, but config.json says that they are tied; "
            "set tie_word_embeddings to false there if they are not"
        )


def _check(parameter: Parameter, source: StoredTensor, wanted: tuple[int, ...]) -> None:
    """Raises CheckpointError if a tensor has the wrong dtype, or a shape other than `wanted`."""
    if not source.is_float:
        raise CheckpointError(
            f"{source.file}: tensor {source.name!r} is stored as {source.dtype}; weights must be "
            "float32, float16, bfloat16 or float8"
        )
    have = source.shape
    if have == wanted:
        return
    if parameter.axes[0] == "vocab" and have[1:] == wanted[1:]:
        raise CheckpointError(
            f"{source.file}: tensor {source.name!r} has {have[0]} rows, but vocab_size is {wanted[0]} in config.json"
        )
    raise CheckpointError(
        f"{source.file}: tensor {source.name!r} has shape {list(have)} where config.json asks for {list(wanted)}"
    )
