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


def ring(mesh: Mesh, over: tuple[str, ...]) -> tuple[int, ...]:
    """Indices of the devices along mesh axes, in the order of a ring of neighbouring chips.

    If the chips are not a box of two or more dimensions with an even side, or have no coordinates, the order is that of
    the mesh.
    """
    group = mesh.devices[tuple(slice(None) if axis in over else 0 for axis in mesh.axis_names)]
    kept = [axis for axis in mesh.axis_names if axis in over]
    devices = group.transpose([kept.index(axis) for axis in over]).ravel()
    given = tuple(range(len(devices)))
    if not hasattr(devices[0], "core_on_chip"):
        return given
    places = {(*device.coords, device.core_on_chip): place for place, device in enumerate(devices)}
    sides = [sorted(set(side)) for side in zip(*places, strict=True)]
    points = [
        tuple(side[i] for side, i in zip(sides, at, strict=True)) for at in _closed_walk([len(each) for each in sides])
    ]
    return tuple(places[point] for point in points) if set(points) == set(places) else given


def _closed_walk(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """A closed path of single steps through all points of a box; empty if there is none."""
    even = next((axis for axis, size in enumerate(sizes) if size % 2 == 0), None)
    if even is None or math.prod(sizes) == sizes[even]:
        return []
    across = _walk([*sizes[:even], *sizes[even + 1 :]])
    there = [(row, point) for row in range(sizes[even]) for point in (across[1:] if row % 2 == 0 else across[:0:-1])]
    back = [(row, across[0]) for row in reversed(range(sizes[even]))]
    return [(*point[:even], row, *point[even:]) for row, point in (*there, *back)]


def _walk(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """A path of single steps through all points of a box."""
    if not sizes:
        return [()]
    rest = _walk(sizes[1:])
    return [(i, *point) for i in range(sizes[0]) for point in (rest if i % 2 == 0 else rest[::-1])]
