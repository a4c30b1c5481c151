"""Loads a checkpoint: reads the slices of each parameter into its final sharding."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve import models
from jaxserve.models.products import Quantized
from jaxserve.weights import naming, narrow, orbax
from jaxserve.weights.checkpoint import StoredTensors
from jaxserve.weights.naming import Parameter, parameters
from jaxserve.weights.narrow import is_matrix
from jaxserve.weights.packed_tensor import PackedTensor
from jaxserve.weights.placement import Place, describe, on_one_device
from jaxserve.weights.regions import UNCHANGED, layout
from jaxserve.weights.stored import Region, StoredTensor

Progress = Callable[[str, int, int], None]  # (activity, done, total)

_CHUNK = 16 * 2**20  # bytes of a file that are copied before their pages are freed
_TRANSPOSED_ROWS = 16  # rows that are transposed at a time: one cache line of each target row
_ALIGNMENT = 64  # bytes; an aligned array becomes a jax.Array on a CPU without a copy


def load(
    path: str | Path,
    model: models.Model,
    dtype: jnp.dtype,
    *,
    place: Place = on_one_device,
    quantize: str | None = None,
    progress: Progress | None = None,
    count: Callable[[int], None] | None = None,
) -> models.Params:
    """Loads a checkpoint directory of Hugging Face or of `convert` into a model's parameters.

    Needs host memory for one parameter at a time, beside parameters that stay on the host.

    Args:
      model: the model, padded (`models.build`) or not.
      dtype: dtype of the parameters.
      place: gives the sharding of each parameter; each device reads its slice only. A parameter without a sharding is
        not read, and its leaf is a ShapeDtypeStruct.
      quantize: how matrices are held (`narrow.format_of`); they are quantized while loading.
      count: called with the number of bytes after each read from a Hugging Face directory.

    Raises:
      CheckpointError: the files do not hold this model.
      ValueError: from `place`.
    """
    directory, wanted = Path(path), list(parameters(model.unpadded, dtype))
    described = describe(model, dtype, place, quantize=quantize)
    targets = jax.tree.leaves(described, is_leaf=is_matrix)
    if orbax.is_saved(directory):
        names = [parameter.name for parameter in wanted]
        shapes = [parameter.shape.shape for parameter in wanted]
        layouts = [layout(model, name, axes, shape.shape, UNCHANGED) for name, shape, axes, _ in wanted]
        arrays = orbax.restore(
            directory,
            dict(zip(names, targets, strict=True)),
            saved=dict(zip(names, shapes, strict=True)),
            layouts=dict(zip(names, layouts, strict=True)),
        )
        leaves = [arrays[parameter.name] for parameter in wanted]
    else:
        tensors = StoredTensors(directory)
        sources = naming.match(tensors, model, wanted, directory)
        leaves, total = [], sum(source.nbytes for several in sources for source in several)
        done = 0

        def release(source: StoredTensor, nbytes: int) -> None:
            tensors.release(source)
            if count is not None:
                count(nbytes)

        for parameter, target, several in zip(wanted, targets, sources, strict=True):
            if (target.values if isinstance(target, Quantized) else target).sharding is None:
                leaf = target
            elif isinstance(target, Quantized):
                leaf = _load_quantized(model, parameter, several, target, release)
            else:
                leaf = _load_array(model, parameter, several, target, release)
            leaves.append(leaf)
            done += sum(source.nbytes for source in several)
            if progress is not None:
                progress("reading weights", done, total)
    return jax.tree.unflatten(jax.tree.structure(described, is_leaf=is_matrix), leaves)


def _load_array(
    model: models.Model,
    parameter: Parameter,
    sources: tuple[StoredTensor, ...],
    wanted: jax.ShapeDtypeStruct,
    release: Callable[[StoredTensor, int], None],
) -> jax.Array:
    @cache  # replicas on several devices are read once
    def read(*bounds: tuple[int, int]) -> np.ndarray:
        return _read(model, parameter, sources, bounds, wanted.dtype, release)

    return _array(wanted, read)


def _load_quantized(
    model: models.Model,
    parameter: Parameter,
    sources: tuple[StoredTensor, ...],
    wanted: Quantized,
    release: Callable[[StoredTensor, int], None],
) -> Quantized:
    """Quantizes whole rows, because a scale may cover a row, and gives each device its columns."""
    columns = wanted.shape[-1]

    @cache
    def rows(*bounds: tuple[int, int]) -> Quantized:
        """The rows within the bounds, quantized, of a matrix [out, in] or of a stack of them."""
        sizes = tuple(stop - start for start, stop in bounds)
        held = jax.tree.map(lambda part: np.empty((*sizes, *part.shape[len(sizes) :]), part.dtype), wanted)
        step = max(1, _CHUNK // (4 * columns * math.prod(sizes[1:])))
        (start, stop), *others = bounds
        for first in range(start, stop, step):
            some = ((first, min(first + step, stop)), *others, (0, columns))
            made = _quantized(model, parameter, sources, some, wanted, release)
            for whole, part in zip(*map(jax.tree.leaves, (held, made)), strict=True):
                whole[first - start : first - start + len(part)] = part
        return held

    def array(index: int, part: jax.ShapeDtypeStruct) -> jax.Array:
        def read(*bounds: tuple[int, int]) -> np.ndarray:
            columns = bounds[len(wanted.shape) - 1 :]
            return rows(*bounds[: len(wanted.shape) - 1])[index][..., *(slice(*each) for each in columns)]

        return _array(part, read)

    return Quantized(*(part if part is None else array(index, part) for index, part in enumerate(wanted)))


def _quantized(
    model: models.Model,
    parameter: Parameter,
    sources: tuple[StoredTensor, ...],
    bounds: tuple[tuple[int, int], ...],
    wanted: Quantized,
    release: Callable[[StoredTensor, int], None],
) -> Quantized:
    """Some rows of a matrix, quantized; stored groups that are as `wanted` keep their numbers."""
    wide = _read(model, parameter, sources, bounds, np.dtype(np.float32), release)
    group = wanted.group if wanted.values.dtype == jnp.int4 else None
    packed = [each for each in sources if isinstance(each, PackedTensor) and each.has_groups_of(group)]
    if group is None or len(packed) < len(sources):
        return narrow.quantize(wide, wanted, np)
    of_groups = (*bounds[:-1], (0, wanted.scales.shape[-1]))
    steps, zeros = (
        _read(model, parameter, parts, of_groups, np.dtype(np.float32), release, group)
        for parts in zip(*(each.of_groups() for each in packed), strict=True)
    )
    groups = wide.reshape(*steps.shape, group)
    values = narrow.rounded(groups, steps, wanted.values.dtype, np, zeros[..., None]).reshape(wide.shape)
    points = None if wanted.zeros is None else zeros.astype(np.int8)
    return Quantized(values, steps.astype(wanted.scales.dtype), points)


def _array(wanted: jax.ShapeDtypeStruct, read: Callable[..., np.ndarray]) -> jax.Array:
    """Makes a sharded array; `read(*bounds)` reads the values of (start, stop) for each axis."""

    def values(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None
        return read(*(part.indices(size)[:2] for part, size in zip(index, wanted.shape, strict=True)))

    # Blocks, so that host copies of arrays in transfer to an accelerator do not accumulate.
    array = jax.make_array_from_callback(wanted.shape, wanted.format, values, dtype=wanted.dtype)
    return array.block_until_ready()


def _read(
    model: models.Model,
    parameter: Parameter,
    sources: tuple[StoredTensor, ...],
    bounds: tuple[tuple[int, int], ...],
    dtype: np.dtype,
    release: Callable[[StoredTensor, int], None],
    group: int = 1,
) -> np.ndarray:
    """Reads a region of a parameter of `model`, whose padding is zero.

    Args:
      parameter: the parameter without padding.
      group: inputs of the parameter that stand for one entry of the sources.
    """
    name, shape, axes, stored = parameter
    of, sizes = layout(model, name, axes, shape.shape, stored), (*shape.shape[:-1], shape.shape[-1] // group)
    axis, runs = of.in_units(group) if of.axis == len(sizes) - 1 else of
    whole, (first, last) = _empty(tuple(stop - start for start, stop in bounds), dtype), bounds[axis]
    there = [(start, max(start, min(stop, size))) for (start, stop), size in zip(bounds, sizes, strict=True)]
    parts = [(max(run.start, first), min(run.start + run.length, last), run) for run in runs]
    parts = [part for part in parts if part[0] < part[1]]
    filled = sum(stop - start for start, stop, _ in parts)
    if filled < last - first or any(a != axis and each != bounds[a] for a, each in enumerate(there)):
        whole[:] = 0
    for start, stop, run in parts:
        ours, theirs = [slice(stop - start) for start, stop in there], [slice(*each) for each in there]
        ours[axis] = slice(start - first, stop - first)
        theirs[axis] = slice(run.stored + start - run.start, run.stored + stop - run.start)
        share = whole[tuple(ours)]
        if share.size:
            if stored.experts:
                share, theirs = share[0], theirs[1:]
            _copy(share, sources[run.tensor], stored.region(tuple(theirs)), stored.transposed, release)
    return whole


def _empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def _copy(
    target: np.ndarray,
    source: StoredTensor,
    region: Region,
    transposed: bool,
    release: Callable[[StoredTensor, int], None],
) -> None:
    """Copies and casts a region of a stored tensor, some rows at a time, and frees their pages.

    Args:
      transposed: whether the target's last two axes are swapped in the tensor.
    """
    if transposed:
        target = target.swapaxes(-1, -2)
    if transposed and target.ndim == 2:
        step = _TRANSPOSED_ROWS
    else:
        step = max(1, _CHUNK // (target[:1].size * source.dtype.itemsize))
    rows, *others = region
    for first in range(0, len(target), step):
        stride = rows.step or 1
        last = min(rows.start + (first + step) * stride, rows.stop)
        part = source.read((slice(rows.start + first * stride, last, stride), *others))
        target[first : first + step] = part
        release(source, part.size * source.nbytes // math.prod(source.shape))
