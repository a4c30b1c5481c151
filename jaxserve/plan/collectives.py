"""Predicts the collectives of a stage from its sharding spec."""

from __future__ import annotations

from collections.abc import Mapping

from jaxserve.plan.cost import Collective
from jaxserve.runner import kv_cache
from jaxserve.runner.lowering import StagePrograms
from jaxserve.runner.sharded_parameters import ShardedParameter


def predict(stage: StagePrograms, parts: Mapping[str, ShardedParameter]) -> tuple[Collective, ...] | None:
    """The collectives of one iteration of a stage; None if the compiler decides some of them.

    The compiler decides if the spec splits "embed" or the hidden states between the layers.

    A matmul whose summed axis is split leaves partial sums, so its result needs one all-reduce. A lookup in a table
    whose rows are split is a sum as well. A split result is gathered if the next operation needs it whole. A whole
    result is cut, at no cost, if the next operation needs it split.

    Args:
      parts: the stage's parameters by name.
    """
    if any(part.split(axis) for part in parts.values() for axis in ("embed", "word_embed")):
        return None
    if any(stage.spec.activations.values()):
        return None
    config, item = stage.model.padded_config, stage.shape.attention.dtype.itemsize
    hidden, heads = config.hidden_size * item, config.num_heads * config.head_dim * item
    keys = config.num_kv_heads * config.head_dim * item
    pool_split = kv_cache.head_parts(stage.mesh, stage.spec) > 1
    side_by_side = getattr(config, "parallel_residual", False)  # the compiler sends both halves' sums at once
    found: dict[tuple[str, str], Collective] = {}

    def add(kind: str, what: str, nbytes: int, times: int = 1, *, per_row: bool = False) -> None:
        known = found.get((kind, what))
        times += known.times if known else 0
        found[kind, what] = Collective(kind, what, nbytes, per_row, stage.mesh.size, times)

    if stage.is_first:
        tables = [part for part in parts.values() if part.name.startswith("embed.") and part.name.endswith(".table")]
        scales = {part.name for part in parts.values() if part.name.endswith(".scales")}
        summed = [part for part in tables if part.split(part.axes[0])]
        for part in summed:
            if f"{part.name}.scales" in scales:  # looked up and summed apart from their int8 values
                add("all-reduce", "embed.scales", item)
        if summed:
            widths = (part.shape[1] * (1 if f"{part.name}.scales" in scales else item) for part in summed)
            add("all-reduce", "embed", sum(widths))
    for layer in stage.layers:

        def split(name: str, axis: str, layer: int = layer) -> bool:
            return parts[f"layers.{layer}.{name}.kernel"].split(axis)

        if split("qkv", "heads") and not pool_split:
            add("all-gather", "layers.*.qkv", keys, 3)
        attention, ffn = split("out", "heads"), split("up", "ffn") or split("down", "ffn")
        if pool_split and not attention:
            add("all-gather", "layers.*.attend", heads)
        if attention and ffn and side_by_side:
            add("all-reduce", "layers.*.out, down", 2 * hidden)
        else:
            if attention:
                add("all-reduce", "layers.*.out", hidden)
            if ffn:
                add("all-reduce", "layers.*.down", hidden)
    if stage.is_last and head_table(parts).split("vocab"):
        add("all-gather", "head", config.vocab_size * 4, per_row=True)
    return tuple(found.values())


def head_table(parts: Mapping[str, ShardedParameter]) -> ShardedParameter:
    """The parameter that makes logits: the head's table if there is one, or the embedding's."""
    return parts.get("head.tokens.table") or parts["embed.tokens.table"]
