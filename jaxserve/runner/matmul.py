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
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Float, Float32, Int32

from jaxserve.models import experts
from jaxserve.models.products import Quantized, dot, precision_for, widened
from jaxserve.runner import cpu_products, expert_parts
from jaxserve.runner.expert_parts import ExpertParts
from jaxserve.runner.rings import Ring
from jaxserve.runner.weight_parts import WeightParts
from pallas_kernels.cpu import build, product
from pallas_kernels.cpu.product import NativeProduct
from sharding.spec import ShardingSpec


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
      ring: multiplies where it pays, except by weights that only our kernels widen in registers.
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
        has_kernel = isinstance(matrix, Quantized) and self._kernel_gpu(matrix) is not None
        if self.ring is not None and not has_kernel and self.ring.pays(len(x)):
            return self.ring(x, matrix, dtype)
        if isinstance(matrix, Quantized):
            y = None if self.native is None else product.multiply_quantized(x, *matrix)
            return self._quantized(x, matrix, dtype, shape) if y is None else y
        y = None if self.native is None else self.native(x, matrix)
        if y is not None:
            return y
        return _shaped(x, matrix, dtype, shape, cpu=cpu_products.multiply)

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
            if not self._is_divided:
                by_ones = partial(_dot_groups, dtype=dtype, widen=_widened_by_ones)
                ways["tpu"] = partial(self._by_parts, by_ones, dtype=dtype)
            return jax.lax.platform_dependent(
                x, matrix, cpu=cpu_products.multiply_tiles, **ways, default=partial(_dot_groups, dtype=dtype)
            )
        tiled = matrix.values.dtype != jnp.int8 or (self.tiles and len(x) > cpu_products.INTEGER_ROWS)
        on_cpu = cpu_products.multiply_tiles if tiled else cpu_products.multiply_integers

        def by_compiler(x: jax.Array, matrix: Quantized) -> jax.Array:
            sums = _shaped(x, matrix.values, dtype, shape, cpu=on_cpu)
            return sums * matrix.scales.astype(jnp.float32).reshape(shape)

        if kernel is None:
            return by_compiler(x, matrix)

        def by_kernel(x: jax.Array, matrix: Quantized) -> jax.Array:
            return self._by_parts(kernel, x, matrix, dtype).reshape(len(x), *shape)

        return jax.lax.platform_dependent(x, matrix, cuda=by_kernel, default=by_compiler)

    @property
    def _is_divided(self) -> bool:
        """Whether compilers divide products over several devices."""
        return self.mesh is not None and self.mesh.size > 1 and self.parts is None

    def _kernel_gpu(self, matrix: Quantized) -> Callable[[jax.Array, Quantized], jax.Array] | None:
        """The kernel that multiplies by a narrow matrix on a GPU; None where the compiler does that."""
        if self._is_divided or not _has_kernels(self.device_kind):
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
        ways = {"cpu": cpu_products.multiply_runs} | ({"cuda": gpu} if _has_kernels(self.device_kind) else {})
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


def _dot_groups(
    x: jax.Array,
    matrix: Quantized,
    dtype: DTypeLike,
    widen: Callable[[Quantized, DTypeLike], jax.Array] = widened,
) -> jax.Array:
    """Multiplies by values and zero points apart.

    With both in one dot, TPUs would hold the wide matrix in memory.
    """
    y = _dot_wide(x, widen(matrix._replace(zeros=None), x.dtype), dtype)
    if matrix.zeros is None:
        return y
    sums = x.astype(jnp.float32).reshape(len(x), -1, matrix.group).sum(2)
    points = matrix.zeros.astype(jnp.float32) * matrix.scales.astype(jnp.float32)
    return y - _dot_wide(sums, points, dtype)


def _widened_by_ones(matrix: Quantized, dtype: DTypeLike) -> jax.Array:
    """The same as `widened` without zero points, by a product of the scales with ones.

    It spreads them over their groups. TPUs fuse that into the product that reads the matrix, if its order is the one in
    memory. What is broadcast along lanes they would write to memory, as wide as the matrix. Each sum has one term that
    is not zero, so it is exact.
    """
    assert matrix.group is not None
    ones = jnp.repeat(jnp.eye(matrix.scales.shape[-1], dtype=dtype), matrix.group, axis=1)
    spread = jnp.dot(matrix.scales.astype(dtype), ones, precision=precision_for(dtype))
    return with_layout_constraint(matrix.values.astype(dtype) * spread, Layout((0, 1)))


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
