"""Matrix products of the compiled programs: our kernels where faster, else XLA's.

With `expert_parts`, the only place that knows about the products in `pallas_kernels`. Models call `DeviceProducts` (see
`products.bind`). The products for GPUs and TPUs are imported where they are used: with the compilers of their kernels,
those for GPUs take a quarter of the time of all imports.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Float, Float8e4m3fn, Float32, Int8, Int32

from jaxserve.models import experts
from jaxserve.models.products import Quantized, dot, widened
from jaxserve.runner import expert_parts
from jaxserve.runner.expert_parts import ExpertParts
from jaxserve.runner.rings import Ring
from jaxserve.runner.weight_parts import WeightParts
from pallas_kernels.cpu import build, product
from pallas_kernels.cpu.product import NativeProduct
from sharding.spec import ShardingSpec

_FEW_ROWS, _MANY_ROWS = 4, 256  # between these row counts `_dot_cpu` puts the kernel first
_RUN_ROWS = 16  # rows of an expert that are multiplied at a time
_INTEGER_ROWS, _TILE = 8, 256  # most rows multiplied as integers; kernel rows widened at a time


def native_product(dtype: np.dtype, attention: str, devices: int) -> NativeProduct | None:
    """The native product of a stage, or None where XLA's is used.

    Args:
      attention: name of the attention backend; "cpu" means that native kernels are wanted.
      devices: of the stage; the compiler cannot divide a native call over several.
    """
    return product.native(dtype) if attention == "cpu" and devices == 1 else None


def product_key(native: NativeProduct | None) -> str | None:
    """Identifies the native product of a program in the program cache."""
    return native and build.level()


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProducts:
    """The matrix products of a program (`products.Products`).

    Attributes:
      native: multiplies in place of XLA, except where it returns None; stands for that of quantized ones too.
      tiles: whether a CPU widens int8 matrices in tiles for many rows; only for matrices on one device.
      device_kind: JAX's name of the device that the program is for; without it, GPUs take XLA's products too.
      mesh / spec / layer: where the kernels of a layer's experts lie; without a mesh, on one device.
      ring: multiplies in place of all others where it pays.
      parts: how a narrow matrix is divided; None on one device, and where the compiler divides products.
    """

    native: NativeProduct | None
    tiles: bool = False
    device_kind: str = ""
    mesh: Mesh | None = None
    spec: ShardingSpec | None = None
    layer: int = 0
    ring: Ring | None = None
    parts: WeightParts | None = None

    def __call__(
        self,
        x: Float[jax.Array, "T in"],
        matrix: Float[jax.Array, "out in"] | Quantized,
        dtype: DTypeLike,
        shape: tuple[int, ...] | None = None,
    ) -> Float32[jax.Array, "T ..."]:
        """Args:
        dtype: of the sums before the cast to float32 on an accelerator, where several devices may add up partial sums.
        shape: of a token's outputs in the result; None for (out,).
        """
        shape = shape or matrix.shape[:1]
        return self._product(x, matrix, dtype, shape).reshape(len(x), *shape)

    def _product(
        self, x: jax.Array, matrix: jax.Array | Quantized, dtype: DTypeLike, shape: tuple[int, ...]
    ) -> jax.Array:
        """The product in this shape, or as float32[T, out]."""
        if self.ring is not None and self.ring.pays(len(x)):
            return self.ring(x, matrix, dtype)
        if isinstance(matrix, Quantized):
            y = None if self.native is None else product.multiply_quantized(x, *matrix)
            return self._quantized(x, matrix, dtype, shape) if y is None else y
        y = None if self.native is None else self.native(x, matrix)
        if y is not None:
            return y
        return _shaped(x, matrix, dtype, shape, cpu=_dot_cpu)

    def experts(
        self,
        activation: experts.Activation,
        x: Float[jax.Array, "T H"],
        chosen: Int32[jax.Array, "T k"],
        weights: Float32[jax.Array, "T k"],
        kernels: experts.Kernels,
    ) -> Float32[jax.Array, "T H"]:
        """Each device computes with its experts, or its parts of them; the shares are added up."""
        compute = partial(experts.compute, activation=activation, product=self.runs)

        def here(kernels: experts.Kernels, first: jax.Array | int, *given: Any) -> jax.Array:
            x, chosen, weights = given
            return compute(x, chosen, weights, kernels, first)

        return self._parts(kernels).added_up(here, kernels, x, chosen, weights)

    def routed_experts(
        self,
        activation: experts.Activation,
        x: Float[jax.Array, "T H"],
        positions: Int32[jax.Array, " T"],
        router: Mapping[str, Any],
        kernels: experts.Kernels,
        *,
        per_token: int,
        add_up: bool,
    ) -> Float32[jax.Array, "T H"] | None:
        parts, up = self._parts(kernels), kernels["up"]
        dtypes = (x.dtype, (up.values if isinstance(up, Quantized) else up).dtype)
        if not expert_parts.are_routed(len(x), per_token, parts.local(up.shape), dtypes, self.device_kind):
            return None
        from pallas_kernels.tpu import grouped, routing

        mixture = partial(
            grouped.mixture,
            per_token=per_token,
            add_up=add_up,
            activation=activation,
            parts=parts.of_each,
            dtype=parts.dtype_of_shares(x.dtype),
            device_kind=self.device_kind,
        )

        def here(kernels: experts.Kernels, first: jax.Array | int, *given: Any) -> jax.Array:
            x, positions, router = given
            first = jnp.reshape(jnp.int32(first), 1)
            stacks = (_stack(kernels, name) for name in ("gate", "up", "down"))
            return mixture(x, positions, routing.Router(**router), first, *stacks)

        return parts.added_up(here, kernels, x, positions, dict(router))

    def _parts(self, kernels: experts.Kernels) -> ExpertParts:
        return expert_parts.of(kernels, self.mesh, self.spec, self.layer)

    def _quantized(self, x: jax.Array, matrix: Quantized, dtype: DTypeLike, shape: tuple[int, ...]) -> jax.Array:
        # The compilers of GPUs and TPUs fuse the widening into the dot: only the narrow matrix is in memory. Those of
        # GPUs do not if there are groups, nor for float8 where a GPU has no instructions for it.
        kernel = self._kernel_gpu(matrix)
        if matrix.group is not None:
            ways = {} if kernel is None else {"cuda": partial(self._by_parts, kernel, dtype=dtype)}
            return jax.lax.platform_dependent(
                x, matrix, cpu=_dot_tiles, **ways, default=partial(_dot_groups, dtype=dtype)
            )
        tiled = matrix.values.dtype != jnp.int8 or (self.tiles and len(x) > _INTEGER_ROWS)
        on_cpu = _dot_tiles if tiled else _dot_integers

        def by_compiler(x: jax.Array, matrix: Quantized) -> jax.Array:
            sums = _shaped(x, matrix.values, dtype, shape, cpu=on_cpu)
            return sums * matrix.scales.astype(jnp.float32).reshape(shape)

        def by_kernel(x: jax.Array, matrix: Quantized) -> jax.Array:
            return self._by_parts(kernel, x, matrix, dtype).reshape(len(x), *shape)

        if kernel is None:
            return by_compiler(x, matrix)
        return jax.lax.platform_dependent(x, matrix, cuda=by_kernel, default=by_compiler)

    def _kernel_gpu(self, matrix: Quantized) -> Callable[[jax.Array, Quantized], jax.Array] | None:
        """The kernel that multiplies by a narrow matrix on a GPU; None where the compiler does that."""
        divided = self.mesh is not None and self.mesh.size > 1 and self.parts is None  # by the compiler
        if divided or not _has_kernels(self.device_kind):
            return None
        from pallas_kernels.gpu import float8, int4

        if matrix.values.dtype == jnp.int4 and matrix.group is not None and int4.serves(matrix.group):
            return partial(_int4_gpu, device_kind=self.device_kind)
        if matrix.values.dtype == jnp.float8_e4m3fn and float8.pays(self.device_kind):
            return partial(_float8_gpu, device_kind=self.device_kind)
        return None

    def _by_parts(self, product: Any, x: jax.Array, matrix: Quantized, dtype: DTypeLike) -> jax.Array:
        return product(x, matrix) if self.parts is None else self.parts(product, x, matrix, dtype)

    def runs(self, x: jax.Array, kernels: Any, sizes: jax.Array) -> jax.Array:
        """Products of runs of rows with a kernel each, on one device (`experts.RunsProduct`)."""
        if self.native is not None and not isinstance(kernels, Quantized):
            return product.multiply_runs(x, kernels, sizes)
        gpu = partial(_runs_gpu, device_kind=self.device_kind)
        ways = {"cpu": _runs_cpu} | ({"cuda": gpu} if _has_kernels(self.device_kind) else {})
        return jax.lax.platform_dependent(x, kernels, sizes, **ways, default=experts.ragged_product)


def _stack(kernels: experts.Kernels, name: str) -> Any:
    """The kernels, scales and biases of a projection, for `grouped`."""
    from pallas_kernels.tpu import grouped

    kernel, bias = kernels[name], kernels.get(f"{name}_bias")
    return grouped.Stack(*kernel[:2], bias) if isinstance(kernel, Quantized) else grouped.Stack(kernel, bias=bias)


def _has_kernels(device_kind: str) -> bool:
    """Whether kernels can be compiled for a device; for others nobody needs Triton."""
    if not device_kind or device_kind == "cpu":
        return False
    from pallas_kernels.gpu.triton_call import capability, missing

    return capability(device_kind) is not None and missing() is None


def _runs_cpu(x: jax.Array, kernels: jax.Array | Quantized, sizes: jax.Array) -> jax.Array:
    """Multiplies tiles of a run's rows, so that experts without rows are not read.

    XLA's CPU compiler would multiply every row by every kernel.
    """
    values = kernels.values if isinstance(kernels, Quantized) else kernels
    rows, tile = len(x), min(_RUN_ROWS, len(x))
    ends, tiles = jnp.cumsum(sizes), -(-sizes // tile)
    last_tiles = jnp.cumsum(tiles)

    def step(i: jax.Array, y: jax.Array) -> jax.Array:
        group = jnp.sum(last_tiles <= i)
        start = ends[group] - sizes[group] + (i - last_tiles[group] + tiles[group]) * tile
        origin = jnp.minimum(start, rows - tile)
        kernel = jax.lax.dynamic_index_in_dim(values, group, keepdims=False).astype(x.dtype)
        new = _dot_cpu(jax.lax.dynamic_slice_in_dim(x, origin, tile), kernel)
        at = origin + jnp.arange(tile)
        old = jax.lax.dynamic_slice_in_dim(y, origin, tile)
        new = jnp.where(((at >= start) & (at < ends[group]))[:, None], new, old)
        return jax.lax.dynamic_update_slice_in_dim(y, new, origin, 0)

    # XLA's CPU compiler would fill the first values of all layers' loops at the start of a program if they were
    # constants, and hold them until their loops: these are zeros that depend on the sizes, which are not negative.
    zeros = jnp.broadcast_to((sizes[0] >> 31).astype(jnp.float32), (rows, values.shape[1]))
    y = jax.lax.fori_loop(0, last_tiles[-1], step, zeros)
    return experts.scaled(y, kernels, sizes)


def _runs_gpu(
    x: jax.Array, kernels: jax.Array | Quantized, sizes: jax.Array, *, device_kind: str, interpret: bool = False
) -> jax.Array:
    """Multiplies tiles of a run's rows; int8 kernels are widened in registers.

    XLA's compiler for GPUs would multiply every row by every kernel, and transpose all kernels in memory.
    """
    from pallas_kernels.gpu import grouped

    values = kernels.values if isinstance(kernels, Quantized) else kernels
    y = grouped.multiply_runs(x, values, sizes, device_kind=device_kind, interpret=interpret)
    return experts.scaled(y, kernels, sizes)


def _int4_gpu(x: jax.Array, matrix: Quantized, *, device_kind: str) -> jax.Array:
    from pallas_kernels.gpu import int4

    return int4.multiply(x, *matrix, device_kind=device_kind)


def _float8_gpu(x: jax.Array, matrix: Quantized, *, device_kind: str) -> jax.Array:
    from pallas_kernels.gpu import float8

    return float8.multiply(x, matrix.values, device_kind=device_kind) * matrix.scales.astype(jnp.float32)


def _dot_groups(x: jax.Array, matrix: Quantized, dtype: DTypeLike) -> jax.Array:
    """Multiplies by values and zero points apart.

    With both in one dot, TPUs would hold the wide matrix in memory.
    """
    y = _dot_wide(x, widened(matrix._replace(zeros=None), x.dtype), dtype)
    if matrix.zeros is None:
        return y
    sums = x.astype(jnp.float32).reshape(len(x), -1, matrix.group).sum(2)
    points = matrix.zeros.astype(jnp.float32) * matrix.scales.astype(jnp.float32)
    return y - _dot_wide(sums, points, dtype)


def _shaped(
    x: jax.Array, kernel: jax.Array, dtype: DTypeLike, shape: tuple[int, ...], *, cpu: Callable[..., jax.Array]
) -> jax.Array:
    """x times a kernel [out, in] -> float32[T, *shape]; accelerators make it in this shape.

    Args:
      cpu: gives the product [T, out] on CPUs.
    """

    def default(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return _dot_wide(x, kernel.reshape(*shape, -1).astype(x.dtype), dtype)

    def on_cpu(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return cpu(x, kernel).reshape(len(x), *shape)

    return jax.lax.platform_dependent(x, kernel, cpu=on_cpu, default=default)


def _dot_wide(x: jax.Array, kernel: jax.Array, dtype: DTypeLike) -> jax.Array:
    return dot(x, kernel, dtype).astype(jnp.float32)


def _dot_cpu(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Multiplies with the operand order fastest in XLA's CPU matmul (measured in jax 0.10.2).

    From a few to about 200 rows this is kernel times x: half the time of the reverse at 8 rows in float32, five sixths
    at 32 in bfloat16. XLA would swap the operands to remove the transpose, hence the barrier. For more rows it is
    still faster by a few percent if the result is no wider than x. One bfloat16 row is padded to two, since one is 16
    times slower. Sums are float32, since bfloat16 sums are 3 to 7 times slower. Either order takes two thirds of the
    time of a kernel [in, out] at 8 rows, and about the same at 256.
    """
    rows, (out_features, in_features) = x.shape[0], kernel.shape
    few = 1 if x.dtype == jnp.float32 else _FEW_ROWS
    if few <= rows < _MANY_ROWS or (rows >= _MANY_ROWS and out_features <= in_features):
        return jax.lax.optimization_barrier(dot(kernel, x, jnp.float32)).T
    if rows == 1:
        return dot(jnp.pad(x, ((0, 1), (0, 0))), kernel, jnp.float32)[:1]
    return dot(x, kernel, jnp.float32)


def _dot_tiles(
    x: jax.Array, kernel: Int8[jax.Array, "out in"] | Float8e4m3fn[jax.Array, "out in"] | Quantized
) -> jax.Array:
    """Widens a kernel one tile at a time, so that the wide tile stays in the CPU's cache.

    XLA's CPU compiler would write the whole wide kernel to memory first, ten times slower than reading float32.
    """
    outputs = kernel.shape[0]
    tile = min(_TILE, outputs)

    def step(i: jax.Array, sums: jax.Array) -> jax.Array:  # slices are clamped: tiles may overlap
        part = jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, i * tile, tile), kernel)
        wide = widened(part, x.dtype) if isinstance(part, Quantized) else part.astype(x.dtype)
        return jax.lax.dynamic_update_slice_in_dim(sums, _dot_cpu(x, wide), i * tile, 1)

    return jax.lax.fori_loop(0, -(-outputs // tile), step, jnp.zeros((len(x), outputs), jnp.float32))


def _dot_integers(x: jax.Array, kernel: Int8[jax.Array, "out in"]) -> jax.Array:
    """Multiplies as integers: a row of x is the sum of two int8 rows (15 bits), summed exactly.

    The kernel is read in place. One row takes half the time of a bfloat16 kernel, 8 rows the same, more are slower.
    """
    wide = x.astype(jnp.float32)
    step = jnp.max(jnp.abs(wide), axis=1, keepdims=True) / 127
    step = jnp.where(step == 0, 1, step)  # a row that is not finite gives NaN
    high = jnp.round(wide / step)
    low = jnp.round((wide - high * step) * (254 / step))
    rows = jnp.concatenate([high, low]).astype(jnp.int8)
    sums = jax.lax.dot_general(rows, kernel, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32)
    high_sums, low_sums = jnp.split(sums.astype(jnp.float32), 2)
    return (high_sums + low_sums / 254) * step
