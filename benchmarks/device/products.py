"""Times the products of quantized matrices and of experts on this device, each beside XLA's.

Each product is checked against NumPy before it is timed. Several matrices take turns, more bytes than a cache holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.device import kernels
from benchmarks.device.records import Case
from jaxserve.models import experts, products
from jaxserve.models.products import Quantized
from jaxserve.runner.matmul import DeviceProducts
from pallas_kernels import oracle

_BYTES_AT_ONCE = 2**28  # of all matrices of a timed call
_FEWEST, _MOST = 2, 32  # matrices of a timed call
TOLERANCE = 0.03  # of results of about one, with operands or results rounded to bfloat16

Multiply = Callable[..., jax.Array]  # of x, a matrix and more


@dataclass(frozen=True, slots=True, kw_only=True)
class Int4Case:
    """Bfloat16 rows times an int4 matrix [outputs, inputs] with a scale for each group of inputs."""

    rows: int
    outputs: int
    inputs: int
    group: int
    zeros: bool = False

    @property
    def name(self) -> str:
        zeros = " with zero points" if self.zeros else ""
        return f"int4 product, {self.rows} rows by {self.outputs} x {self.inputs}, groups of {self.group}{zeros}"

    @property
    def matrix_bytes(self) -> int:
        groups = self.outputs * self.inputs // self.group
        return self.outputs * self.inputs // 2 + groups * (3 if self.zeros else 2)

    def matrix(self, key: jax.Array) -> Quantized:
        """A random matrix that keeps the size of what it multiplies."""
        of_values, of_scales, of_zeros = jax.random.split(key, 3)
        counts = self.outputs, self.inputs // self.group
        values = jax.random.randint(of_values, (self.outputs, self.inputs), -8, 8, jnp.int8).astype(jnp.int4)
        scales = jax.random.uniform(of_scales, counts, minval=0.1, maxval=0.3) * self.inputs**-0.5
        zeros = jax.random.randint(of_zeros, counts, -8, 8, jnp.int8) if self.zeros else None
        return Quantized(values, scales.astype(jnp.bfloat16), zeros)

    def more(self) -> tuple[Any, ...]:
        return ()

    def multiply(self, x: jax.Array, matrix: Quantized) -> jax.Array:
        """As programs on this device do."""
        return here()(x, matrix, jnp.bfloat16)

    def multiply_xla(self, x: jax.Array, matrix: Quantized) -> jax.Array:
        """By the matrix in bfloat16, which XLA widens."""
        return products.project(x, matrix)

    def difference(self, y: np.ndarray, x: np.ndarray, matrix: Quantized) -> float:
        """The largest difference from the product in float64."""
        values = np.asarray(matrix.values.astype(jnp.int8), np.float64)
        groups = values.reshape(self.outputs, -1, self.group)
        if matrix.zeros is not None:
            groups = groups - np.asarray(matrix.zeros, np.float64)[..., None]
        wide = (groups * np.asarray(matrix.scales, np.float64)[..., None]).reshape(values.shape)
        return largest(x @ wide.T - y)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsCase:
    """Bfloat16 rows, each times the kernel [outputs, inputs] of its expert."""

    rows: int
    experts: int
    outputs: int
    inputs: int
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        return f"expert products, {self.rows} rows by {self.experts} of {self.outputs} x {self.inputs}, {self.dtype}"

    @property
    def sizes(self) -> np.ndarray:
        """Rows of each expert, int32[experts], as a router that has no favourites chooses."""
        shares = np.full(self.experts, 1 / self.experts)
        return np.random.default_rng(0).multinomial(self.rows, shares).astype(np.int32)

    @property
    def matrix_bytes(self) -> int:
        """Of the kernels of experts with rows; the others need not be read."""
        scale = 2 if self.dtype == "int8" else 0
        kernel = self.outputs * (self.inputs * jnp.dtype(self.dtype).itemsize + scale)
        return int(np.count_nonzero(self.sizes)) * kernel

    def matrix(self, key: jax.Array) -> jax.Array | Quantized:
        """Random kernels that keep the size of what they multiply."""
        dims = self.experts, self.outputs, self.inputs
        if self.dtype != "int8":
            return (jax.random.normal(key, dims, jnp.bfloat16) * self.inputs**-0.5).astype(self.dtype)
        of_values, of_scales = jax.random.split(key)
        scales = jax.random.uniform(of_scales, dims[:2], minval=0.01, maxval=0.02) * self.inputs**-0.5
        return Quantized(jax.random.randint(of_values, dims, -127, 128, jnp.int8), scales.astype(jnp.bfloat16))

    def more(self) -> tuple[Any, ...]:
        return (jnp.asarray(self.sizes),)

    def multiply(self, x: jax.Array, matrix: jax.Array | Quantized, sizes: jax.Array) -> jax.Array:
        """As programs on this device do."""
        return here().runs(x, matrix, sizes)

    def multiply_xla(self, x: jax.Array, matrix: jax.Array | Quantized, sizes: jax.Array) -> jax.Array:
        """By XLA's ragged dot."""
        return experts.ragged_product(x, matrix, sizes)

    def difference(self, y: np.ndarray, x: np.ndarray, matrix: jax.Array | Quantized) -> float:
        """The largest difference from the product in float64, of the first, the last and the largest expert."""
        sizes, ends = self.sizes, np.cumsum(self.sizes)
        some = np.flatnonzero(sizes)
        worst = 0.0
        for expert in {int(some[0]), int(some[-1]), int(sizes.argmax())}:
            kernel = jax.tree.map(lambda leaf, expert=expert: np.asarray(leaf[expert], np.float64), matrix)
            if isinstance(kernel, Quantized):
                kernel = kernel.values * kernel.scales[:, None]
            rows = slice(ends[expert] - sizes[expert], ends[expert])
            right = oracle.runs_product(x[rows], kernel[None], sizes[[expert]])
            worst = max(worst, largest(right - y[rows]))
        return worst


ProductCase = Int4Case | ExpertsCase

CASES: list[ProductCase] = [
    Int4Case(rows=8, outputs=11008, inputs=4096, group=32),  # of Llama-2-7B
    Int4Case(rows=32, outputs=4096, inputs=4096, group=128),
    Int4Case(rows=256, outputs=4096, inputs=11008, group=128, zeros=True),
    ExpertsCase(rows=512, experts=128, outputs=192, inputs=2048),  # of Qwen3-30B-A3B over four devices
    ExpertsCase(rows=512, experts=128, outputs=192, inputs=2048, dtype="int8"),
    ExpertsCase(rows=4096, experts=8, outputs=3584, inputs=4096),  # of Mixtral-8x7B over four devices
]
SMALL_CASES: list[ProductCase] = [
    Int4Case(rows=3, outputs=64, inputs=128, group=32),
    Int4Case(rows=3, outputs=64, inputs=128, group=64, zeros=True),
    ExpertsCase(rows=16, experts=4, outputs=32, inputs=64),
    ExpertsCase(rows=16, experts=4, outputs=32, inputs=64, dtype="int8"),
]


def here() -> DeviceProducts:
    """The products of programs on this device."""
    return DeviceProducts(native=None, device_kind=jax.devices()[0].device_kind)


def largest(difference: np.ndarray) -> float:
    """The largest absolute number; infinite if one is no number."""
    return float(np.nan_to_num(np.abs(difference), nan=math.inf).max())


def nbytes(case: ProductCase) -> int:
    """Bytes that must be read and written: the matrix, bfloat16 rows and float32 results."""
    return case.matrix_bytes + case.rows * (2 * case.inputs + 4 * case.outputs)


def flops(case: ProductCase) -> int:
    """Operations of the product."""
    return 2 * case.rows * case.outputs * case.inputs


def operands(case: ProductCase) -> tuple[Any, ...]:
    """Random operands of a timed call: rows, several matrices, and what else a product takes."""
    count = min(max(-(-_BYTES_AT_ONCE // case.matrix_bytes), _FEWEST), _MOST)
    make = jax.jit(case.matrix)
    x = jax.random.normal(jax.random.key(_MOST), (case.rows, case.inputs), jnp.bfloat16)
    return x, [make(jax.random.key(i)) for i in range(count)], *case.more()


def in_turn(multiply: Multiply) -> Multiply:
    """Multiplies by each of several matrices, one after another."""

    def run(x: jax.Array, matrices: list[Any], *more: jax.Array) -> list[jax.Array]:
        found = []
        for matrix in matrices:
            y = multiply(x, matrix, *more)
            x, y = jax.lax.optimization_barrier((x, y))  # or XLA might merge products of the same rows
            found.append(y)
        return found

    return jax.jit(run)


def checked(case: ProductCase, multiply: Multiply, x: jax.Array, matrix: Any, *more: jax.Array) -> float:
    """The largest difference from NumPy; ValueError if it is more than rounding."""
    y = np.asarray(jax.jit(multiply)(x, matrix, *more), np.float64)
    off = case.difference(y, np.asarray(x, np.float64), matrix)
    if off > TOLERANCE:
        raise ValueError(f"{case.name}: differs from NumPy by {off:.3g}; nothing was timed")
    return off


def measure(case: ProductCase) -> dict[str, Any]:
    """Checks a product against NumPy, then times it and XLA's.

    Raises:
      ValueError: it differs by more than the rounding of its dtypes.
    """
    x, matrices, *more = operands(case)
    found = {
        "backend": "xla" if (platform := jax.default_backend()) == "tpu" else platform,
        "difference": checked(case, case.multiply, x, matrices[0], *more),
        "nbytes": nbytes(case),
        "flops": flops(case),
    }
    for name, multiply in (("ms", case.multiply), ("xla_ms", case.multiply_xla)):
        run = in_turn(multiply)
        found[name] = 1e3 * kernels.seconds(partial(run, x, matrices, *more), 4) / len(matrices)
    return found


def cases(job: str, *, small: bool) -> Iterator[Case]:
    """Every product."""
    for case in SMALL_CASES if small else CASES:
        yield case.name, partial(measure, case)
