"""Predicts bytes, slots, collectives and times without compiling, devices or arrays."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from jaxserve.plan import collectives, cost
from jaxserve.plan.cost import Collective, Seconds, StageLoad
from jaxserve.plan.deployment import Deployment, model_of, programs
from jaxserve.runner import kv_cache
from jaxserve.runner.lowering import StagePrograms
from jaxserve.runner.sharded_parameters import ShardedParameter, group_layers, parameters_of
from sharding.fit import check_weights

REQUEST = 2048  # tokens of a request, for "requests that fit"


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """One stage: bytes on each of its devices, by use.

    Attributes:
      layers: first layer, and one past the last.
      activations: what the largest bucket needs beside weights, pool and state.
      state: state of the rows: block tables, histories, sampling parameters.
      pool: keys and values of all slots of the plan.
      free: what remains of the usable memory.
      collectives: of one iteration; None if the compiler decides some (see `collectives.predict`).
      load: the input of the cost model.
    """

    layers: tuple[int, int]
    weights: int
    activations: int
    state: int
    pool: int
    free: int
    parts: tuple[ShardedParameter, ...]
    collectives: tuple[Collective, ...] | None
    load: StageLoad

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot."""
        return self.load.slot_bytes

    @property
    def total(self) -> int:
        """Bytes in use on each device."""
        return self.weights + self.activations + self.state + self.pool


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketPlan:
    """One iteration of a bucket that holds decodes and then prompt tokens.

    Attributes:
      stages: the time of each stage by cause.
      tokens_per_second: with every stage busy and all replicas together; prompt tokens count too.
    """

    tokens: int
    decodes: int
    stages: tuple[Seconds, ...]
    tokens_per_second: float

    @property
    def milliseconds(self) -> float:
        """Milliseconds of one iteration through all stages."""
        return 1e3 * sum(stage.total for stage in self.stages)

    @property
    def slowest(self) -> int:
        """Index of the slowest stage, which limits the throughput."""
        return max(range(len(self.stages)), key=lambda stage: self.stages[stage].total)

    @property
    def bottleneck(self) -> str:
        """The largest part of the slowest stage's time: compute, memory, links or overhead."""
        return self.stages[self.slowest].bottleneck


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that was predicted of a deployment.

    Attributes:
      parameters: parameters of the model, without padding.
      padding: logical axis -> (size in the model, padded size).
      memory: bytes of a device, and how many of them may be used.
      slots: slots that fit on every stage, in whole blocks.
    """

    deployment: Deployment
    parameters: int
    padding: Mapping[str, tuple[int, int]]
    memory: tuple[int, int]
    block_size: int
    kv_cache_dtype: str
    slots: int
    stages: tuple[StagePlan, ...]
    buckets: tuple[BucketPlan, ...]

    @property
    def requests(self) -> int:
        """Requests of 2,048 tokens that the slots of one replica hold at once."""
        return self.slots // REQUEST


def predict(deployment: Deployment) -> Plan:
    """Predict the memory and the speed of the engine.

    Raises:
      ValueError: the deployment is not possible (see `programs`), or the weights do not fit (see `check_weights`).
    """
    stages = programs(deployment)
    attention = stages[0].shape.attention
    memory = deployment.topology.device.memory
    usable = int(memory * kv_cache.ACCELERATOR_SHARE)
    held = [_held(stage, usable, deployment) for stage in stages]
    blocks = [
        (usable - each.weights - each.activations - each.state) // (each.slot_bytes * attention.block_size)
        for each in held
    ]
    n_blocks = min(blocks) if deployment.engine.slots is None else deployment.engine.slots // attention.block_size
    if n_blocks < 1 or n_blocks > min(blocks):
        raise ValueError(_no_room(deployment, held[blocks.index(min(blocks))], usable, n_blocks * attention.block_size))
    slots = n_blocks * attention.block_size
    plans = tuple(_with_pool(each, slots, usable) for each in held)
    return Plan(
        deployment=deployment,
        parameters=sum(leaf.size for leaf in jax.tree.leaves(model_of(deployment.config).shapes(attention.dtype))),
        padding=deployment.padding(),
        memory=(memory, usable),
        block_size=attention.block_size,
        kv_cache_dtype=str(attention.pool_dtype),
        slots=slots,
        stages=plans,
        buckets=tuple(_bucket(deployment, [each.load for each in held], tokens) for tokens in deployment.buckets),
    )


def activation_bytes(stage: StagePrograms, parts: Mapping[str, ShardedParameter], bucket: int) -> int:
    """Bytes on a device that one iteration needs beside its arguments, at its peak.

    They hold hidden states in, out and between; the widest inner state in float32 and its rounded copy; and, in the
    last stage, the logits, both partial and whole.
    """
    config, attention = stage.model.padded_config, stage.shape.attention
    inner = max(part.local[0] for name, part in parts.items() if name.startswith("layers.") and len(part.local) == 2)
    item = attention.dtype.itemsize
    tokens = bucket * (3 * config.hidden_size * item + inner * (4 + item))
    if not stage.is_last:
        return tokens
    rows = min(bucket, stage.shape.max_rows)
    return tokens + 4 * rows * (config.vocab_size + collectives.head_table(parts).local[0])


def _held(stage: StagePrograms, usable: int, deployment: Deployment) -> StagePlan:
    parts = parameters_of(stage)
    check_weights(parts.values(), usable, f"{deployment.topology.device.name} device")
    attention = stage.shape.attention
    block = kv_cache.block_bytes(stage.shape.backend, attention, len(stage.layers))
    sent = collectives.predict(stage, parts)
    return StagePlan(
        layers=(stage.layers.start, stage.layers.stop),
        weights=sum(part.nbytes for part in parts.values()),
        activations=activation_bytes(stage, parts, deployment.buckets[-1]),
        state=_bytes(stage.state()),
        pool=0,
        free=usable,
        parts=group_layers(parts.values()),
        collectives=sent,
        load=_load(stage, parts, sent or (), block // attention.block_size),
    )


def _with_pool(stage: StagePlan, slots: int, usable: int) -> StagePlan:
    filled = replace(stage, pool=slots * stage.slot_bytes)
    return replace(filled, free=usable - filled.total)


def _load(
    stage: StagePrograms, parts: Mapping[str, ShardedParameter], sent: tuple[Collective, ...], slot_bytes: int
) -> StageLoad:
    """The cost model's input from the stage's parameters."""
    shape = stage.shape.attention
    kernels = [part for part in parts.values() if part.name.endswith(".kernel")]
    head = collectives.head_table(parts) if stage.is_last else None
    read = [*[part for part in parts.values() if not part.name.endswith(".table")], *([head] if head else [])]
    return StageLoad(
        layers=len(stage.layers),
        weight_bytes=sum(part.nbytes for part in read),
        token_ops=2 * sum(math.prod(part.local) for part in kernels),
        row_ops=2 * math.prod(head.local) if head else 0,
        slot_ops=4 * len(stage.layers) * shape.num_heads * shape.head_dim,
        slot_bytes=slot_bytes,
        collectives=sent,
        hop_bytes=0 if stage.is_last else stage.model.config.hidden_size * shape.dtype.itemsize,
        tensor=stage.mesh.size,
    )


def _bucket(deployment: Deployment, loads: Sequence[StageLoad], tokens: int) -> BucketPlan:
    """An iteration that decodes every row and fills the rest of the bucket with prompts."""
    context = min(deployment.context, deployment.max_context - 1)
    decodes = min(tokens, deployment.engine.max_rows)
    chunks = [(context, 1)] * decodes
    for start in range(decodes, tokens, deployment.max_context):
        chunks.append((0, min(deployment.max_context, tokens - start)))
    work = cost.work(chunks)
    stages = tuple(cost.stage_seconds(load, deployment.topology, work, dtype=deployment.dtype) for load in loads)
    pace = max(stage.total for stage in stages)
    return BucketPlan(
        tokens=tokens, decodes=decodes, stages=stages, tokens_per_second=deployment.engine.replicas * tokens / pace
    )


def _no_room(deployment: Deployment, stage: StagePlan, usable: int, slots: int) -> str:
    used = stage.weights + stage.activations + stage.state
    asked = f"; {slots} slots take {slots * stage.slot_bytes / 2**30:.2f} GiB" if slots > 0 else ""
    return (
        f"no room for keys and values: of {usable / 2**30:.2f} GiB that may be used of a "
        f"{deployment.topology.device.name} device, weights take {stage.weights / 2**30:.2f} GiB and one iteration "
        f"{(used - stage.weights) / 2**30:.2f} GiB{asked}; use more devices, fewer rows or smaller buckets"
    )


def _bytes(tree: Any) -> int:
    """Bytes on each device of shapes with shardings."""
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
