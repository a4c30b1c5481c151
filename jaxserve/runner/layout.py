"""Decides each stage's layers, shardings and sizes before weights are read; needs no device."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import jax.numpy as jnp
from jax.sharding import Mesh

from jaxserve import models, weights
from jaxserve.config import EngineConfig
from jaxserve.models import Model
from jaxserve.models.schema import ModelConfig
from jaxserve.runner import attention, kv_cache, matmul
from jaxserve.runner.lowering import StagePrograms
from jaxserve.runner.programs import StageShape
from jaxserve.scheduler import buckets
from jaxserve.scheduler.cache_groups import CacheGroups
from jaxserve.scheduler.factory import fixed_chunk
from jaxserve.weights import naming
from sharding import stages
from sharding.spec import ShardingSpec, shown

_DEFAULT_CONTEXT = 2048  # of models without a limit of their own


def lay_out(
    config: EngineConfig, model: Model, meshes: Sequence[Mesh], spec: ShardingSpec, *, dtype: jnp.dtype, platform: str
) -> tuple[list[StagePrograms], str]:
    """The programs of each stage.

    Args:
      model: not padded yet.
      meshes: one a stage; shapes and shardings need no devices in them.
      platform: of the devices.

    Returns:
      (programs, reason): the reason says in words why they attend with the backend they do.

    Raises:
      ValueError: layers, sharding, context or attention do not go together.
    """
    layers = stages.split(model.config.num_layers, config.stages, config.layers_per_stage)
    spec.check_names(meshes[0], {name: axes for name, _, axes, _ in naming.parameters(model, dtype)})
    counts = model.axis_sizes()
    if (padded := spec.padded(counts, meshes[0].shape)) != counts:
        model = models.build(model.config, padded)
    place = weights.on_mesh(model, meshes[0], spec, platform)
    for name, shape, axes, _ in naming.parameters(model, dtype):
        place(name, shape.shape, axes)
    context = max_context(config, model.config)
    backend, attended, reason = attention.select(
        model.padded_config,
        meshes[0],
        spec,
        name=config.attention,
        dtype=dtype,
        pool_dtype=None if config.kv_cache_dtype == "auto" else jnp.dtype(config.kv_cache_dtype),
        block_size=config.block_size,
        max_context=context,
        max_rows=config.max_rows,
        platform=platform,
    )
    if config.host_cache is not None and kv_cache.row_parts(meshes[0], spec) > 1:
        raise ValueError(
            f"host_cache is {config.host_cache}; with rows of the pool on {shown(spec.pool['rows'])} there is none"
        )
    n_rows = config.max_rows * (1 if config.stages == 1 else config.stages + 1)
    stage_shape = StageShape(
        max_rows=config.max_rows,
        n_rows=n_rows,
        groups=CacheGroups.of(
            # A draft model reads the block tables of the model that it drafts for, and may attend to all tokens.
            model.config.distinct_windows if config.draft_model is None else [None],
            block_size=attended.block_size,
            max_context=context,
            n_rows=n_rows,
            most_tokens=bucket_sizes(config)[-1],
            draft_tokens=config.draft_tokens,
            parts=kv_cache.row_parts(meshes[0], spec),
        ),
        attention=attended,
        backend=backend,
        product=matmul.native_product(dtype, backend.name, meshes[0].size),
        scoring=config.scoring,
        draft_tokens=config.draft_tokens,
        # Of one, XLA's compiler for TPUs makes operations of single numbers.
        fewest_tokens=2 if platform == "tpu" else 1,
        deterministic=config.deterministic,
    )
    programs = [
        StagePrograms(
            model=model,
            shape=stage_shape,
            layers=owned,
            mesh=each,
            spec=spec,
            platform=platform,
            quantize=config.quantize,
        )
        for owned, each in zip(layers, meshes, strict=True)
    ]
    for bucket in bucket_sizes(config):
        programs[0].between_layers(bucket)
    fixed_chunk(config, bucket_sizes(config), attended.block_size)
    return programs, reason


def bucket_sizes(config: EngineConfig, doublings: int = 0) -> tuple[int, ...]:
    """Token counts that are compiled.

    Args:
      doublings: of the largest default size (see `buckets.default_sizes`).
    """
    sizes = config.buckets or buckets.default_sizes(
        config.max_rows, config.token_budget, objective=config.target_tpot is not None, doublings=doublings
    )
    return sizes[-1:] if config.deterministic else sizes


def for_buckets(programs: Iterable[StagePrograms], sizes: Sequence[int]) -> list[StagePrograms]:
    """Each stage's programs for other buckets than `lay_out` had; pools must hold their tokens."""
    made = []
    for stage in programs:
        groups = dataclasses.replace(stage.shape.groups, most_tokens=sizes[-1])
        made.append(dataclasses.replace(stage, shape=dataclasses.replace(stage.shape, groups=groups)))
    return made


def max_context(config: EngineConfig, model_config: ModelConfig) -> int:
    """Most tokens of a request. Raises ValueError for more than the model has positions for."""
    limit = model_config.max_position
    if config.max_context is None:
        return limit or _DEFAULT_CONTEXT
    if limit is not None and config.max_context > limit:
        raise ValueError(f"max_context is {config.max_context}; this model has positions for {limit} tokens")
    return config.max_context
