"""Products in which each device multiplies by its own part of a matrix.

Compilers do not divide calls of our kernels. Without those of narrow weights, XLA's compiler for GPUs would write the
widened part of a matrix to memory. On TPUs it would add up the scales that are spread over groups, were groups divided.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Float, Float32

from jaxserve.models.products import BoundWeight, Quantized
from jaxserve.runner import kv_cache
from sharding.spec import ShardingSpec, partition, parts


@dataclass(frozen=True, slots=True)
class WeightParts:
    """How a narrow matrix and what it is multiplied with are divided over a mesh.

    Attributes:
      places: the partitions of its values, scales and zero points where it is used.
      tokens / embed: mesh axes over which the hidden states between layers are split.
    """

    mesh: Mesh
    places: Quantized
    tokens: tuple[str, ...] = ()
    embed: tuple[str, ...] = ()

    def __call__(
        self,
        product: Callable[[jax.Array, Quantized], jax.Array],
        x: Float[jax.Array, "T in"],
        matrix: Quantized,
        dtype: DTypeLike,
    ) -> Float32[jax.Array, "T out"]:
        """x times the matrix, whose parts the devices multiply with `product`.

        Args:
          dtype: of the partial sums that are sent, where devices have parts of the inputs.
        """
        outputs, inputs = (kv_cache.over(self.mesh, target) for target in (*self.places.values, None, None)[:2])
        # Devices with parts of the matrix need all tokens. Their sums are scattered as the hidden states are split.
        rows = () if {*outputs, *inputs} & {*self.tokens} else self.tokens
        scattered, made = None, partition(rows, outputs)
        if inputs and inputs == self.tokens:
            scattered, made = 0, partition(inputs, outputs)
        elif inputs and inputs == self.embed and not outputs and matrix.shape[0] % parts(inputs, self.mesh.shape) == 0:
            scattered, made = 1, partition(rows, inputs)

        def here(x: jax.Array, matrix: Quantized) -> jax.Array:
            y = product(x, matrix)
            if not inputs:
                return y
            y = y.astype(dtype)
            if scattered is None:
                return jax.lax.psum(y, inputs).astype(jnp.float32)
            return jax.lax.psum_scatter(y, inputs, scatter_dimension=scattered, tiled=True).astype(jnp.float32)

        given = partition(rows, inputs), self.places
        return jax.shard_map(here, mesh=self.mesh, in_specs=given, out_specs=made, check_vma=False)(x, matrix)


def needed(held: Any, platform: str) -> bool:
    """Whether compilers would divide products with some of these weights badly."""
    return platform == "gpu" or (platform == "tpu" and any(map(_has_groups, jax.tree.leaves(held, is_leaf=_is_narrow))))


def _is_narrow(leaf: Any) -> bool:
    return isinstance(leaf, Quantized)


def _has_groups(leaf: Any) -> bool:
    return isinstance(leaf, Quantized) and leaf.group is not None


def divided(layers: Any, held: Any, mesh: Mesh, spec: ShardingSpec, platform: str) -> Any:
    """The layers' bound weights, with `WeightParts` for narrow matrices on several devices.

    On TPUs those with groups get them, on GPUs all, on CPUs none.

    Args:
      held: the same tree, with the shapes and shardings of the weights.
    """
    if platform == "cpu" or mesh.size == 1:
        return layers
    hidden = {axis: kv_cache.over(mesh, spec.activations.get(axis)) for axis in ("tokens", "embed")}

    def of(weight: Any, described: Any) -> Any:
        is_narrow = _is_narrow(described) if platform == "gpu" else _has_groups(described)
        if not isinstance(weight, BoundWeight) or not is_narrow or len(weight.shape) != 2:
            return weight
        own = WeightParts(mesh, jax.tree.map(lambda leaf: spec.gathered(leaf.sharding.spec), described), **hidden)
        return BoundWeight(weight.matrix, replace(weight.matmul, parts=own))  # type: ignore[type-var]

    return jax.tree.map(of, layers, held)
