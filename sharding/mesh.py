"""The meshes of a model: one for each stage of each replica."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh


def make_mesh(tensor: int = 1, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh with one axis, "tensor", over the first devices.

    The axis has type Auto: the compiler places the collectives (two all-reduces per layer), so models need no
    annotations.

    Raises:
      ValueError: there are not enough devices.
    """
    have = jax.devices() if devices is None else devices
    if not 1 <= tensor <= len(have):
        raise ValueError(f"tensor is {tensor}; it must be at least 1 and at most {len(have)}, the number of devices")
    return Mesh(np.array(have[:tensor]), ("tensor",), axis_types=(AxisType.Auto,))


def make_meshes(
    tensor: int, stages: int, replicas: int = 1, devices: Sequence[Any] | None = None
) -> tuple[tuple[Mesh, ...], ...]:
    """The meshes of each replica: `tensor` devices for each stage, in order.

    Raises:
      ValueError: there are not enough devices.
    """
    have = list(jax.devices() if devices is None else devices)
    wanted = tensor * stages * replicas
    if wanted > len(have):
        product = f"tensor {tensor} times stages {stages}" + f" times replicas {replicas}" * (replicas > 1)
        message = f"{product} is {wanted}, more devices than there are: {len(have)}"
        if have[0].platform == "cpu":
            message += f" (XLA_FLAGS=--xla_force_host_platform_device_count={wanted} divides a CPU into virtual ones)"
        raise ValueError(message)
    parts = [make_mesh(tensor, have[first:]) for first in range(0, wanted, tensor)]
    return tuple(tuple(parts[first : first + stages]) for first in range(0, len(parts), stages))


def abstract(tensor: int) -> AbstractMesh:
    """The mesh of a stage without devices, for shapes and shardings only."""
    return AbstractMesh((tensor,), ("tensor",), axis_types=(AxisType.Auto,))
