"""Triton's interpreter as a call of JAX programs on CPUs, for tests.

The environment variable TRITON_INTERPRET must be 1 before Triton is imported.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np


def call(
    kernel: Any,
    grid: tuple[int, ...],
    inputs: dict[str, jax.Array],
    changed: dict[str, jax.Array],
    new: dict[str, jax.ShapeDtypeStruct],
    constants: dict[str, Any],
) -> list[jax.Array]:
    """The arrays of `new`, then those of `changed` as a kernel leaves them; all by name."""
    given = inputs | changed

    def run(*arrays: Any) -> list[np.ndarray]:
        held = {name: np.asarray(x) for name, x in zip(given, arrays, strict=True)}
        kept = {name: held[name].copy() for name in changed}
        made = {name: _arbitrary(x.shape, x.dtype) for name, x in new.items()}
        pointers = {name: _Pointer(x) for name, x in (held | kept | made).items()}
        kernel[grid](**pointers, **constants)
        return [*made.values(), *kept.values()]

    results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (*new.values(), *changed.values())]
    return jax.pure_callback(run, results, *given.values())


def _arbitrary(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """A new array of NaN, or of zeros for integers: what a kernel leaves out is found."""
    return np.zeros(shape, dtype) if np.dtype(dtype).kind in "iu" else np.full(shape, np.nan, dtype)


class _Pointer:
    """An array as the interpreter takes it: with what it asks of a PyTorch tensor."""

    def __init__(self, array: np.ndarray) -> None:
        self.array, self.dtype = array, array.dtype.name

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def untyped_storage(self) -> _Pointer:
        return self

    def cpu(self) -> _Pointer:
        return self

    def new_empty(self, *_: Any, **__: Any) -> _Pointer:
        return self

    def set_(self, *_: Any) -> None:
        """It has its memory."""

    def copy_(self, _: Any) -> None:
        """The interpreter writes to the array itself."""

    def storage_offset(self) -> int:
        return 0

    def size(self) -> tuple[int, ...]:
        return self.array.shape

    def stride(self) -> tuple[int, ...]:
        return self.array.strides
