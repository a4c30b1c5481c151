"""What happens before an engine is ready: load, choose sizes, compile, measure, and report what was settled on."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve import attention, buckets, kv_cache, models, weights
from jaxserve.config import EngineConfig
from jaxserve.models.schema import ModelConfig
from jaxserve.programs import StageShape
from jaxserve.scheduler import Scheduler
from jaxserve.slots import SlotPool
from jaxserve.stage import Progress, StageRunner
from jaxserve.tokenizer import Tokenizer

_DEFAULT_CONTEXT = 2048  # of models without a limit of their own


@dataclass(frozen=True, slots=True, kw_only=True)
class StartupReport:
    """What an engine settled on while it started. Sizes in bytes, tokens and slots; times in seconds."""

    device: str
    platform: str
    family: str
    parameters: int
    weight_bytes: int
    pool_bytes: int
    dtype: str
    attention: str
    attention_reason: str
    slots: int
    block_size: int
    max_rows: int
    max_context: int
    buckets: tuple[buckets.BucketCost, ...]
    load_seconds: float
    compile_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """What an engine is made of."""

    stage: StageRunner
    scheduler: Scheduler
    report: StartupReport


def silent(_what: str, _done: int, _total: int) -> None:
    """A Progress that says nothing."""


def from_checkpoint(path: str | Path, config: EngineConfig, progress: Progress) -> tuple[Started, Tokenizer | None]:
    """Loads a checkpoint directory and compiles every program (see `Engine.from_checkpoint`)."""
    started = time.perf_counter()
    model = models.build(weights.read_config(path))
    tokenizer = Tokenizer.from_directory(path)
    params = weights.load(path, model, _compute_dtype(config), progress=progress)
    return _start(config, model, params, progress, time.perf_counter() - started), tokenizer


def from_params(model_config: ModelConfig, params: Any, config: EngineConfig, progress: Progress) -> Started:
    """Compiles every program for weights in memory (see `Engine.from_params`)."""
    model, dtype = models.build(model_config), _compute_dtype(config)
    check_tree(model.shapes(dtype), params)
    return _start(config, model, jax.tree.map(partial(jnp.asarray, dtype=dtype), params), progress, 0.0)


def check_tree(expected: Any, params: Any) -> None:
    """Raises ValueError, naming the parameter, where a tree of weights has other names or shapes than expected."""
    wanted = {jax.tree_util.keystr(path): leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(expected)}
    given = {jax.tree_util.keystr(path): leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    for name in wanted.keys() | given.keys():
        if wanted.get(name) != given.get(name):
            have, want = given.get(name, "no value"), wanted.get(name, "no such parameter")
            raise ValueError(f"parameter {name} has {have}; the model has {want}")


def _start(config: EngineConfig, model: models.Model, params: Any, progress: Progress, load_seconds: float) -> Started:
    if config.compilation_cache is not None:
        jax.config.update("jax_compilation_cache_dir", config.compilation_cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    started = time.perf_counter()
    device = jax.devices()[0]
    max_context = _max_context(config, model.config)
    backend, shape, reason = attention.select(
        model.config,
        name=config.attention,
        dtype=_compute_dtype(config),
        block_size=config.block_size,
        max_context=max_context,
        platform=device.platform,
    )
    stage_shape = StageShape(
        max_rows=config.max_rows,
        n_rows=config.max_rows,
        max_context=max_context,
        attention=shape,
        backend=backend,
        scoring=config.scoring,
        looped=device.platform == "cpu" and model.config.layers_alike,
    )
    sizes = config.buckets or buckets.default_sizes(config.max_rows, config.token_budget)
    stage = StageRunner(model, params, stage_shape, sizes)
    n_blocks = _pool_blocks(config, stage, device)
    stage.compile(n_blocks, progress)
    costs = stage.measure(progress)
    scheduler = Scheduler(
        SlotPool(n_blocks, shape.block_size, policy=config.slot_policy, prefix_cache=config.prefix_cache),
        buckets.BucketLadder(costs),
        max_rows=config.max_rows,
        max_context=max_context,
        token_budget=config.token_budget,
        eos_token_ids=frozenset(model.config.eos_token_ids),
        mode=config.scheduler,
    )
    leaves = jax.tree.leaves(params)
    report = StartupReport(
        device=device.device_kind,
        platform=device.platform,
        family=model.config.family,
        parameters=sum(leaf.size for leaf in leaves),
        weight_bytes=sum(leaf.nbytes for leaf in leaves),
        pool_bytes=n_blocks * kv_cache.block_bytes(backend, shape, model.config.num_layers),
        dtype=str(_compute_dtype(config)),
        attention=backend.name,
        attention_reason=reason,
        slots=n_blocks * shape.block_size,
        block_size=shape.block_size,
        max_rows=config.max_rows,
        max_context=max_context,
        buckets=tuple(costs),
        load_seconds=load_seconds,
        compile_seconds=time.perf_counter() - started,
    )
    return Started(stage=stage, scheduler=scheduler, report=report)


def _compute_dtype(config: EngineConfig) -> jnp.dtype:
    if config.dtype == "auto":
        return jnp.dtype("float32" if jax.default_backend() == "cpu" else "bfloat16")
    return jnp.dtype(config.dtype)


def _max_context(config: EngineConfig, model_config: ModelConfig) -> int:
    limit = model_config.max_position
    if config.max_context is None:
        return limit or _DEFAULT_CONTEXT
    if limit is not None and config.max_context > limit:
        raise ValueError(f"max_context is {config.max_context}; this model has positions for {limit} tokens")
    return config.max_context


def _pool_blocks(config: EngineConfig, stage: StageRunner, device: Any) -> int:
    shape = stage.shape.attention
    if config.slots is not None:
        if config.slots < shape.block_size:
            raise ValueError(f"slots is {config.slots}, less than one block of {shape.block_size}")
        return config.slots // shape.block_size
    full_rows = config.max_rows * shape.max_blocks
    return kv_cache.fitting_blocks(
        free=kv_cache.free_bytes(device),
        temporaries=stage.temporaries(),
        bytes_a_block=kv_cache.block_bytes(stage.shape.backend, shape, stage.model.config.num_layers),
        wanted=full_rows if device.platform == "cpu" else 2**31 - 1,
    )
