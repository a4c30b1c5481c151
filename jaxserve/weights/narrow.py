"""Quantizes weights to int8, float8 or int4.

int8 and float8 have a scale per row, int4 has one per group of inputs. Only weights are quantized, activations are not
(for int8: LLM.int8(), arXiv:2208.07339, section 2.1). The scale of a group in int4 makes its largest entry -8, the end
of the range (as in llama.cpp's Q4_0).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache, partial
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format
from jax.typing import DTypeLike

from jaxserve.models.products import Quantized
from jaxserve.models.schema import NarrowFormat

GROUP = 32  # inputs that share a scale in int4, unless a checkpoint has groups of its own
_MOST = {"int8": 127, "float8_e4m3fn": 448}  # the number that the largest entry of a row becomes


BY_ROW = NarrowFormat(dtype="int8")
_FORMATS = {
    "int8": BY_ROW,
    "int4": NarrowFormat(dtype="int4", group=GROUP),
    "float8": NarrowFormat(dtype="float8_e4m3fn"),
}


def format_of(name: str, quantize: str | None, stored: NarrowFormat | None = None) -> NarrowFormat | None:
    """The format of a parameter of this name; None if it is not quantized.

    Matrices that multiply hidden states are quantized, and the token table, which may be half of a small model. Norms,
    biases and learned positions are not, nor are routers, whose choices depend on small differences. Token tables,
    heads and the kernels of experts are always int8: tables are read by rows, and experts' scales are applied to sums.

    Args:
      quantize: `EngineConfig.quantize`.
      stored: the format in the checkpoint, which is kept where it is of the same dtype.
    """
    is_kernel = name.endswith("kernel") and not name.endswith("router.kernel")
    if quantize is None or not (is_kernel or name.endswith("tokens.table")):
        return None
    if not is_kernel or ".experts." in name:
        return BY_ROW
    form = _FORMATS[quantize]
    return stored if stored is not None and stored.dtype == form.dtype else form


def shapes_of(form: NarrowFormat, shape: tuple[int, ...], dtype: DTypeLike, name: str) -> Quantized:
    """The parts of a matrix of this shape.

    Kernels with a scale per row have float32 scales: they multiply float32 sums, as norms and biases do
    (`Model.shapes`). Tables have scales of the dtype that they are read in, and groups of the dtype that they are
    widened to.

    Args:
      dtype: that the model computes in.

    Raises:
      ValueError: groups do not divide the inputs.
    """
    values, parts = jax.ShapeDtypeStruct(shape, form.dtype), shape[:-1]
    if form.group is None:
        dtype = np.promote_types(dtype, np.float32) if name.endswith("kernel") else dtype
        return Quantized(values, jax.ShapeDtypeStruct(parts, dtype))
    group = form.group if form.group > 0 else shape[-1]
    if shape[-1] % group:
        raise ValueError(
            f"{name} has {shape[-1]} inputs, which are not whole groups of {group} ({form.dtype}); "
            "--quantize int8 has no groups"
        )
    parts = (*parts, shape[-1] // group)
    zeros = jax.ShapeDtypeStruct(parts, jnp.int8) if form.zeros else None
    return Quantized(values, jax.ShapeDtypeStruct(parts, dtype), zeros)


def quantize(matrix: np.ndarray | jax.Array, like: Quantized, numpy: ModuleType = jnp) -> Quantized:
    """Quantizes a matrix [out, in], or a stack of them, row by row or group by group.

    Values are rounded with the scales in their own dtype. A row or group with an entry that is not finite becomes NaN.

    Args:
      like: the dtypes and groups of the result.
      numpy: `numpy` or `jax.numpy`.
    """
    wide, dtype = matrix.astype(np.float32), np.dtype(like.values.dtype)
    if like.group is not None:
        wide = wide.reshape(*wide.shape[:-1], -1, like.group)
    if dtype.name == "int4":
        low, high = wide.min(axis=-1), wide.max(axis=-1)
        scales = numpy.where(high > -low, high, low) * np.float32(-1 / 8)
    else:
        scales = numpy.abs(wide).max(axis=-1) * np.float32(1 / _MOST[dtype.name])
    scales = scales.astype(like.scales.dtype)
    steps = scales.astype(np.float32)
    values = rounded(wide, steps, dtype, numpy).reshape(matrix.shape)
    return Quantized(values, scales, None if like.zeros is None else numpy.zeros(scales.shape, np.int8))


def rounded(wide: Any, steps: Any, dtype: np.dtype, numpy: ModuleType, zeros: Any = 0) -> Any:
    """Groups [..., group] in units of steps [...], rounded to the nearest number of `dtype`."""
    values = numpy.nan_to_num(wide / numpy.where(steps != 0, steps, 1)[..., None])
    if dtype.kind != "i" and dtype.name != "int4":
        return numpy.clip(values, -_MOST[dtype.name], _MOST[dtype.name]).astype(dtype)
    low, high = (-8, 7) if dtype.name == "int4" else (-127, 127)
    return numpy.clip(numpy.round(values) + zeros, low, high).astype(dtype)


def nbytes(leaf: Any, shape: Sequence[int] | None = None) -> int:
    """Bytes of an array, or of a part of this shape, on a device; int4 has two numbers a byte."""
    size = math.prod(leaf.shape if shape is None else shape)
    return -(-size // 2) if leaf.dtype == jnp.int4 else size * leaf.dtype.itemsize


def on_devices(matrix: jax.Array, wanted: Quantized) -> Quantized:
    """Quantizes a matrix on its devices; the result has the shardings and layouts of `wanted`."""
    leaves, structure = jax.tree.flatten(wanted)
    forms = tuple((leaf.shape, leaf.dtype, leaf.format) for leaf in leaves)
    return _quantize_into(structure, forms)(matrix)


@cache
def _quantize_into(structure: Any, forms: tuple[tuple[tuple[int, ...], np.dtype, Format], ...]):
    like = structure.unflatten(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype, _ in forms)
    places = structure.unflatten(place for _, _, place in forms)
    return jax.jit(partial(quantize, like=like), out_shardings=places)


def is_matrix(node: Any) -> bool:
    """Whether a node of a parameter tree is a quantized matrix."""
    return isinstance(node, Quantized)
