"""Starts an engine: loads weights, chooses sizes, compiles, measures buckets, reports."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve import models, weights
from jaxserve.config import EngineConfig
from jaxserve.loop import EngineLoop
from jaxserve.models.schema import ModelConfig
from jaxserve.planning.predict import with_buckets
from jaxserve.runner import cache_folder, kv_cache, native_kernels
from jaxserve.runner.draft_model import DraftModel, check_draft_model, draft_runner
from jaxserve.runner.host_blocks import DEVICE_BYTES, HostBlocks, block_bytes
from jaxserve.runner.layout import bucket_sizes, for_buckets, lay_out
from jaxserve.runner.lowering import StagePrograms
from jaxserve.runner.measure import measure_buckets
from jaxserve.runner.pipeline import Pipeline
from jaxserve.runner.program_cache import ProgramCache
from jaxserve.runner.sharded_parameters import parameters_of, placement
from jaxserve.runner.stage import Progress, StageRunner
from jaxserve.scheduler import buckets
from jaxserve.scheduler.factory import make_scheduler
from jaxserve.startup_report import StartupReport
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.weights import is_matrix
from sharding import mesh, specs
from sharding.devices import of_kind
from sharding.fit import check_weights
from sharding.spec import read as read_spec


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """The loops and the start-up report from which an Engine is made."""

    loops: tuple[EngineLoop, ...]
    report: StartupReport


def is_user_error(problem: Exception) -> bool:
    """Whether a start failed over a setting, a file or memory, rather than a defect of ours."""
    if isinstance(problem, RuntimeError):
        return "RESOURCE_EXHAUSTED" in str(problem)  # jax reports a full device as JaxRuntimeError
    return isinstance(problem, ValueError | OSError | MemoryError)


def silent(_what: str, _done: int, _total: int) -> None:
    """A Progress that says nothing."""


def from_checkpoint(path: str | Path, config: EngineConfig, progress: Progress) -> tuple[EngineParts, Tokenizer | None]:
    """Loads a checkpoint directory and compiles every program (see `Engine.from_checkpoint`)."""
    started = time.perf_counter()
    model = models.build(weights.read_config(path))
    with native_kernels.compiling(progress) as is_compiled:  # where weights go depends on the kernels
        tokenizer = Tokenizer.from_directory(path)
        weights.read_ahead(path, until=is_compiled)
    replicas, reason = replica_programs(config, model)
    programs = replicas[0]
    device = programs[0].mesh.devices.flat[0]
    for stage in programs:
        free = kv_cache.free_weight_bytes(device, config.num_devices)
        check_weights(parameters_of(stage).values(), free, f"{device.device_kind} device")
    params = weights.load(
        path,
        programs[0].model,
        compute_dtype(config),
        place=placement(programs),
        quantize=programs[0].quantize,
        progress=progress,
    )
    return start(config, replicas, reason, params, progress, time.perf_counter() - started), tokenizer


def from_params(model_config: ModelConfig, params: Any, config: EngineConfig, progress: Progress) -> EngineParts:
    """Compiles every program for weights in memory (see `Engine.from_params`)."""
    if config.compilation_cache == cache_folder.AUTO:
        config = dataclasses.replace(config, compilation_cache=None)
    model = models.build(model_config)
    check_tree(model.shapes(compute_dtype(config)), params, quantized=config.quantize is not None)
    return start(config, *replica_programs(config, model), params, progress, 0.0)


def check_tree(expected: Any, params: Any, *, quantized: bool = False) -> None:
    """ValueError, naming the parameter, where weights have other names or shapes than expected.

    Args:
      quantized: whether matrices may be quantized already.
    """
    is_leaf = is_matrix if quantized else None
    wanted, given = (
        {jax.tree_util.keystr(path): leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf)}
        for tree in (expected, params)
    )
    for name in dict.fromkeys([*wanted, *given]):
        if wanted.get(name) != given.get(name):
            have, want = given.get(name, "no value"), wanted.get(name, "no such parameter")
            raise ValueError(f"parameter {name} has {have}; the model has {want}")


def replica_programs(config: EngineConfig, model: models.Model) -> tuple[list[list[StagePrograms]], str]:
    """Each replica's stages (layers, devices, programs), and why this attention backend.

    No weight is read (see `layout.lay_out`). A drafting model, if there is one, is checked against the model.
    """
    spec = specs.default(model.config.family)
    if config.sharding is not None:
        spec = read_spec(config.sharding, spec)
    replicas, reason = [], ""
    for meshes in mesh.make_meshes(config.stage_axes, config.stages, config.replicas):
        platform = meshes[0].devices.flat[0].platform
        programs, reason = lay_out(config, model, meshes, spec, dtype=compute_dtype(config), platform=platform)
        replicas.append(programs)
    if config.draft_model is not None:
        check_draft_model(config.draft_model, replicas[0][0])
    return replicas, reason


def start(
    config: EngineConfig,
    replicas: Sequence[Sequence[StagePrograms]],
    attention_reason: str,
    params: Any,
    progress: Progress,
    load_seconds: float,
) -> EngineParts:
    """Places the weights, compiles every program and measures the buckets.

    Args:
      replicas / attention_reason: what `replica_programs` returned.
      params: wherever they are.
      load_seconds: what reading them took, for the report.
    """
    cache = program_cache(config)
    started = time.perf_counter()
    config, buckets_reason = settled_buckets(config, replicas[0])
    sizes = bucket_sizes(config)
    replicas = [for_buckets(programs, sizes) for programs in replicas]
    pipelines = [[StageRunner(stage, params, sizes, cache) for stage in programs] for programs in replicas]
    runners = [runner for stages in pipelines for runner in stages]
    drafters = []
    if config.draft_model is not None:
        drafters = [draft_runner(config, programs[0], cache, progress) for programs in replicas]
    progress("compiling", 0, 1)  # how much memory the largest program leaves decides the shapes of all
    n_blocks = min(pool_blocks(config, runner, drafters) for runner in runners)
    for runner in runners:
        runner.compile(n_blocks, progress, host_copies=config.host_cache is not None)
    for runner in drafters:
        runner.compile(n_blocks, progress)
    if cache is not None:
        cache.forget()
    return finish(
        config,
        [Pipeline(stages) for stages in pipelines],
        drafters,
        n_blocks,
        progress,
        copying=pipelines if config.host_cache is not None else (),
        attention_reason=attention_reason,
        buckets_reason=buckets_reason,
        programs_loaded=0 if cache is None else cache.loaded,
        load_seconds=load_seconds,
        compile_seconds=time.perf_counter() - started,
    )


def settled_buckets(config: EngineConfig, programs: Sequence[StagePrograms]) -> tuple[EngineConfig, str]:
    """The settings with buckets for these devices, and the reason (see `predict.with_buckets`)."""
    device = programs[0].mesh.devices.flat[0]
    return with_buckets(config, programs, of_kind(device.device_kind, config.num_devices))


def program_cache(config: EngineConfig) -> ProgramCache | None:
    """Where compiled programs are kept, if they are; without a folder, for other replicas only."""
    folder = cache_folder.of(config.compilation_cache)
    if folder is None:
        shared = config.replicas > 1 and jax.default_backend() != "tpu"  # whose replicas share no programs
        return ProgramCache(None) if shared else None
    if jax.process_count() > 1:  # a program of several processes is not whole in any of them, but jax keeps them too
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return ProgramCache(folder)


def finish(
    config: EngineConfig,
    pipelines: Sequence[Pipeline],
    drafters: Sequence[StageRunner],
    n_blocks: int,
    progress: Progress,
    *,
    copying: Sequence[Sequence[StageRunner]] = (),
    attention_reason: str,
    buckets_reason: str,
    programs_loaded: int,
    load_seconds: float,
    compile_seconds: float,
) -> EngineParts:
    """Measures the buckets of compiled pipelines, and puts a scheduler before each.

    Args:
      drafters: as many as pipelines, or none.
      copying: the stages of each pipeline, if blocks are copied to the host.
    """
    started = time.perf_counter()
    stages = pipelines[0].stages
    first = stages[0].programs
    model, shape, device = first.model, first.shape, first.mesh.devices.flat[0]
    costs, slot_milliseconds = measure_buckets(pipelines[0], n_blocks, progress)
    drafting: list[DraftModel | None] = [None] * len(pipelines)
    if drafters:
        ladder = buckets.BucketLadder(measure_buckets(Pipeline(drafters[:1]), n_blocks, progress)[0])
        drafting = [DraftModel(runner, ladder, n_blocks) for runner in drafters]
    hosts: list[HostBlocks | None] = [None] * len(pipelines)
    bytes_of_blocks: list[int] = []
    if copying:
        hosts = [HostBlocks(runners) for runners in copying]
        bytes_of_blocks = block_bytes(copying[0], shape.groups.count)
    schedulers = [
        make_scheduler(
            config,
            costs,
            slot_milliseconds=slot_milliseconds,
            n_blocks=n_blocks,
            groups=shape.groups,
            eos_token_ids=frozenset(model.config.eos_token_ids),
            drafter=drafter,
            block_bytes=bytes_of_blocks,
        )
        for drafter in drafting
    ]
    leaves = jax.tree.leaves(model.unpadded.shapes(shape.attention.dtype))
    every = [*(stage for pipeline in pipelines for stage in pipeline.stages), *drafters]
    report = StartupReport(
        device=device.device_kind,
        platform=device.platform,
        tensor=config.stage_devices,
        layers_per_stage=tuple(len(stage.programs.layers) for stage in stages),
        replicas=len(pipelines),
        family=model.config.family,
        parameters=sum(leaf.size for leaf in leaves),
        padding=_padding(model),
        weight_bytes=sum(_bytes_held(stage.params) for stage in every),
        pool_bytes=sum(_bytes_held(stage.pool) for stage in every),
        dtype=str(compute_dtype(config)),
        quantize=config.quantize,
        kv_cache_dtype=str(shape.attention.pool_dtype),
        attention=shape.backend.name,
        attention_reason=attention_reason,
        buckets_reason=buckets_reason,
        slots=n_blocks * shape.attention.block_size,
        block_size=shape.attention.block_size,
        max_rows=config.max_rows,
        max_context=shape.max_context,
        buckets=tuple(costs),
        decode_buckets=shape.decode_buckets(stages[0].buckets),
        slot_milliseconds=slot_milliseconds,
        load_seconds=load_seconds,
        compile_seconds=compile_seconds,
        measure_seconds=time.perf_counter() - started,
        programs=sum(stage.num_programs for pipeline in pipelines for stage in pipeline.stages),
        programs_loaded=programs_loaded,
        pool_parts=shape.groups.parts,
    )
    parts = enumerate(zip(pipelines, schedulers, hosts, strict=True))
    made = tuple(EngineLoop(index, pipeline, scheduler, costs, host) for index, (pipeline, scheduler, host) in parts)
    return EngineParts(loops=made, report=report)


def _padding(model: models.Model) -> str:
    own, held = model.unpadded.axis_sizes(), model.axis_sizes()
    return ", ".join(f"{axis} {own[axis]:,} held as {held[axis]:,}" for axis in own if held[axis] != own[axis])


def _bytes_held(tree: Any) -> int:
    """Bytes of arrays, or of what they are described by, on all their devices, copies counted."""
    return sum(
        len(leaf.sharding.device_set) * weights.nbytes(leaf, leaf.sharding.shard_shape(leaf.shape))
        for leaf in jax.tree.leaves(tree)
    )


def compute_dtype(config: EngineConfig) -> jnp.dtype:
    """What arithmetic is done in; `auto` goes by the devices."""
    if config.dtype == "auto":
        return jnp.dtype("float32" if jax.default_backend() == "cpu" else "bfloat16")
    return jnp.dtype(config.dtype)


def pool_blocks(config: EngineConfig, stage: StageRunner, drafters: Sequence[StageRunner]) -> int:
    """Blocks of the first cache group that every device of a stage can hold.

    As many of the model that drafts on it fit too.
    """
    programs = stage.programs
    shape, parts = programs.shape.attention, programs.shape.groups.parts
    if config.slots is not None:
        least = shape.block_size * parts
        if config.slots < least:
            each = f" in each of {parts} parts" if parts > 1 else ""
            raise ValueError(f"slots is {config.slots}, less than one block of {shape.block_size}{each}")
        return config.slots // least * parts
    device = programs.mesh.local_devices[0]
    full_rows = -(-programs.shape.n_rows // parts) * shape.max_blocks
    on_cpu = device.platform == "cpu"  # whose virtual devices share its memory
    held = (programs, *(runner.programs for runner in drafters[:1]))
    free = kv_cache.free_bytes(device) // (config.num_devices if on_cpu else 1)
    if config.host_cache is not None and not on_cpu:
        free -= 2 * DEVICE_BYTES  # in both directions
    return parts * kv_cache.fitting_blocks(
        free=free,
        temporaries=stage.temporaries(),
        pool_bytes=lambda n_blocks: sum(each.pool_bytes(parts * n_blocks) for each in held),
        wanted=full_rows if on_cpu else 2**31 - 1,
    )
