"""A deployment to plan: a model, devices and a sharding, and the programs that it compiles."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp

from jaxserve import models
from jaxserve.config import EngineConfig
from jaxserve.models.schema import ModelConfig
from jaxserve.runner.layout import bucket_sizes, lay_out, max_context
from jaxserve.runner.lowering import StagePrograms
from sharding import axes, mesh
from sharding.devices import Topology
from sharding.spec import ShardingSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """Everything that a plan depends on.

    Attributes:
      name: name of the model.
      engine: the engine's settings, as in `jaxserve serve`: tensor, stages, rows, buckets, slots, dtype.
      context: context length of each decoding row in the predicted iterations.
      on_cpus: its programs are for virtual CPU devices, as many as the topology has, to be compiled anywhere.
    """

    name: str
    config: ModelConfig
    topology: Topology
    engine: EngineConfig
    spec: ShardingSpec
    context: int = 1024
    on_cpus: bool = False

    @property
    def dtype(self) -> str:
        """Name of the dtype of weights and activations."""
        return "bfloat16" if self.engine.dtype == "auto" else self.engine.dtype

    @property
    def max_context(self) -> int:
        """Most tokens of a request."""
        return max_context(self.engine, self.config)

    @property
    def buckets(self) -> tuple[int, ...]:
        """The compiled token counts."""
        return bucket_sizes(self.engine)

    def check_devices(self) -> None:
        """Raise ValueError if the topology has too few devices."""
        engine, replicas = self.engine, self.engine.replicas
        asked, have = engine.stage_devices * engine.stages * replicas, self.topology.num_devices
        if asked > have:
            parts = f"{axes.product(engine.stage_axes).replace(' times ', ' x ')} x stages {engine.stages}"
            parts += f" x replicas {replicas}" if replicas > 1 else ""
            raise ValueError(f"{parts} are {asked} devices; {self.topology} has {have}")

    def padding(self) -> dict[str, tuple[int, int]]:
        """Logical axes that the spec pads: (size in the model, padded size)."""
        counts = model_of(self.config).axis_sizes()
        padded = self.spec.padded(counts, self.engine.stage_axes)
        return {axis: (count, padded[axis]) for axis, count in counts.items() if padded[axis] != count}


@functools.cache
def model_of(config: ModelConfig) -> models.Model:
    """The model of a configuration, without parameters (cached)."""
    return models.build(config)


def programs(deployment: Deployment, devices: Sequence[Any] | None = None) -> list[StagePrograms]:
    """The programs of each stage, laid out as the engine does.

    Args:
      devices: devices of a topology. None is for devices that need not exist; that is enough for shapes and shardings.

    Raises:
      ValueError: layers, devices, sharding, context or attention do not fit together.
    """
    deployment.check_devices()
    engine, platform = deployment.engine, deployment.topology.device.platform
    if deployment.on_cpus:  # which have no kernel of ours for a part of the heads
        engine, platform = replace(engine, attention="xla"), "cpu"
    meshes: Any
    if devices is None:
        meshes = (mesh.abstract(engine.stage_axes),) * engine.stages
    else:
        (meshes,) = mesh.make_meshes(engine.stage_axes, engine.stages, devices=devices)
    model, dtype = model_of(deployment.config), jnp.dtype(deployment.dtype)
    return lay_out(engine, model, meshes, deployment.spec, dtype=dtype, platform=platform)[0]
