"""A question to `jaxserve plan`: a model, devices, a sharding; and what the engine would compile for it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from jaxserve import attention, buckets, models, naming, weights
from jaxserve.config import EngineConfig
from jaxserve.lowering import StagePrograms
from jaxserve.models.schema import ModelConfig
from jaxserve.programs import StageShape
from sharding import mesh, stages
from sharding.devices import Topology
from sharding.spec import ShardingSpec

_DEFAULT_CONTEXT = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """Everything that a prediction depends on.

    Attributes:
      name: what to call the model.
      engine: the engine's settings, as `jaxserve serve` takes them: tensor, stages, rows, buckets, slots, dtype.
      replicas: copies of the whole, each on devices of its own.
      context: positions that each decoding row has behind it in the predicted iterations.
    """

    name: str
    config: ModelConfig
    topology: Topology
    engine: EngineConfig
    spec: ShardingSpec
    replicas: int = 1
    context: int = 1024

    @property
    def dtype(self) -> str:
        """Of weights and activations."""
        return "bfloat16" if self.engine.dtype == "auto" else self.engine.dtype

    @property
    def max_context(self) -> int:
        """Most tokens of a request."""
        return self.engine.max_context or self.config.max_position or _DEFAULT_CONTEXT

    @property
    def buckets(self) -> tuple[int, ...]:
        """Token counts that are compiled."""
        return self.engine.buckets or buckets.default_sizes(self.engine.max_rows, self.engine.token_budget)

    def check_devices(self) -> None:
        """Raises ValueError where there are fewer devices than the stages ask for."""
        asked, have = self.engine.tensor * self.engine.stages * self.replicas, self.topology.num_devices
        if asked > have:
            parts = f"tensor {self.engine.tensor} x stages {self.engine.stages}"
            parts += f" x replicas {self.replicas}" if self.replicas > 1 else ""
            raise ValueError(f"{parts} are {asked} devices; {self.topology} has {have}")

    def padding(self) -> dict[str, tuple[int, int]]:
        """Logical axes that the spec pads: size of the model, size held."""
        counts = model_of(self.config).axis_sizes()
        padded = self.spec.padded(counts, {"tensor": self.engine.tensor})
        return {axis: (count, padded[axis]) for axis, count in counts.items() if padded[axis] != count}


@functools.cache
def model_of(config: ModelConfig) -> models.Model:
    """The model of a configuration, without parameters; made once for all questions about it."""
    return models.build(config)


def programs(whatif: WhatIf, devices: Sequence[Any] | None = None) -> tuple[StagePrograms, ...]:
    """The programs of each stage.

    Args:
      devices: of a topology; None for devices that need not exist, which is enough for shapes and shardings.

    Raises:
      ValueError: layers, devices, sharding, context or attention do not go together.
    """
    whatif.check_devices()
    engine, config = whatif.engine, _padded(whatif)
    layers = stages.split(config.num_layers, engine.stages, engine.layers_per_stage)
    meshes: tuple[Any, ...]
    if devices is None:
        meshes = (mesh.abstract(engine.tensor),) * engine.stages
    else:
        meshes = mesh.make_meshes(engine.tensor, engine.stages, devices)
    model, dtype = model_of(config), jnp.dtype(whatif.dtype)
    parameters = list(naming.parameters(model, dtype))
    whatif.spec.check_names(meshes[0], {name: axes for name, _, axes, _ in parameters})
    place = weights.on_mesh(model, meshes[0], whatif.spec)
    for name, shape, axes, _ in parameters:
        place(name, shape.shape, axes)
    backend, shape, _ = attention.select(
        config,
        meshes[0],
        whatif.spec,
        name=engine.attention,
        dtype=dtype,
        block_size=engine.block_size,
        max_context=whatif.max_context,
        platform=whatif.topology.device.platform,
    )
    stage_shape = StageShape(
        max_rows=engine.max_rows,
        n_rows=engine.max_rows * (1 if engine.stages == 1 else engine.stages + 1),
        max_context=whatif.max_context,
        attention=shape,
        backend=backend,
        scoring=engine.scoring,
    )
    return tuple(
        StagePrograms(model=model, shape=stage_shape, layers=owned, mesh=each, spec=whatif.spec)
        for owned, each in zip(layers, meshes, strict=True)
    )


def _padded(whatif: WhatIf) -> ModelConfig:
    """The configuration of the padded model: right in its sizes, which is all that a plan looks at."""
    fields = {"heads": ("num_heads", "num_kv_heads"), "vocab": ("vocab_size",), "ffn": ("ffn_size",)}
    changed = {field: held for axis, (_, held) in whatif.padding().items() for field in fields[axis]}
    return dataclasses.replace(whatif.config, **changed)
