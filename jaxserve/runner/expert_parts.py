"""Where the kernels of a layer's experts are, and in what sizes devices multiply by them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float32

from jaxserve.models import experts
from jaxserve.models.products import Quantized
from sharding.spec import ShardingSpec, Target, names
from sharding.spec import parts as spec_parts

_UNIT = 128  # rows of a tile of XLA's ragged dot on CPUs, and on TPUs that are not known
_AXES = {
    **{name: experts.AXES[name]["kernel"] for name in ("gate", "up", "down")},
    **{f"{name}_bias": experts.AXES[name]["bias"] for name in ("gate", "up")},
    "down_bias": experts.AXES["down"]["kernel"][:2],
}


def are_routed(
    tokens: int, per_token: int, kernels: tuple[int, ...], dtypes: tuple[np.dtype, np.dtype], device_kind: str
) -> bool:
    """Whether a device chooses its experts, and multiplies by them, in kernels (see `grouped`).

    Args:
      kernels: [E, F, H], a device's part.
      dtypes: of hidden states and of kernels.
    """
    if not device_kind.startswith("TPU"):
        return False
    from pallas_kernels.tpu import grouped

    _, inner, hidden = kernels
    return grouped.supports(tokens, per_token, hidden, inner, dtypes, device_kind)


def tile_rows(platform: str, unit: int | None, dtype: np.dtype) -> tuple[int, ...]:
    """The sizes of tiles in which rows of experts are multiplied (see `grouped.tile_rows`).

    Args:
      unit: the width of a TPU's matrix units; None of other devices, and if it is not known.
    """
    if platform != "gpu":
        return (unit or _UNIT,)
    from pallas_kernels.gpu import grouped

    return grouped.tile_rows(dtype)


@dataclass(frozen=True, slots=True)
class ExpertParts:
    """How a layer's experts are divided over devices.

    Attributes:
      mesh: None for one device.
      places: the partition of each of the kernels.
      of_experts / of_ffn: the mesh axes over which experts, and the inner states of each, are divided.
      whole: the partition of what all devices have.
    """

    mesh: Mesh | None
    places: Mapping[str, Any]
    of_experts: Target
    of_ffn: Target
    whole: Any

    @property
    def of_each(self) -> int:
        """Parts of an expert."""
        return 1 if self.mesh is None else spec_parts(self.of_ffn, self.mesh.shape)

    @property
    def over(self) -> tuple[str, ...]:
        """The mesh axes over which devices have shares of the sum."""
        return () if self.mesh is None else (*names(self.of_experts), *names(self.of_ffn))

    def dtype_of_shares(self, dtype: np.dtype) -> np.dtype:
        """What devices send is of the dtype of hidden states; a sum on one device is float32."""
        return dtype if self.over else np.dtype(np.float32)

    def local(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """A device's part of kernels [E, F, H]."""
        if self.mesh is None:
            return shape
        return shape[0] // spec_parts(self.of_experts, self.mesh.shape), shape[1] // self.of_each, shape[2]

    def added_up(self, compute: Callable[..., jax.Array], kernels: experts.Kernels, *given: Any) -> jax.Array:
        """The sum over devices of compute(kernels, first, *given), with a device's first expert.

        Args:
          given: what all devices have.
        """
        if self.mesh is None:
            return compute(kernels, 0, *given)
        dtype = self.dtype_of_shares(given[0].dtype)

        def here(kernels: experts.Kernels, *given: Any) -> Float32[jax.Array, "T H"]:
            count = kernels["gate"].shape[0]
            first = 0 if self.of_experts is None else jax.lax.axis_index(self.of_experts) * count
            y = compute(kernels, first, *given).astype(dtype)
            return jax.lax.psum(y, self.over).astype(jnp.float32) if self.over else y

        specs = (self.places, *(self.whole for _ in given))
        return jax.shard_map(here, mesh=self.mesh, in_specs=specs, out_specs=self.whole, check_vma=False)(
            kernels, *given
        )


def of(kernels: experts.Kernels, mesh: Mesh | None, spec: ShardingSpec | None, layer: int) -> ExpertParts:
    """The parts of the kernels of a layer."""
    if mesh is None or spec is None or mesh.size == 1:
        return ExpertParts(None, {}, None, None, None)
    name = f"layers.{layer}.experts.down.kernel"  # whose rules hold for the others too
    resolve = partial(spec.resolve, mesh=mesh, name=name)

    def split(name: str, leaf: Any) -> Any:
        # A device computes with whole rows: kernels that are split over the hidden size are gathered.
        axes = tuple(None if axis == "embed" else axis for axis in _AXES[name])
        if isinstance(leaf, Quantized):
            return Quantized(split(name, leaf.values), resolve(axes[:2], leaf.scales.shape))
        return None if leaf is None else resolve(axes, leaf.shape)

    places = {name: split(name, leaf) for name, leaf in kernels.items()}
    gate = places["gate"].values if isinstance(places["gate"], Quantized) else places["gate"]
    return ExpertParts(mesh, places, gate[0], gate[1], resolve((), ()))
