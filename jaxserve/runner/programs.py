"""The pure functions of an iteration's programs: layers, head, prompt scoring, sampling."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Float32

from jaxserve.iteration import IterationPlan, SamplerVariant, max_points
from jaxserve.models.layers import Attend
from jaxserve.models.model import HeadWeights, Model
from jaxserve.models.products import Quantized, bind, bind_stacked
from jaxserve.runner import matmul
from jaxserve.runner.batch import BatchLayout, of_group, sample_points, unpack, write_tokens
from jaxserve.sampling import sampler, scoring
from jaxserve.scheduler.cache_groups import CacheGroups
from pallas_kernels.api import AttentionBatch, AttentionShape, Backend
from sharding.spec import ShardingSpec

_SCORING_TILE = 8192  # vocabulary entries scored at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class StageShape:
    """The sizes that the programs of every stage are compiled for.

    Attributes:
      max_rows: rows of one plan.
      n_rows: rows of all plans in flight.
      groups: the cache groups of the model's layers.
      attention: the attention of one device of a stage.
      product: the native CPU product, or None for XLA's.
      draft_tokens: most tokens drafted for one row; 0 without speculation.
      fewest_tokens: that a device computes with (see `BatchLayout`).
      deterministic: whether a token goes through one program whatever else is in its batch.
    """

    max_rows: int
    n_rows: int
    groups: CacheGroups
    attention: AttentionShape
    backend: Backend
    product: matmul.NativeProduct | None
    scoring: bool
    draft_tokens: int = 0
    fewest_tokens: int = 1
    deterministic: bool = False

    def layout(self, bucket: int) -> BatchLayout:
        """The packed form of a plan of this bucket."""
        return BatchLayout(
            bucket=bucket,
            max_rows=self.max_rows,
            n_rows=self.n_rows,
            groups=self.groups,
            draft_tokens=self.draft_tokens,
            fewest_tokens=self.fewest_tokens,
        )

    @property
    def max_context(self) -> int:
        """Most tokens of a request."""
        return self.groups.max_context

    @property
    def points(self) -> int:
        """Most tokens that a plan of any bucket samples (P)."""
        return max_points(self.max_rows, self.draft_tokens)

    def point_counts(self, buckets: Iterable[int]) -> tuple[int, ...]:
        """The compiled sample counts, ascending. A plan uses the smallest that fits.

        The head is a large product, and a chunk of a prompt samples at most one token whatever the bucket.
        """
        return tuple(sorted({self.layout(bucket).points for bucket in buckets}))

    def decode_buckets(self, buckets: Sequence[int]) -> tuple[int, ...]:
        """Buckets with a second program, for decodes only, which runs nothing for prompts.

        They are the smallest that hold some number of rows, where the attention backend gains by it.
        """
        if self.deterministic:
            return ()
        return tuple(
            bucket
            for smaller, bucket in pairwise((0, *buckets))
            if smaller < self.max_rows and self.backend.saves_on_decodes(bucket, self.layout(bucket).chunks)
        )


def points_for(plan: IterationPlan, counts: Sequence[int]) -> int:
    """The smallest compiled sample count (S) that fits a plan; see `StageShape.point_counts`."""
    return counts[bisect_left(counts, plan.num_points)]


class Scores(NamedTuple):
    """Each flat token's successor's logprob [T], and top tokens [T, K] with logprobs."""

    logprobs: jax.Array
    top_ids: jax.Array
    top_logprobs: jax.Array


class Forward(NamedTuple):
    """The results of one iteration of a stage's layers.

    Attributes:
      pool / tables: the donated buffers, updated.
      points: int32[P, 3] the sample positions (`batch.SamplePoints`).
      hidden: [T, H] hidden states, for the next stage or for prompt scoring.
      last: [P, H] hidden states before each sample position, for the head; last stage only.
      next_tokens: int32[T] the token after each, for prompt scoring; last stage only.
    """

    pool: Any
    tables: jax.Array
    points: jax.Array
    hidden: jax.Array
    last: jax.Array | None
    next_tokens: jax.Array | None


def forward(
    params: Any,
    pool: Any,
    tables: jax.Array,
    history: jax.Array | None,
    packed: jax.Array,
    x: jax.Array | None,
    *,
    model: Model,
    shape: StageShape,
    layers: range,
    looped: bool,
    products: matmul.DeviceProducts,
    prepare: Callable[[AttentionBatch, int], Any],
    make_attend: Callable[[Any, int, Any], Attend],
    between: Callable[[jax.Array], jax.Array] | None,
    whole: Callable[[Any], Any] | None,
    gathered: Callable[[Any], Any] | None,
    divided: Callable[[Any], Any] | None,
    layout: BatchLayout,
    first_blocks: Sequence[int],
) -> Forward:
    """Runs one iteration of a stage's layers. Traced.

    Args:
      history: token histories of the rows; None in stages between the first and the last.
      x: [T, H] hidden states from the stage before; None in the first, which embeds the tokens.
      looped: whether the layers are one loop (`Model.layers`), and their weights stacked.
      products: multiplies by the parameters.
      prepare: (batch, cache group) -> what the attention of its layers shares (`attention.prepare`).
      make_attend: (result of `prepare`, layer, its first block) -> the layer's attention.
      between: applied to the hidden states [T, H] before each layer.
      whole: gathers an array, so that every device has all of it; None where that is left to the compiler.
      gathered: gathers the layers' parameters over the spec's axes of `gather`; None without any.
      divided: gives the layers' bound weights products over several devices (`StagePrograms.divided`), or is None.
      first_blocks: first block of each layer in the pool, and their number; looped layers have equally many.
    """
    view, tables = unpack(packed, layout, tables, history)
    if whole is not None:  # otherwise positions would be split like the hidden states, and gathered in every layer
        view = whole(view)
    groups = [shape.groups.index(model.config.window(layer)) for layer in layers]
    metas = {group: prepare(of_group(view.attention, group, shape.groups), group) for group in dict.fromkeys(groups)}
    if x is None:
        assert view.tokens is not None
        embedded: jax.Array = model.embed(params, view.tokens, view.attention.positions)  # [T, H]
        # Otherwise the first norm would be computed from parts, and TPUs would scatter the result of some look-ups.
        if divided is not None and whole is not None:
            embedded = whole(jax.lax.optimization_barrier(whole(embedded)))
        x = embedded
    if gathered is not None:
        params = {**params, "layers": gathered(params["layers"])}
    if looped:
        of_layers = bind_stacked(params["layers"], products)
    else:
        of_layers = {i: bind(part, replace(products, layer=i)) for i, part in params["layers"].items()}
    of_layers = of_layers if divided is None else divided(of_layers)
    params = {**bind({**params, "layers": {}}, products), "layers": of_layers}

    def attend(index: Any) -> Attend:
        if looped:  # looped layers differ only in their weights
            return make_attend(metas[groups[0]], layers[0], index * first_blocks[1])
        return make_attend(metas[groups[index]], layers[index], first_blocks[index])

    used = jnp.arange(layout.tokens) < view.attention.query_offsets[-1]
    positions = jnp.where(used, view.attention.positions, -1)
    x = jnp.pad(x, ((0, layout.tokens - len(x)), (0, 0)))
    hidden, pool = model.layers(params, layers, x, positions, attend, pool, looped=looped, between=between)
    hidden = hidden[: layout.bucket]
    if whole is not None:
        hidden = whole(hidden)
    padding = shape.points - layout.points
    points = jnp.pad(view.points, ((0, padding), (0, 0)))
    if layers.stop < model.config.num_layers:
        return Forward(pool, tables, points, hidden, None, None)
    assert view.next_tokens is not None
    next_tokens = view.next_tokens[: layout.bucket]
    return Forward(pool, tables, points, hidden, hidden[jnp.pad(view.last, (0, padding))], next_tokens)


def head(model: Model, product: matmul.NativeProduct | None, points: int, ends: Any, last: jax.Array) -> jax.Array:
    """Logits float32[S, V] at the first S sample positions. Traced.

    It is a separate program, so that a token's logits do not depend on the sampler that other requests need.

    Args:
      product: the native CPU product, or None for XLA's.
      points: S.
      ends: the parameters outside the layers.
      last: [P, H] of `Forward`.
    """
    ends = bind(ends, matmul.DeviceProducts(native=product))
    return model.logits(ends, model.norm(ends, last[:points]))


def score(model: Model, mesh: Mesh, spec: ShardingSpec, ends: Any, hidden: jax.Array, next_tokens: jax.Array) -> Scores:
    """Scores each token's successor, for prompt_logprobs. Traced.

    Each device of a mesh scores its own part of the vocabulary. For a tile of the whole vocabulary the compiler would
    gather the table.

    Args:
      ends: the parameters outside the layers.
    """
    with jax.named_scope("prompt_scoring"):
        weights, normed = model.head_weights(ends), model.norm(ends, hidden)
        shape, whole = weights.table.shape, spec.resolve((), (), mesh)
        by_token = spec.resolve(("vocab", None), shape, mesh, name="head")
        rows = spec.resolve(("vocab",), shape[:1], mesh, name="head")
        axis = by_token[0] if mesh.size > 1 else None

        def score_here(weights: HeadWeights, normed: jax.Array, next_tokens: jax.Array) -> Scores:
            tile = partial(_logits_tile, model, weights, normed)
            vocab = weights.table.shape[0]
            if model.padded_config.vocab_size > model.config.vocab_size:
                first = 0 if axis is None else jax.lax.axis_index(axis) * vocab
                tile = _of_tokens(tile, model.config.vocab_size - first)
            return Scores(*scoring.score(tile, vocab, min(vocab, _SCORING_TILE), next_tokens, axis))

        if axis is None:
            return score_here(weights, normed, next_tokens)
        parts = HeadWeights(
            Quantized(by_token, rows) if isinstance(weights.table, Quantized) else by_token,
            None if weights.bias is None else rows,
        )
        everywhere = jax.shard_map(
            score_here, mesh=mesh, in_specs=(parts, whole, whole), out_specs=whole, check_vma=False
        )
        return everywhere(weights, normed, next_tokens)


def pool(model: Model, rows: int, ends: Any, hidden: jax.Array, owners: jax.Array) -> Float32[jax.Array, "R H"]:
    """Sums the normalised hidden states of each embedding's tokens. Traced.

    It is a product with a matrix of ones and zeros, so that sums do not depend on the order of additions. States that
    are not finite count as zeros, for the other embeddings' sake; their own request fails by its logits.

    Args:
      rows: R, most embeddings of a plan.
      ends: the parameters outside the layers.
      owners: int32[T] the embedding that each token belongs to; R for none.
    """
    with jax.named_scope("pooling"):
        normed = model.norm(ends, hidden).astype(jnp.float32)
        used = jnp.isfinite(normed) & (owners < rows)[:, None]
        members = (jnp.arange(rows)[:, None] == owners).astype(jnp.float32)  # [R, T]
        return jnp.matmul(members, jnp.where(used, normed, 0.0), precision=jax.lax.Precision.HIGHEST)


def _logits_tile(
    model: Model, weights: HeadWeights, normed: jax.Array, start: jax.Array | int, size: int
) -> Float32[jax.Array, "T {size}"]:
    """Logits of rows start to start + size of (a device's share of) the head."""
    with jax.named_scope("head"):
        rows = jax.tree.map(lambda part: jax.lax.dynamic_slice_in_dim(part, start, size), weights)
        return model.logits_of(bind(rows, matmul.DeviceProducts(native=None)), normed)


def _of_tokens(tile: scoring.LogitsTile, end: jax.Array | int) -> scoring.LogitsTile:
    """The logits of a tile, with -inf from row `end` on (padding)."""

    def logits(start: jax.Array | int, size: int) -> jax.Array:
        return jnp.where(start + jnp.arange(size) < end, tile(start, size), -jnp.inf)

    return logits


def choose(
    variant: SamplerVariant,
    logits: jax.Array,
    rows: sampler.RowSampling,
    history: jax.Array,
    points: jax.Array,
    allowed: jax.Array | None = None,
):
    """Samples the next tokens and writes them to the rows' histories. Traced.

    Args:
      logits: float32[S, V] at the first S sample positions.
      points: int32[P, 3] of `Forward`.
      allowed: grammar masks for `sampler.sample`; with SamplerVariant.CONSTRAINED only.

    Returns:
      (history, chosen int32[2, S], top): top is (ids, logprobs) with SamplerVariant.FULL and above, else None.
    """
    points = points[: logits.shape[0]]
    where = sample_points(points)
    with jax.named_scope("sampler"):
        output = sampler.sample(
            logits,
            jax.tree.map(lambda field: field[where.rows], rows),
            where.positions,
            history[where.rows],
            allowed,
            variant=variant,
        )
    history = write_tokens(history, points, output.tokens)
    chosen = jnp.stack([output.tokens, jax.lax.bitcast_convert_type(output.logprobs, jnp.int32)])
    top = None if variant < SamplerVariant.FULL else (output.top_ids, output.top_logprobs)
    return history, chosen, top


def feed(history: jax.Array, points: jax.Array, chosen: jax.Array) -> jax.Array:
    """Writes the tokens sampled last (see `choose`) to the first stage's histories. Traced."""
    return write_tokens(history, points[: chosen.shape[1]], chosen[0])
