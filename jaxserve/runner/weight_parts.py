"""Products in which each device multiplies by its own part of a matrix.

Compilers do not divide calls of our kernels. Without those of narrow weights, XLA's compiler for GPUs would write the
widened part of a matrix to memory.
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
from sharding.spec import ShardingSpec, partition


@dataclass(frozen=True, slots=True)
class WeightParts:
    """How a narrow matrix is divided over the devices of a mesh.

    Attributes:
      places: the partitions of its values, scales and zero points.
    """

    mesh: Mesh
    places: Quantized

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

        def here(x: jax.Array, matrix: Quantized) -> jax.Array:
            y = product(x, matrix)
            return jax.lax.psum(y.astype(dtype), inputs).astype(jnp.float32) if inputs else y

        given, made = (partition(None, inputs), self.places), partition(None, outputs)
        return jax.shard_map(here, mesh=self.mesh, in_specs=given, out_specs=made, check_vma=False)(x, matrix)


def divided(layers: Any, held: Any, mesh: Mesh, spec: ShardingSpec, platform: str) -> Any:
    """The layers' bound weights, with `WeightParts` for narrow matrices on several GPUs.

    Those whose layers split the hidden states, or gather weights, are left to the compiler.

    Args:
      held: the same tree, with the shapes and shardings of the weights.
    """
    if platform != "gpu" or mesh.size == 1 or spec.activations or spec.gather:
        return layers

    def of(weight: Any, described: Any) -> Any:
        if not isinstance(weight, BoundWeight) or not isinstance(described, Quantized) or len(weight.shape) != 2:
            return weight
        parts = WeightParts(mesh, jax.tree.map(lambda leaf: leaf.sharding.spec, described))
        return BoundWeight(weight.matrix, replace(weight.matmul, parts=parts))  # type: ignore[type-var]

    return jax.tree.map(of, layers, held)
