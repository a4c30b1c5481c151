"""Maps the entries of a parameter to entries of the tensors in a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from jaxserve.models import Model
from jaxserve.models.schema import ModelConfig, Stored


class StoredRun(NamedTuple):
    """Consecutive entries along one axis of a parameter, and where they are stored.

    Entries start:start + length are stored from index `stored` of tensor number `tensor`.
    """

    start: int
    length: int
    tensor: int
    stored: int


class StoredLayout(NamedTuple):
    """The runs of a parameter along one axis; entries outside all runs are zeros."""

    axis: int
    runs: tuple[StoredRun, ...]

    def in_units(self, size: int) -> StoredLayout:
        """The same runs in units of `size` entries. Raises ValueError where a run cuts a unit."""
        if any(part % size for run in self.runs for part in (run.start, run.length, run.stored)):
            raise ValueError(f"heads are moved that are not whole groups of {size} inputs; quantize to int8")
        return StoredLayout(
            self.axis,
            tuple(
                StoredRun(run.start // size, run.length // size, run.tensor, run.stored // size) for run in self.runs
            ),
        )

    @property
    def places(self) -> np.ndarray:
        """int32: the stored index of each entry up to the last run, for one tensor; -1 for zeros."""
        places = np.full(max(run.start + run.length for run in self.runs), -1, np.int32)
        for start, length, _, stored in self.runs:
            places[start : start + length] = stored + np.arange(length)
        return places

    def pad(self, values: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """Pads the model's parameter to this shape, that of the padded model."""
        values = np.asarray(values)
        padded = np.zeros(shape, values.dtype)
        before, others = (slice(None),) * self.axis, tuple(map(slice, values.shape[self.axis + 1 :]))
        for start, length, _, stored in self.runs:
            padded[*before, start : start + length, *others] = values[*before, stored : stored + length]
        return padded

    def unpad(self, values: Any, shape: tuple[int, ...]) -> Any:
        """Removes the padding of a padded model's parameter; `shape` is the model's."""
        order = np.zeros(shape[self.axis], np.int32)
        for start, length, _, stored in self.runs:
            order[stored : stored + length] = start + np.arange(length)
        whole = values.take(order, self.axis)
        return whole[tuple(map(slice, shape))]


def is_qkv(name: str) -> bool:
    """Whether a parameter is the kernel or bias of the fused QKV projection."""
    return name.split(".")[-2] == "qkv"


UNCHANGED = Stored("")  # parameters of converted checkpoints are stored as they are


def layout(model: Model, name: str, axes: tuple[str, ...], shape: tuple[int, ...], stored: Stored) -> StoredLayout:
    """Where the entries of a parameter of `model`, padded or not, are stored.

    Args:
      shape: the parameter's without padding.
    """
    config, sources = model.config, model.head_sources
    if stored.experts:
        return StoredLayout(0, tuple(StoredRun(expert, 1, expert, 0) for expert in range(stored.experts)))
    if is_qkv(name):
        return StoredLayout(0, _merged(_qkv(config, sources.queries, sources.keys, stored)))
    if "heads" in axes:
        axis = axes.index("heads")
        unit = shape[axis] // config.num_heads
        heads = (StoredRun(i * unit, unit, 0, head * unit) for i, head in enumerate(sources.queries) if head >= 0)
        return StoredLayout(axis, _merged(heads))
    return StoredLayout(0, (StoredRun(0, shape[0], 0, stored.share[0] * shape[0]),))


def tensor_shapes(
    config: ModelConfig, name: str, shape: tuple[int, ...], stored: Stored
) -> tuple[tuple[int, ...], ...]:
    """The shapes of a parameter's tensors.

    Args:
      shape: the parameter's without padding.
    """
    if stored.experts:
        shapes = [shape[1:]] * stored.experts
    elif len(stored.names) == 3:
        rows = [heads * config.head_dim for heads in (config.num_heads, config.num_kv_heads, config.num_kv_heads)]
        shapes = [(each, *shape[1:]) for each in rows]
    else:
        shapes = [shape]
    return tuple(_stored_shape(each, stored) for each in shapes)


def _stored_shape(shape: tuple[int, ...], stored: Stored) -> tuple[int, ...]:
    sizes = [shape[0] * stored.share[1], *shape[1:]]
    if stored.every is not None:
        sizes[-2 if stored.transposed else -1] *= stored.every[1]
    if stored.transposed:
        sizes[-2:] = sizes[:-3:-1]
    return tuple(sizes)


def _qkv(config: ModelConfig, queries: tuple[int, ...], keys: tuple[int, ...], stored: Stored) -> Iterable[StoredRun]:
    """One run per head of a fused QKV parameter.

    The parameter is [K, G + 2, D]: for each KV head its queries, its key and its value.
    """
    size, kv_heads, heads = config.head_dim, config.num_kv_heads, config.num_heads
    group, held_group = heads // kv_heads, len(queries) // len(keys)

    def place(kind: int, head: int) -> tuple[int, int]:
        """(tensor, head of it) of a query (kind 0), key (1) or value (2)."""
        if len(stored.names) == 3:
            return kind, head
        if stored.parts:
            return 0, head + (0, heads, heads + kv_heads)[kind]
        if kind == 0:
            return 0, head // group * (group + 2) + head % group
        return 0, head * (group + 2) + group + kind - 1

    for i, key in enumerate(keys):
        query_heads = [(0, head) for head in queries[i * held_group : (i + 1) * held_group]]
        for j, (kind, head) in enumerate([*query_heads, (1, key), (2, key)]):
            if head >= 0:
                tensor, stored_head = place(kind, head)
                yield StoredRun((i * (held_group + 2) + j) * size, size, tensor, stored_head * size)


def _merged(runs: Iterable[StoredRun]) -> tuple[StoredRun, ...]:
    """Merges runs that are adjacent both in the parameter and in its tensor."""
    merged: list[StoredRun] = []
    for run in runs:
        last = merged[-1] if merged else None
        if (
            last is not None
            and (last.start + last.length, last.stored + last.length) == (run.start, run.stored)
            and last.tensor == run.tensor
        ):
            merged[-1] = last._replace(length=last.length + run.length)
        else:
            merged.append(run)
    return tuple(merged)
