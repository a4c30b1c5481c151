"""The meshes of a model: one for each stage of each replica."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from sharding.axes import product


def make_mesh(axes: Mapping[str, int], devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh over the first devices, the last axis fastest.

    The axes have type Auto: the compiler places the collectives (two all-reduces per layer), so models need no
    annotations.

    Raises:
      ValueError: there are not enough devices.
    """
    have = jax.devices() if devices is None else devices
    sizes = tuple(axes.values())
    wanted = math.prod(sizes)
    if not 1 <= wanted <= len(have):
        raise ValueError(f"{product(axes)} is {wanted}, which must be at least 1 and at most the {len(have)} devices")
    return Mesh(np.array(have[:wanted]).reshape(sizes), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def make_meshes(
    axes: Mapping[str, int], stages: int, replicas: int = 1, devices: Sequence[Any] | None = None
) -> tuple[tuple[Mesh, ...], ...]:
    """The meshes of each replica: devices for the axes of each stage, in order.

    Raises:
      ValueError: there are not enough devices.
    """
    have = list(jax.devices() if devices is None else devices)
    each = math.prod(axes.values())
    wanted = each * stages * replicas
    if wanted > len(have):
        asked = f"{product(axes)} times stages {stages}" + f" times replicas {replicas}" * (replicas > 1)
        message = f"{asked} is {wanted}, more devices than there are: {len(have)}"
        if have[0].platform == "cpu":
            message += f" (XLA_FLAGS=--xla_force_host_platform_device_count={wanted} divides a CPU into virtual ones)"
        raise ValueError(message)
    parts = [make_mesh(axes, have[first:]) for first in range(0, wanted, each)]
    return tuple(tuple(parts[first : first + stages]) for first in range(0, len(parts), stages))


def abstract(axes: Mapping[str, int]) -> AbstractMesh:
    """The mesh of a stage without devices, for shapes and shardings only."""
    return AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))
