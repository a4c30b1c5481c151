"""How the parameters of a stage are sharded over its devices."""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout

from jaxserve import weights
from jaxserve.models.products import Quantized
from jaxserve.runner.lowering import StagePrograms
from jaxserve.weights import naming
from sharding.parameter_names import layer_of, pattern
from sharding.spec import Target


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedParameter:
    """A parameter and its sharding over the devices of a stage.

    Attributes:
      name: layers.3.qkv.kernel, or with `*` for the layer if it stands for several. The scales of a quantized matrix
        are a separate entry, layers.3.qkv.kernel.scales, and so are zero points.
      count: number of parameters that it stands for.
      axes: logical name of each axis.
      partition: for each axis, the mesh axes that it is split over, or None.
      shape / local: the global shape, and the shape on each device.
      nbytes: bytes of one parameter in the memory of each device, with padding that is known.
    """

    name: str
    count: int
    axes: tuple[str, ...]
    partition: tuple[Target, ...]
    shape: tuple[int, ...]
    local: tuple[int, ...]
    nbytes: int

    @property
    def whole(self) -> bool:
        """Whether it is replicated on every device."""
        return self.local == self.shape

    @property
    def divided(self) -> tuple[bool, ...]:
        """For each axis, whether it is split over devices."""
        return tuple(whole != part for whole, part in zip(self.shape, self.local, strict=True))

    def split(self, axis: str) -> bool:
        """Whether this logical axis is split over devices."""
        return any(name == axis and divided for name, divided in zip(self.axes, self.divided, strict=True))


def parameters_of(stage: StagePrograms) -> dict[str, ShardedParameter]:
    """The parameters of a stage by name, in the order of the model."""
    (found,) = parameters_of_stages([stage])
    return found


def parameters_of_stages(stages: Sequence[StagePrograms]) -> list[dict[str, ShardedParameter]]:
    """Each stage's parameters by name; their meshes have equal axes, so they are described once."""
    first, model = stages[0], stages[0].model
    dtype = jnp.dtype(first.shape.attention.dtype)
    described = weights.describe(model, dtype, first.place, quantize=first.quantize)
    leaves, structure = jax.tree.flatten(described, is_leaf=weights.is_matrix)
    tree = structure.unflatten(
        _parts(each.name, each.axes, leaf) for each, leaf in zip(naming.parameters(model, dtype), leaves, strict=True)
    )
    found = []
    for stage in stages:
        own = model.part(tree, stage.layers)
        pieces = [own.get("embed"), [own["layers"][layer] for layer in stage.layers], own.get("head")]
        parts = itertools.chain.from_iterable(jax.tree.leaves(pieces, is_leaf=lambda leaf: isinstance(leaf, tuple)))
        found.append({part.name: part for part in parts})
    return found


def placement(programs: Sequence[StagePrograms]) -> weights.Place:
    """The function that places each parameter on its stage's devices while it is read.

    A token table that is also the head is placed in the first stage.
    """
    places = {name: stage.place for stage in reversed(programs) for name in parameters_of(stage)}
    return lambda name, shape, axes: places[name](name, shape, axes)


def _parts(name: str, axes: tuple[str, ...], leaf: jax.ShapeDtypeStruct | Quantized) -> tuple[ShardedParameter, ...]:
    """A parameter, or the parts of a quantized one."""
    if isinstance(leaf, Quantized):
        beside = {"scales": leaf.scales, "zeros": leaf.zeros}
        parts = (
            _part(f"{name}.{kind}", axes[: len(part.shape)], part) for kind, part in beside.items() if part is not None
        )
        return _part(name, axes, leaf.values), *parts
    return (_part(name, axes, leaf),)


def _part(name: str, axes: tuple[str, ...], leaf: jax.ShapeDtypeStruct) -> ShardedParameter:
    local = leaf.sharding.shard_shape(leaf.shape)
    return ShardedParameter(
        name=name,
        count=1,
        axes=axes,
        partition=tuple(leaf.sharding.spec),
        shape=leaf.shape,
        local=local,
        nbytes=_bytes_held(leaf, local),
    )


def _bytes_held(leaf: jax.ShapeDtypeStruct, local: tuple[int, ...]) -> int:
    """Bytes of a device's part; in layouts of ours, padded to whole tiles of a TPU's memory."""
    layout, sizes = leaf.format.layout, list(local)
    if isinstance(layout, Layout):
        tiles = (32 if leaf.dtype.itemsize == 1 else 8, 128)
        for axis, tile in zip(layout.major_to_minor[-2:], tiles, strict=True):
            sizes[axis] = -(-sizes[axis] // tile) * tile
    return weights.nbytes(leaf, sizes)


def is_of_experts(axes: tuple[str, ...]) -> bool:
    """Whether a parameter has a part an expert, of which an iteration reads those it needs."""
    return axes[0] == "expert"


def group_layers(stages: Sequence[Iterable[ShardedParameter]]) -> list[tuple[ShardedParameter, ...]]:
    """Merges each stage's parameters that differ only in their layer; `*` replaces the layer.

    Layers that the spec shards differently stay separate entries with the layers of each: layers.0-3,8.up.kernel.
    """
    parts = [tuple(stage) for stage in stages]
    partitions: dict[str, set[tuple[Target, ...]]] = {}
    for part in chain.from_iterable(parts):
        partitions.setdefault(pattern(part.name), set()).add(part.partition)
    alike = {kind for kind, found in partitions.items() if len(found) == 1}
    return [_merged(stage, alike) for stage in parts]


def _merged(parts: Iterable[ShardedParameter], alike: Container[str]) -> tuple[ShardedParameter, ...]:
    found: dict[tuple[str, tuple[Target, ...]], list[ShardedParameter]] = {}
    for part in parts:
        found.setdefault((pattern(part.name), part.partition), []).append(part)
    return tuple(
        replace(same[0], name=kind if kind in alike else pattern(same[0].name, _layers(same)), count=len(same))
        for (kind, _), same in found.items()
    )


def _layers(parts: Iterable[ShardedParameter]) -> str:
    """The layers of parameters as a spec writes them, such as 0-3,8."""
    layers = sorted(layer for part in parts if (layer := layer_of(part.name)) is not None)
    runs = (list(run) for _, run in groupby(enumerate(layers), lambda each: each[1] - each[0]))
    return ",".join(f"{run[0][1]}-{run[-1][1]}" if len(run) > 1 else str(run[0][1]) for run in runs)
