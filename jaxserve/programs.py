"""The pure functions that an iteration is compiled from: all layers, prompt scoring, the choice of the next tokens."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxserve import attention, sampler, scoring
from jaxserve.batch import BatchLayout, sample_points, unpack
from jaxserve.iteration import SamplerVariant
from jaxserve.models import Model
from pallas_kernels.api import AttentionShape, Backend

_SCORING_TILE = 8192  # vocabulary entries scored at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class StageShape:
    """The sizes that every program of a stage is compiled for."""

    max_rows: int
    n_rows: int
    max_context: int
    attention: AttentionShape
    backend: Backend
    scoring: bool

    def layout(self, bucket: int) -> BatchLayout:
        """The packed form of plans of this bucket."""
        return BatchLayout(
            bucket=bucket,
            max_rows=self.max_rows,
            n_rows=self.n_rows,
            block_size=self.attention.block_size,
            max_context=self.max_context,
        )


class Scores(NamedTuple):
    """Of each flat token's successor: logprob float32[T]; likeliest tokens int32[T, K] and their logprobs."""

    logprobs: jax.Array
    top_ids: jax.Array
    top_logprobs: jax.Array


class Forward(NamedTuple):
    """What one iteration of all layers leaves.

    Attributes:
      pools / tables: the donated buffers, updated.
      chunks: int32[C, 4] the plan's chunks, for the sampler.
      logits: float32[C, V] after each chunk's last token.
      hidden: [T, H] every token's last hidden state, not yet normed, for prompt scoring.
      next_tokens: int32[T] the token after each.
    """

    pools: list[Any]
    tables: jax.Array
    chunks: jax.Array
    logits: jax.Array
    hidden: jax.Array
    next_tokens: jax.Array


def forward(
    model: Model,
    shape: StageShape,
    layout: BatchLayout,
    params: Any,
    pools: list[Any],
    tables: jax.Array,
    history: jax.Array,
    packed: jax.Array,
) -> Forward:
    """One iteration of all layers. Traced."""
    view, tables = unpack(packed, layout, tables, history)
    meta = shape.backend.prepare(view.attention, shape.attention)
    x = model.embed(params, view.tokens, view.attention.positions)  # [T, H]
    pools = list(pools)
    for layer in range(model.config.num_layers):
        attend = attention.make_attend(model.config, shape.backend, shape.attention, meta, layer)
        x, pools[layer] = model.layer(params, layer, x, view.attention.positions, attend, pools[layer])
    last = jnp.maximum(view.attention.query_offsets[1:] - 1, 0)  # [C]
    logits = model.logits(params, model.norm(params, x[last]))
    return Forward(pools, tables, view.chunks, logits, x, view.next_tokens)


def score(model: Model, ends: Any, hidden: jax.Array, next_tokens: jax.Array) -> Scores:
    """How likely each token's successor was, for prompt_logprobs. Traced.

    Args:
      ends: the parameters without the layers.
    """
    with jax.named_scope("prompt_scoring"):
        vocab = model.config.vocab_size
        tile = partial(model.logits_tile, ends, model.norm(ends, hidden))
        return Scores(*scoring.score(tile, vocab, min(vocab, _SCORING_TILE), next_tokens))


def choose(
    variant: SamplerVariant, logits: jax.Array, rows: sampler.RowSampling, history: jax.Array, chunks: jax.Array
):
    """Chooses the next tokens and writes them to the rows' histories. Traced.

    Returns:
      (history, chosen int32[2, C], top): top is (ids, logprobs) with SamplerVariant.FULL, else None.
    """
    points = sample_points(chunks)
    with jax.named_scope("sampler"):
        output = sampler.sample(
            logits,
            jax.tree.map(lambda field: field[points.rows], rows),
            points.positions,
            history[points.rows],
            variant=variant,
        )
    written = jnp.where(points.samples, points.rows, history.shape[0])  # no such row: dropped
    history = history.at[written, points.positions].set(output.tokens, mode="drop")
    chosen = jnp.stack([output.tokens, jax.lax.bitcast_convert_type(output.logprobs, jnp.int32)])
    top = None if variant is not SamplerVariant.FULL else (output.top_ids, output.top_logprobs)
    return history, chosen, top
