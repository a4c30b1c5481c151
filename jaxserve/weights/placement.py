"""Says where each parameter is held: its sharding, and the order of its axes in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Format
from jax.experimental.layout import Layout as MemoryLayout
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding

from jaxserve import models
from jaxserve.models.model import is_tuple
from jaxserve.models.products import Quantized
from jaxserve.weights import narrow
from jaxserve.weights.naming import Parameter, parameters
from sharding.spec import ShardingSpec

# place(name, shape, axes) -> sharding, with a layout where it is not the device's default; None for a parameter that is
# not loaded; names are like layers.3.qkv.kernel
Place = Callable[[str, tuple[int, ...], tuple[str, ...]], Sharding | Format | None]

LAID_OUT = frozenset({"tpu"})  # platforms where some parameters do not have the default layout


def on_one_device(_name: str, _shape: tuple[int, ...], _axes: tuple[str, ...]) -> Sharding:
    """Places everything on the first device."""
    return SingleDeviceSharding(jax.devices()[0])


def on_mesh(model: models.Model, mesh: Mesh, spec: ShardingSpec, platform: str) -> Place:
    """Places parameters on a mesh of devices of a platform by a spec.

    The returned function raises the ValueErrors of `ShardingSpec.resolve`.
    """
    counts = model.axis_sizes()
    known: dict[Any, Sharding | Format] = {}  # layers are alike, unless the spec has rules for names

    def place(name: str, shape: tuple[int, ...], axes: tuple[str, ...]) -> Sharding | Format:
        kind = (name if spec.parameters else "", shape, axes)
        if kind not in known:
            sharding = NamedSharding(mesh, spec.resolve(axes, shape, mesh, name=name, counts=counts))
            order = _memory_order(axes) if platform in LAID_OUT else None
            known[kind] = sharding if order is None else Format(MemoryLayout(order), sharding)
        return known[kind]

    return place


def _memory_order(axes: tuple[str, ...]) -> tuple[int, ...] | None:
    """The order of a parameter's axes in a TPU's memory, slowest first; None: the compiler's.

    Parameters in another order are copied whole in every iteration: a lookup reads the rows of a table, and products of
    experts, XLA's and ours, read kernels [E, out, in] as [E, in, out], and ours read the router, scales and biases by
    expert (compiled with jax 0.10.2).
    """
    if axes[0] == "expert" and len(axes) == 3:
        return 0, 2, 1
    return (0, 1) if axes[0] in ("vocab", "expert", "router") and len(axes) == 2 else None


def describe(model: models.Model, dtype: jnp.dtype, place: Place, *, quantize: str | None) -> models.Params:
    """Shapes, dtypes and shardings of a model's parameters on the devices.

    Scales are sharded like the rows, or like the groups, that they belong to.

    Args:
      quantize: how matrices are held (`narrow.format_of`).

    Raises:
      ValueError: groups of inputs do not divide a matrix, or its part on a device; or from `place`.
    """

    def held(parameter: Parameter) -> jax.ShapeDtypeStruct | Quantized:
        name, shape, axes, _ = parameter
        placed, form = place(name, shape.shape, axes), narrow.format_of(name, quantize, model.config.stored)
        if form is None:
            return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=placed)
        like = narrow.shapes_of(form, shape.shape, dtype, name)
        if like.group is None:
            beside = place(name, like.scales.shape, axes[:-1])
        else:
            beside = placed
            if isinstance(placed, Sharding) and (inputs := placed.shard_shape(like.shape)[-1]) % like.group:
                raise ValueError(
                    f"{name}: each device would have {inputs} of {like.shape[-1]} inputs, which are not whole groups "
                    f"of {like.group} ({form.dtype}); split it over fewer devices, or quantize to int8"
                )
        each = Quantized(placed, beside, None if like.zeros is None else beside)
        return jax.tree.map(lambda part, at: jax.ShapeDtypeStruct(part.shape, part.dtype, sharding=at), like, each)

    structure = jax.tree.structure(model.axes(), is_leaf=is_tuple)
    return jax.tree.unflatten(structure, map(held, parameters(model, dtype)))
