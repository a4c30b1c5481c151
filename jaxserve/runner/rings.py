"""Collective matmul: devices exchange parts of a product while they multiply others.

A spec may split the hidden states between layers over the same mesh axes as the layers' matrices. The product is then
computed in as many steps as there are devices. In each step a device multiplies one part, while the next part of the
hidden states arrives or the previous partial sum is sent (Wang et al., "Overlap Communication with Dependent
Computation via Decomposition in Large Deep Learning Models", ASPLOS 2023). The platform decides what is split:

* TPUs and CPUs split the columns ("embed"). Each element of a matrix is then read once, so this pays for few tokens
  too. Parts travel around a ring, half of them in each direction.
* GPUs split the tokens, because XLA's compiler for GPUs would copy the columns of a matrix before it multiplies by
  them. Every part is sent straight to its destination, because all GPUs of a machine are connected. Each step reads
  the whole matrix, so a device needs a few hundred tokens for a step to be bound by compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Float, Float32, Int32

from jaxserve.models.products import BoundWeight, Quantized, dot
from jaxserve.runner import kv_cache
from sharding import mesh as meshes
from sharding.spec import ShardingSpec, Target, partition

# The axis of the hidden states that is split on each platform; "embed" on all others.
SPLIT: dict[str, Literal["embed", "tokens"]] = {"gpu": "tokens"}

FEWEST_TOKENS = 256  # per device, where tokens are split: about the FLOPs of an H100 or H200 per byte that it reads


def ring_axes(mesh: Mesh, spec: ShardingSpec, platform: str) -> tuple[str, ...]:
    """The mesh axes whose devices exchange parts of hidden states, or none."""
    by = SPLIT.get(platform, "embed")
    split = {axis: kv_cache.over(mesh, target) for axis, target in spec.activations.items()}
    return () if spec.gather or (by == "tokens" and split.get("embed")) else split.get(by, ())


def split_axis(held: Sequence[Target], mesh: Mesh, over: tuple[str, ...]) -> int | None:
    """The one axis of a matrix that is split, if it is over a ring's mesh axes; else None.

    Args:
      held: the mesh axes that each axis of the matrix is split over.
    """
    split = [kv_cache.over(mesh, target) for target in (*held, None, None)[:2]]
    return split.index(over) if over and sorted(split) == [(), over] else None


def around(layers: Any, held: Any, mesh: Mesh, spec: ShardingSpec, platform: str) -> Any:
    """The layers' bound weights, with a `Ring` for each matrix that is split over its axes.

    Args:
      held: the same tree, with the shapes and shardings of the weights.
    """
    over = ring_axes(mesh, spec, platform)
    if not over:
        return layers
    hidden = partition(spec.activations.get("tokens"), spec.activations.get("embed"))
    by = SPLIT.get(platform, "embed")
    order = meshes.ring(mesh, over)

    def of(weight: Any, described: Any) -> Any:
        if not isinstance(weight, BoundWeight) or len(weight.shape) != 2:
            return weight
        if isinstance(described, Quantized):
            if described.group is not None:
                return weight
            described = described.values
        split = split_axis(described.sharding.spec, mesh, over)
        if split is None:
            return weight
        ring = Ring(mesh=mesh, over=over, order=order, hidden=hidden, by=by, split=split)
        return BoundWeight(weight.matrix, replace(weight.matmul, ring=ring))  # type: ignore[type-var]

    return jax.tree.map(of, layers, held)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """The product of x and a matrix [out, in] that is split over the devices of a ring.

    Attributes:
      over: mesh axes of the ring.
      order: the devices along these axes, in the order of the ring.
      hidden: how the hidden states between the layers are split.
      by: the axis of the hidden states that the ring's devices exchange parts of.
      split: the axis of the matrix that is split. If it is the outputs (0), the parts of x are gathered; if it is the
        inputs (1), the partial sums are scattered.
    """

    mesh: Mesh
    over: tuple[str, ...]
    order: tuple[int, ...]
    hidden: PartitionSpec
    by: Literal["embed", "tokens"]
    split: int

    def pays(self, tokens: int) -> bool:
        """Whether a product of this many tokens is computed by the ring."""
        return self.by == "embed" or tokens >= FEWEST_TOKENS * len(self.order)

    def __call__(
        self, x: Float[jax.Array, "T in"], matrix: Float[jax.Array, "out in"] | Quantized, dtype: DTypeLike
    ) -> Float32[jax.Array, "T out"]:
        """Args:
        dtype: of the partial sums that are sent.
        """
        values = matrix.values if isinstance(matrix, Quantized) else matrix
        within = partition(None if self.by == "tokens" else self.hidden[0], self.over)
        given, made = ((self.hidden, within), (within, self.hidden))[self.split]
        held = partition(*((self.over, None), (None, self.over))[self.split])

        def here(x: jax.Array, values: jax.Array) -> jax.Array:
            if self.by == "tokens":
                return (self._scattered_tokens if self.split else self._gathered_tokens)(x, values, dtype)
            return self._scattered(x, values, dtype) if self.split else self._gathered(x, values)

        y = jax.shard_map(here, mesh=self.mesh, in_specs=(given, held), out_specs=made, check_vma=False)(x, values)
        return y * matrix.scales.astype(jnp.float32) if isinstance(matrix, Quantized) else y

    def _gathered(self, x: jax.Array, matrix: jax.Array) -> jax.Array:
        """x [T, in / n] of each device times matrix [out / n, in] -> float32[T, out / n]."""
        width, y, forth, back = x.shape[1], None, x, x

        def add(y: jax.Array | None, part: jax.Array, ahead: int) -> jax.Array:
            columns = jax.lax.dynamic_slice_in_dim(matrix, self._place(ahead) * width, width, 1).astype(x.dtype)
            product = dot(part, columns, jnp.float32)
            # Without the barrier, TPUs keep the products of all steps in memory and add them up at the end.
            return product if y is None else jax.lax.optimization_barrier(y + product)

        y = add(None, x, 0)
        for step in range(1, self._steps(1) + 1):
            forth = self._sent(forth, 1)
            y = add(y, forth, -step)
            if step <= self._steps(-1):
                back = self._sent(back, -1)
                y = add(y, back, step)
        return y

    def _scattered(self, x: jax.Array, matrix: jax.Array, dtype: DTypeLike) -> jax.Array:
        """x [T, in / n] times matrix [out, in / n], added up over devices -> float32[T, out / n]."""
        height = matrix.shape[0] // len(self.order)

        def product(ahead: int) -> jax.Array:
            rows = jax.lax.dynamic_slice_in_dim(matrix, self._place(ahead) * height, height, 0).astype(x.dtype)
            return dot(x, rows, jnp.float32)

        total = product(0)
        for way in (1, -1):
            came = None
            for ahead in range(self._steps(way), 0, -1):  # the sum for the farthest device is sent first
                here = product(way * ahead)
                came = self._sent((here if came is None else here + came).astype(dtype), way).astype(jnp.float32)
            total = total if came is None else total + came
        return total

    def _gathered_tokens(self, x: jax.Array, matrix: jax.Array, dtype: DTypeLike) -> jax.Array:
        """x [T / n, in] of each device times matrix [out / n, in] -> float32[T, out / n]."""
        matrix, rows, part = matrix.astype(x.dtype), len(x), x
        y = jnp.zeros((rows * len(self.order), len(matrix)), dtype)
        for behind in range(len(self.order)):
            # Barriers set the order of the steps, as GPUs would multiply all parts at once. The next part is sent when
            # the previous product is done, and travels while this part is multiplied.
            x, part, y = jax.lax.optimization_barrier((x, part, y))
            following = self._sent(x, behind + 1)
            y = jax.lax.dynamic_update_slice_in_dim(y, dot(part, matrix, dtype), self._place(-behind) * rows, 0)
            part = following
        return y.astype(jnp.float32)

    def _scattered_tokens(self, x: jax.Array, matrix: jax.Array, dtype: DTypeLike) -> jax.Array:
        """x [T, in / n] times matrix [out, in / n], added up over devices -> float32[T / n, out]."""
        matrix, rows, here, came = matrix.astype(x.dtype), len(x) // len(self.order), x, []
        for ahead in (*range(1, len(self.order)), 0):
            x, *_ = jax.lax.optimization_barrier((x, here, came[-2:-1]))  # as above
            part = jax.lax.dynamic_slice_in_dim(x, self._place(ahead) * rows, rows, 0)
            here = dot(part, matrix, dtype if ahead else jnp.float32)
            came.append(self._sent(here, ahead).astype(jnp.float32))
        return sum(came[:-1], came[-1])

    def _steps(self, way: int) -> int:
        """Steps in one direction: half of the devices forward (1), the others backward (-1)."""
        return len(self.order) // 2 if way == 1 else (len(self.order) - 1) // 2

    def _sent(self, part: jax.Array, way: int) -> jax.Array:
        """The part that arrives when every device sends its own `way` places forward on the ring."""
        if way % len(self.order) == 0:
            return part
        to = (*self.order[way:], *self.order[:way])
        return jax.lax.ppermute(part, self.over, tuple(zip(self.order, to, strict=True)))

    def _place(self, ahead: int) -> Int32[jax.Array, ""]:
        """The index of the device `ahead` places forward of this one on the ring."""
        far = dict(zip(self.order, (*self.order[ahead:], *self.order[:ahead]), strict=True))
        return jnp.array([far[place] for place in range(len(far))], jnp.int32)[jax.lax.axis_index(self.over)]
