"""Triton's interpreter as a call of JAX programs on CPUs, for tests.

The environment variable TRITON_INTERPRET must be 1 before Triton is imported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np


def call(
    kernel: Any,
    grid: tuple[int, ...],
    inputs: Mapping[str, jax.Array],
    changed: Mapping[str, jax.Array],
    new: Mapping[str, jax.ShapeDtypeStruct],
    constants: Mapping[str, Any],
) -> list[jax.Array]:
    """The arrays of `new`, and those of `changed` as a kernel leaves them; arguments by name."""

    def run(inputs: Mapping[str, np.ndarray], changed: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        made = {name: np.zeros(x.shape, x.dtype) for name, x in new.items()}
        kept = {name: np.array(x) for name, x in changed.items()}
        given = {name: np.asarray(x) for name, x in inputs.items()}
        pointers = {name: _Pointer(x) for name, x in (given | kept | made).items()}
        kernel[grid](**pointers, **constants)
        return [*made.values(), *kept.values()]

    results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (*new.values(), *changed.values())]
    return jax.pure_callback(run, results, dict(inputs), dict(changed))


class _Pointer:
    """An array as the interpreter takes it: with what it asks of a PyTorch tensor."""

    _TYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "int8": "i8", "uint8": "u8", "int32": "i32"}

    def __init__(self, array: np.ndarray) -> None:
        self.array, self.dtype = array, self._TYPES[array.dtype.name]

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
