"""Predicts the memory that one iteration takes beside weights, pool and row state."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

import numpy as np

from jaxserve.planning import collectives
from jaxserve.runner import expert_parts, kv_cache, rings
from jaxserve.runner.lowering import StagePrograms
from jaxserve.runner.sharded_parameters import ShardedParameter, is_of_experts
from sharding.devices import Device, kind_of
from sharding.spec import Target, names
from sharding.spec import parts as spec_parts

# TPUs hold a table of 16 KiB for each result of several arrays: 0.1 to 2.4 MiB a layer in what was compiled.
_TABLES = 3 * 2**18
_INT8 = np.dtype(np.int8)
_ON_CHIP = 128 * 2**20  # most memory of a TPU's chip that holds gathered weights in place of the device's memory


def activation_bytes(stage: StagePrograms, parts: Mapping[str, ShardedParameter], device: Device, bucket: int) -> int:
    """Bytes on a device that one iteration needs beside its arguments, at its peak.

    These are three hidden states (around rings on TPUs, their parts), the widest inner state in float32 and its rounded
    copy, the gathered weights of a layer and, in the last stage, the logits of this device and of all devices, which
    come after the last layer's weights. To join logits, TPUs gather and copy them, both on the chip if they fit there.
    With experts, the inner states may be those of `_expert_bytes`. On TPUs there are tables for each layer.
    """
    config, attention = stage.model.padded_config, stage.shape.attention
    inner = max(part.local[0] for name, part in parts.items() if name.startswith("layers.") and len(part.local) == 2)
    item = attention.dtype.itemsize
    widest = max(bucket * inner * (4 + item), _expert_bytes(stage, parts, device, bucket))
    hidden, gathered = bucket * config.hidden_size * item, _gathered_bytes(stage, parts)
    if stage.platform == "tpu" and rings.ring_axes(stage.mesh, stage.spec, stage.platform):
        hidden //= spec_parts(stage.spec.activations.get("embed"), stage.mesh.shape)
    tokens = 3 * hidden + widest
    tokens += _TABLES * len(stage.layers) if stage.platform == "tpu" else 0
    if not stage.is_last:
        return tokens + gathered
    own, rows = collectives.head_table(parts).local[0], min(bucket, stage.shape.max_rows)
    logits = 4 * rows * config.vocab_size
    joined = 2 * logits if stage.platform == "tpu" and own < config.vocab_size else 0
    return tokens + max(gathered, logits + 4 * rows * own + (joined if joined > device.on_chip else 0))


def are_known(stage: StagePrograms, parts: Mapping[str, ShardedParameter]) -> bool:
    """Whether the compiler keeps the spec's weights as they are, as `activation_bytes` assumes.

    It makes them whole where tokens and "embed" go over a mesh axis both, or a layer's heads over other mesh axes than
    the pool's (those of the attention's output, than its result's). Of gathered weights, XLA's CPU compiler keeps more
    or less than all at once, and TPUs keep them on the chip where they fit.
    """
    tokens = _split(stage, stage.spec.activations.get("tokens"))
    pool_heads = _split(stage, kv_cache.head_target(stage.mesh, stage.spec))
    layers = [part for name, part in parts.items() if name.startswith("layers.")]
    for part in layers:
        given = pool_heads
        if part.name.endswith(".out.kernel"):
            given = _split(stage, kv_cache.attended(stage.mesh, stage.spec, part.name)[0][1])
        for axis, target in zip(part.axes, part.partition, strict=True):
            over = _split(stage, target)
            if axis == "embed" and set(over) & set(tokens):
                return False
            if axis in ("heads", "kv_heads") and over and given and over != given:
                return False
    gathered = [part for part in layers if any(set(names(each)) & set(stage.spec.gather) for each in part.partition)]
    if stage.platform == "tpu":
        return not 0 < _gathered_bytes(stage, parts) <= _ON_CHIP
    return stage.platform != "cpu" or not gathered


def _split(stage: StagePrograms, target: Target) -> tuple[str, ...]:
    """The mesh axes of more than one device that a target goes over."""
    return tuple(axis for axis in names(target) if stage.mesh.shape[axis] > 1)


def _gathered_bytes(stage: StagePrograms, parts: Mapping[str, ShardedParameter]) -> int:
    """Bytes of a layer's weights that are gathered to use them.

    XLA's CPU compiler gathers all layers' at once, and copies the slice of a kernel that a part of "embed" meets, in
    all layers but the first, which gets whole hidden states; around rings, of all kernels.
    """
    layers: Counter[int] = Counter()
    for part in parts.values():
        over = [axis for target in part.partition for axis in names(target) if axis in stage.spec.gather]
        if part.name.startswith("layers.") and over:
            times = math.prod(stage.mesh.shape[axis] for axis in over)
            layers[int(part.name.split(".")[1])] += part.nbytes * times if times > 1 else 0
    if stage.platform != "cpu":
        return max(layers.values(), default=0)
    kernels = [part for part in parts.values() if part.name.startswith("layers.") and len(part.local) == 2]
    ring = rings.ring_axes(stage.mesh, stage.spec, stage.platform)
    around = [part for part in kernels if rings.split_axis(part.partition, stage.mesh, ring) is not None]
    slices = spec_parts(stage.spec.activations.get("embed"), stage.mesh.shape)
    largest = max((part.nbytes for part in kernels if part not in around), default=0)
    copied = (len(stage.layers) - 1) * (largest // slices) if slices > 1 else 0
    return layers.total() + sum(part.nbytes for part in around) + copied


def _expert_bytes(stage: StagePrograms, parts: Mapping[str, ShardedParameter], device: Device, bucket: int) -> int:
    """Bytes of what the experts of a layer compute, at its peak; 0 without experts.

    Every token has a row for each of its experts. At the end there are two results in float32, sorted by expert and by
    token (on GPUs one, but more hidden states, whose sums the compiler puts off). Before, there are the input and the
    two projections in float32, on CPUs also their inner state. The kernels of TPUs round the results and make the inner
    state at once; of few tokens, there is the inner state of all for each expert. Without these kernels, XLA's ragged
    product widens int8 kernels, one stack at a time.
    """
    config, shape = stage.model.padded_config, stage.shape.attention
    item = shape.dtype.itemsize
    stacks = [part.local for part in parts.values() if is_of_experts(part.axes) and len(part.local) == 3]
    if not stacks:
        return 0
    inner = next(part.local[1] for name, part in parts.items() if name.endswith("experts.up.kernel"))
    rows = bucket * config.experts_per_token
    kernels, values = (stacks[0][0], inner, config.hidden_size), shape.dtype if stage.quantize is None else _INT8
    kind = kind_of(device) if stage.platform == "tpu" else ""
    if expert_parts.are_routed(bucket, config.experts_per_token, kernels, (shape.dtype, values), kind):
        if device.matrix_unit is not None and bucket <= device.matrix_unit:
            return bucket * stacks[0][0] * inner * item
        return rows * item * (config.hidden_size + max(inner, config.hidden_size))
    widened = max(map(math.prod, stacks)) * item if stage.quantize is not None and stage.platform == "tpu" else 0
    if stage.platform == "cpu":  # which takes the kernel of one expert at a time out of its stack
        widened = max(math.prod(stack[1:]) for stack in stacks) * 4 + rows * inner * item
    return max(rows * 8 * config.hidden_size, rows * (8 * inner + config.hidden_size * item) + widened)
