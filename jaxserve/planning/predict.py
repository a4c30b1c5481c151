"""Predicts bytes, slots, collectives and times without compiling, devices or arrays."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp

from jaxserve.config import EngineConfig
from jaxserve.models.schema import ModelConfig
from jaxserve.planning import collectives
from jaxserve.planning.activations import activation_bytes, are_known
from jaxserve.planning.cost import Roofline
from jaxserve.planning.deployment import Deployment, model_of, programs
from jaxserve.planning.plan import Plan, StagePlan, bucket_plan
from jaxserve.planning.stage_load import AttentionLoad, ExpertLoad, StageLoad
from jaxserve.runner import expert_parts, kv_cache
from jaxserve.runner.layout import bucket_sizes, for_buckets
from jaxserve.runner.lowering import StagePrograms
from jaxserve.runner.sharded_parameters import (
    ShardedParameter,
    group_layers,
    is_of_experts,
    parameters_of_stages,
)
from jaxserve.scheduler import buckets
from jaxserve.weights import naming
from sharding.devices import Topology
from sharding.fit import check_weights
from sharding.spec import names

# How often the sampler reads all logits, in float32, where no row drops tokens or has penalties: for the largest of
# blocks, for the weights of blocks to draw from, and for the sum under the logprob.
SAMPLER_PASSES = 3
_PROMPT = 1024  # tokens of the prompts that the default buckets are chosen for
_ACTIVATION_SHARE = 1 / 64  # of a device's memory that the largest default bucket may take


def predict(deployment: Deployment) -> Plan:
    """Predict the memory and the speed of the engine.

    Raises:
      ValueError: the deployment is not possible (see `programs`), or the weights do not fit (see `check_weights`).
    """
    programs_of_stages = programs(deployment)
    engine, reason = with_buckets(deployment.engine, programs_of_stages, deployment.topology)
    deployment = replace(deployment, engine=engine)
    programs_of_stages = for_buckets(programs_of_stages, deployment.buckets)
    attention = programs_of_stages[0].shape.attention
    memory = deployment.topology.device.memory
    usable = int(memory * kv_cache.ACCELERATOR_SHARE)
    parts = parameters_of_stages(programs_of_stages)
    grouped = group_layers([each.values() for each in parts])
    stages = [_stage(*each, usable, deployment) for each in zip(programs_of_stages, parts, grouped, strict=True)]
    blocks = [
        kv_cache.most_blocks(stage.pool_bytes, usable - each.total)
        for stage, each in zip(programs_of_stages, stages, strict=True)
    ]
    row_parts = programs_of_stages[0].shape.groups.parts
    n_blocks = min(blocks) if deployment.engine.slots is None else deployment.engine.slots // attention.block_size
    n_blocks = n_blocks // row_parts * row_parts
    slots = n_blocks * attention.block_size
    if n_blocks < 1 or n_blocks > min(blocks):
        least = blocks.index(min(blocks))
        asked = programs_of_stages[least].pool_bytes(n_blocks) if n_blocks > 0 else 0
        raise ValueError(_no_memory(deployment, stages[least], usable, slots, asked))
    num_parameters, num_active = count_parameters(deployment.config)
    plan = Plan(
        deployment=deployment,
        num_parameters=num_parameters,
        num_active=num_active,
        padding=deployment.padding(),
        memory=(memory, usable),
        groups=programs_of_stages[0].shape.groups,
        kv_cache_dtype=str(attention.pool_dtype),
        slots=slots,
        stages=tuple(
            each.with_pool(stage.pool_bytes(n_blocks), usable)
            for stage, each in zip(programs_of_stages, stages, strict=True)
        ),
        buckets=(),
        buckets_reason=reason,
    )
    roofline = plan.roofline() if plan.is_known else None
    return replace(plan, buckets=tuple(bucket_plan(deployment, roofline, tokens) for tokens in deployment.buckets))


def with_buckets(
    engine: EngineConfig, stages: Sequence[StagePrograms], topology: Topology | None
) -> tuple[EngineConfig, str]:
    """The settings with the buckets to compile, and why these, in words.

    Where buckets or a token budget are given, they stand. Otherwise the ladder goes up while the roofline says that a
    larger bucket makes a token cheaper (see `buckets.doublings_that_pay`), and the bucket's activations are small.

    Args:
      topology: the devices; None if they are none whose speed is known, such as CPUs.
    """
    if engine.buckets is not None or engine.token_budget is not None or engine.deterministic:
        return engine, "as given"
    unknown = replace(engine, buckets=bucket_sizes(engine)), "the default sizes: there is no cost model for this device"
    if topology is None:
        return unknown
    parts = list(zip(stages, parameters_of_stages(stages), strict=True))
    loads = [_load(*each, topology, bucket_sizes(engine)[-1]) for each in parts]
    if any(load.collectives is None for load in loads):
        return unknown
    roofline = Roofline(loads, topology, dtype=str(parts[0][0].shape.attention.dtype))

    def seconds(tokens: int) -> float:
        if any(
            activation_bytes(*each, topology.device, tokens) > _ACTIVATION_SHARE * topology.device.memory
            for each in parts
        ):
            return math.inf
        prompts = [(0, min(_PROMPT, tokens - start)) for start in range(0, tokens, _PROMPT)]
        return max(stage.total for stage in roofline(prompts))

    sizes = bucket_sizes(engine, buckets.doublings_that_pay(bucket_sizes(engine)[-1], seconds))
    top = sizes[-1]
    once, twice = seconds(top), seconds(2 * top)
    more = "too much memory" if math.isinf(twice) else f"{1e3 * twice:.0f} ms, {1 - twice / 2 / once:.1%} less a token"
    return replace(engine, buckets=sizes), (
        f"up to {top:,} tokens by the roofline of {topology.device.name}: {1e3 * once:.0f} ms; {2 * top:,} would take "
        f"{more}"
    )


@functools.cache
def count_parameters(config: ModelConfig) -> tuple[int, int]:
    """(parameters of a model, parameters that one token uses)."""
    total = active = 0
    for _, shape, axes, _ in naming.parameters(model_of(config), jnp.dtype(jnp.float32)):
        share = config.experts_per_token / config.num_experts if is_of_experts(axes) else 1
        total, active = total + shape.size, active + round(shape.size * share)
    return total, active


def _stage(
    stage: StagePrograms,
    parts: Mapping[str, ShardedParameter],
    grouped: tuple[ShardedParameter, ...],
    usable: int,
    deployment: Deployment,
) -> StagePlan:
    """A stage without its pool."""
    check_weights(parts.values(), usable, f"{deployment.topology.device.name} device")
    state = jax.tree.leaves(stage.state())
    return StagePlan(
        layers=(stage.layers.start, stage.layers.stop),
        weights=sum(part.nbytes for part in parts.values()),
        activations=activation_bytes(stage, parts, deployment.topology.device, deployment.buckets[-1]),
        state=sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in state),
        parameters=grouped,
        load=_load(stage, parts, deployment.topology, deployment.buckets[-1]),
        activations_known=are_known(stage, parts),
    )


def _load(stage: StagePrograms, parts: Mapping[str, ShardedParameter], topology: Topology, bucket: int) -> StageLoad:
    """The cost model's input: the stage's parameters and the collectives of a bucket's program."""
    shape, config = stage.shape.attention, stage.model.config
    head = collectives.head_table(parts) if stage.is_last else None
    read = [*(part for part in parts.values() if not part.name.endswith(".table")), *([head] if head else [])]
    of_experts = [part for part in read if is_of_experts(part.axes)]
    layers = Counter(config.window(layer) for layer in stage.layers)
    attention = (
        AttentionLoad(
            window=window,
            slot_ops=4 * count * shape.num_heads * shape.head_dim / shape.slot_parts,
            slot_bytes=kv_cache.pool_bytes(stage.shape.backend, shape, count) // shape.block_size,
        )
        for window, count in layers.items()
    )
    unit = topology.device.matrix_unit if stage.platform == "tpu" else None
    experts = ExpertLoad(
        num_experts=config.num_experts,
        per_token=config.experts_per_token,
        weight_bytes=sum(part.nbytes for part in of_experts),
        token_ops=_ops(of_experts, stage) * config.experts_per_token / max(config.num_experts, 1),
        tile_rows=expert_parts.tile_rows(stage.platform, unit, shape.dtype),
        shares_rows=unit is not None,
    )
    return StageLoad(
        layers=len(stage.layers),
        weight_bytes=sum(part.nbytes for part in read) - experts.weight_bytes,
        token_ops=_ops((part for part in read if not is_of_experts(part.axes)), stage),
        row_ops=2 * math.prod(head.local) if head else 0,
        attention=tuple(attention),
        experts=experts if of_experts else None,
        collectives=collectives.predict(stage, parts, topology, bucket),
        head_bytes=head.nbytes if head else 0,
        sampled_bytes=4 * SAMPLER_PASSES * config.vocab_size if stage.is_last else 0,
        row_parts=stage.shape.groups.parts,
        hop_bytes=0 if stage.is_last else config.hidden_size * shape.dtype.itemsize,
        mesh=dict(stage.mesh.shape),
    )


def _ops(parts: Iterable[ShardedParameter], stage: StagePrograms) -> float:
    """Operations of a token in the matmuls of these parameters.

    Where tokens are split over mesh axes that a parameter is not, each device has its share of the tokens.
    """
    tokens = kv_cache.over(stage.mesh, stage.spec.activations.get("tokens"))

    def shares(part: ShardedParameter) -> int:
        taken = {axis for target in part.partition for axis in names(target)}
        return math.prod(stage.mesh.shape[axis] for axis in tokens if axis not in taken)

    return 2 * sum(math.prod(part.local) / shares(part) for part in parts if part.name.endswith(".kernel"))


def _no_memory(deployment: Deployment, stage: StagePlan, usable: int, slots: int, pool: int) -> str:
    asked = f"; {slots} slots take {pool / 2**30:.2f} GiB" if pool else ""
    return (
        f"no memory left for keys and values: of the usable {usable / 2**30:.2f} GiB of a "
        f"{deployment.topology.device.name} device, weights take {stage.weights / 2**30:.2f} GiB and one iteration "
        f"{(stage.total - stage.weights) / 2**30:.2f} GiB{asked}; use more devices, fewer rows or smaller buckets"
    )
