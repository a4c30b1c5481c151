"""The parameters of a stage, those of all its layers told once."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from jaxserve import weights
from jaxserve.models.layers import Quantized
from jaxserve.runner.lowering import StagePrograms
from jaxserve.weights import naming
from sharding.spec import pattern


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A parameter, laid over the devices of a stage.

    Attributes:
      name: layers.3.qkv.kernel, or with `*` for the layer where it stands for several; the scales of a matrix in
        eight bits are a part of their own, layers.3.qkv.kernel.scales.
      count: how many it stands for.
      axes: logical name of each axis.
      partition: the mesh axis that each is split over, or None.
      shape / local: of the whole, and on each device.
      nbytes: of one on each device.
    """

    name: str
    count: int
    axes: tuple[str, ...]
    partition: tuple[str | None, ...]
    shape: tuple[int, ...]
    local: tuple[int, ...]
    nbytes: int

    @property
    def whole(self) -> bool:
        """Whether each device holds all of it."""
        return self.local == self.shape

    def split(self, axis: str) -> bool:
        """Whether a logical axis of it is split over devices."""
        return any(
            name == axis and whole != part for name, whole, part in zip(self.axes, self.shape, self.local, strict=True)
        )


def parts_of(stage: StagePrograms) -> dict[str, Part]:
    """The parameters of a stage by name, in the order of the model."""
    axes = {name: axes for name, _, axes, _ in naming.parameters(stage.model, jnp.dtype(stage.shape.attention.dtype))}
    found: dict[str, Part] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(stage.params(), is_leaf=weights.is_matrix):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if isinstance(leaf, Quantized):
            found[name] = _part(name, axes[name], leaf.values)
            found[f"{name}.scales"] = _part(f"{name}.scales", axes[name][:1], leaf.scales)
        else:
            found[name] = _part(name, axes[name], leaf)
    order = {"embed": 0, "layers": 1, "head": 2}
    return dict(sorted(found.items(), key=lambda item: order[item[0].split(".")[0]]))


def _part(name: str, axes: tuple[str, ...], leaf: jax.ShapeDtypeStruct) -> Part:
    local = leaf.sharding.shard_shape(leaf.shape)
    return Part(
        name=name,
        count=1,
        axes=axes,
        partition=tuple(leaf.sharding.spec),
        shape=leaf.shape,
        local=local,
        nbytes=math.prod(local) * leaf.dtype.itemsize,
    )


def grouped(parts: Iterable[Part]) -> tuple[Part, ...]:
    """Parameters of a kind that lie alike, told once: `*` for the layer.

    Where the spec has exceptions for single layers there is a line for each sharding, called after its first layer.
    """
    found: dict[tuple[str, tuple[str | None, ...]], Part] = {}
    kinds: set[str] = set()
    for part in parts:
        kind = pattern(part.name)
        known = found.get((kind, part.partition))
        if known is not None:
            found[kind, part.partition] = replace(known, count=known.count + part.count)
        else:
            found[kind, part.partition] = replace(part, name=part.name if kind in kinds else kind)
            kinds.add(kind)
    return tuple(found.values())
