"""Matrix products of models: plain or quantized, bound to a device's product or to none.

Matrices lie [out, in], because a CPU reads them in order when it multiplies few rows; accelerators take either order.
The runner binds weights to a matmul for its devices (`bind`); unbound weights are multiplied by `dot`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Float, Float32, Int32


@runtime_checkable  # for the check of shapes in tests
class Products(Protocol):
    """The matrix products of a program's devices."""

    def __call__(self, x: jax.Array, matrix: Any, dtype: DTypeLike, shape: tuple[int, ...] | None = None) -> jax.Array:
        """x [T, in] times a matrix [out, in] (plain or Quantized) -> float32[T, out].

        Args:
          shape: of a token's outputs in the result, [T, *shape]; None for (out,).
        """
        ...

    def experts(
        self, activation: Any, x: jax.Array, chosen: jax.Array, weights: jax.Array, kernels: Mapping[str, Any]
    ) -> jax.Array:
        """`experts.compute` on the devices that have the kernels -> float32[T, H]."""
        ...

    def routed_experts(
        self,
        activation: Any,
        x: jax.Array,
        positions: jax.Array,
        router: Mapping[str, Any],
        kernels: Mapping[str, Any],
        *,
        per_token: int,
        add_up: bool,
    ) -> jax.Array | None:
        """What each token's experts give, chosen where their kernels are -> float32[T, H].

        Biases and weights are applied. None where the devices do not do that.

        Args:
          positions: int32[T], negative of padding, which gets zeros.
          router: kernel [E, H] and bias [E] or None, which make the logits of all experts.
          per_token: experts of a token.
          add_up: whether a token's weights add up to 1, or are parts of the softmax of all logits.
        """
        ...


class Quantized(NamedTuple):
    """A matrix in narrow numbers, or a stack of them: about (values - zeros) * scales.

    A scale belongs to a row, or to a group of consecutive inputs in it. Zero points exist with groups only; None stands
    for zeros.
    """

    values: Any  # int8, int4 or float8 [..., out, in]
    scales: Any  # [..., out] or [..., out, groups]
    zeros: Any = None  # int8[..., out, groups]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def group(self) -> int | None:
        """Inputs that share a scale; None: those of a row."""
        grouped = len(self.scales.shape) == len(self.values.shape)
        return self.values.shape[-1] // self.scales.shape[-1] if grouped else None


def widened(matrix: Quantized, dtype: DTypeLike) -> jax.Array:
    """The matrix in a wide dtype."""
    values, scales = matrix.values.astype(dtype), matrix.scales.astype(dtype)
    if matrix.group is None:
        return values * scales[..., None]
    groups = values.reshape(*scales.shape, matrix.group)
    if matrix.zeros is not None:
        groups -= matrix.zeros.astype(dtype)[..., None]
    return (groups * scales[..., None]).reshape(values.shape)


@dataclass(frozen=True, slots=True, eq=False)
class BoundWeight:
    """A matrix with the function that multiplies by it (see `bind`)."""

    matrix: Float[jax.Array, "*E out in"] | Quantized
    matmul: Products

    @property
    def shape(self) -> tuple[int, ...]:
        return self.matrix.shape


def bind(weights: Any, matmul: Products) -> Any:
    """The same tree of weights, with `matmul` as the product of every matrix in it."""

    def wrap(leaf: Any) -> Any:
        return leaf if len(leaf.shape) < 2 else BoundWeight(leaf, matmul)

    return jax.tree.map(wrap, weights, is_leaf=lambda node: isinstance(node, Quantized))


@dataclass(frozen=True, slots=True, eq=False)
class LoopedWeight:
    """The matrix of the current layer of a loop.

    `project` branches to that layer's own matrix, so that it is read in place; slicing stacked matrices copies.
    """

    matrices: Sequence[Float[jax.Array, "out in"] | Quantized | BoundWeight]
    layer: Int32[jax.Array, ""]


def stacked(layers: Sequence[dict[str, Any]], stack: Callable[[Sequence[Any]], Any]) -> dict[str, Any]:
    """The weights of alike layers as one tree.

    Vectors are joined by `stack`; matrices of a kind are a tuple. A program that takes such weights has half as many
    arguments as with each layer's own, and its launch takes less time.
    """
    return jax.tree.map(
        lambda *leaves: leaves if len(leaves[0].shape) > 1 else stack(leaves),
        *layers,
        is_leaf=lambda node: isinstance(node, Quantized),
    )


def bind_stacked(layers: dict[str, Any], matmul: Products) -> dict[str, Any]:
    """`bind` for `stacked` layers."""
    return jax.tree.map(lambda leaf: bind(leaf, matmul) if _is_matrices(leaf) else leaf, layers, is_leaf=_is_matrices)


def looped(layers: dict[str, Any]) -> Callable[[jax.Array], dict[str, Any]]:
    """The weights of one of `stacked` layers as a function of its index int32[]."""

    def weights(layer: jax.Array) -> dict[str, Any]:
        def pick(leaf: Any) -> Any:
            return LoopedWeight(leaf, layer) if _is_matrices(leaf) else leaf[layer]

        return jax.tree.map(pick, layers, is_leaf=_is_matrices)

    return weights


def _is_matrices(node: Any) -> bool:
    """Whether a node of `stacked` layers is the matrices of one kind."""
    return isinstance(node, tuple)


def project(
    x: Float[jax.Array, "T in"],
    kernel: Float[jax.Array, "out in"] | Quantized | BoundWeight | LoopedWeight,
    dtype: DTypeLike | None = None,
    shape: tuple[int, ...] | None = None,
) -> Float32[jax.Array, "T ..."]:
    """x times the kernel transposed, summed in float32.

    Args:
      dtype: of partial sums that devices add up, where the bound matmul uses one; x's own if None.
      shape: of a token's outputs in the result, [T, *shape]; None for (out,). A TPU makes a product in this shape;
        to reshape it later takes copies.
    """
    if isinstance(kernel, LoopedWeight):
        branches = [partial(project, kernel=one, dtype=dtype, shape=shape) for one in kernel.matrices]
        return jax.lax.switch(kernel.layer, branches, x)
    if isinstance(kernel, BoundWeight):
        return kernel.matmul(x, kernel.matrix, x.dtype if dtype is None else dtype, shape)
    if isinstance(kernel, Quantized) and kernel.group is None:
        y = dot(x, kernel.values.astype(x.dtype), jnp.float32) * kernel.scales.astype(jnp.float32)
    elif isinstance(kernel, Quantized):
        y = dot(x, widened(kernel, x.dtype), jnp.float32)
    else:
        y = dot(x, kernel, jnp.float32)
    return y if shape is None else y.reshape(len(x), *shape)


def dot(
    left: Float[jax.Array, "rows in"], right: Float[jax.Array, "... in"], dtype: DTypeLike
) -> Float[jax.Array, "rows ..."]:
    """left times right transposed, returned in `dtype`."""
    return jax.lax.dot_general(
        left,
        right,
        (((1,), (right.ndim - 1,)), ((), ())),
        precision=precision_for(left.dtype),
        preferred_element_type=dtype,
    )


def precision_for(dtype: DTypeLike) -> jax.lax.Precision:
    """The precision of products of a dtype.

    A float32 product of default precision may be computed in TF32 or bfloat16.
    """
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else jax.lax.Precision.DEFAULT
