"""A model as pure functions of its parameters, and the tables of these parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Float, Float32, Int32

from jaxserve.models import layers, products
from jaxserve.models.schema import ModelConfig, head_sources

# {"embed": {...}, "layers": [{...}, ...], "head": {...}}, arrays at the leaves. A part of a model (see Model.part) has
# its layers by number: {"layers": {20: {...}, 21: {...}}}.
Params = dict[str, Any]


def is_tuple(leaf: Any) -> bool:
    """Whether a node is a leaf of `Model.axes` or `Model.stored`: jax.tree enters tuples."""
    return isinstance(leaf, tuple)


class HeadWeights(NamedTuple):
    """The head's matrix ([V, E], Quantized, or bound by `products.bind`) and its bias, if any."""

    table: Any
    bias: Any


class Model:
    """A model as pure functions of its parameters.

    Parameters are plain arrays in `{"embed": ..., "layers": [...], "head": ...}`. The NNX modules are created once,
    abstractly, and merged with arrays during tracing. A negative position marks padding. Shapes: T tokens, S rows whose
    logits are computed, H hidden size, E width of the token table (mostly H), V vocabulary.
    """

    def __init__(self, family: ModuleType, config: ModelConfig, padded_config: ModelConfig) -> None:
        """Args:
        family: the module of its family (see `jaxserve.models`).
        padded_config: the configuration with its padded counts of heads, tokens and so on (see `build`).
        """
        self.config = config
        self.padded_config = padded_config
        self._family = family
        self.head_sources = head_sources(config, padded_config)
        _, self._embed, self._embed_state = _abstract(family, padded_config, "Embed")
        _, self._head, self._head_state = _abstract(family, padded_config, "Head")
        # Layers of one kind share a block.
        kinds = [config.layer_kind(layer) for layer in range(config.num_layers)]
        first = {kind: kinds.index(kind) for kind in dict.fromkeys(kinds)}
        blocks = {kind: _abstract(family, padded_config, "Block", layer=layer) for kind, layer in first.items()}
        self._blocks = [blocks[kind] for kind in kinds]

    def is_parallel(self, i: int) -> bool:
        """Whether layer i computes attention and feed-forward side by side."""
        return isinstance(self._blocks[i][0], layers.ParallelBlock)

    def hidden_sums(self, i: int) -> int:
        """Sums over the hidden size that the norms of layer i take for each token."""
        parts = vars(self._blocks[i][0])
        norms = (parts[name] for name in parts if name not in ("q_norm", "k_norm"))
        return sum(each.sums for each in norms if isinstance(each, layers.LayerNorm | layers.RMSNorm))

    def embed(
        self, params: Params, tokens: Int32[jax.Array, " T"], positions: Int32[jax.Array, " T"]
    ) -> Float[jax.Array, "T H"]:
        """The input of the first layer."""
        with jax.named_scope("embed"):
            return nnx.merge(self._embed, params["embed"])(tokens, positions)

    def layers(
        self,
        params: Params,
        which: range,
        x: Float[jax.Array, "T H"],
        positions: Int32[jax.Array, " T"],
        attend: Callable[[Any], layers.Attend],
        cache: Any,
        *,
        looped: bool,
        between: Callable[[jax.Array], jax.Array] | None = None,
    ) -> tuple[Float[jax.Array, "T H"], Any]:
        """Runs consecutive layers; returns the hidden states and the updated cache.

        Args:
          params: with the weights of each layer, or `products.stacked` ones if looped.
          attend: returns the attention of a layer, given its index within `which` (an int32[] if looped).
          looped: compiles one loop instead of unrolled layers. The program is a sixth of the size and as fast on a CPU;
            accelerators would wait for the branch to each layer's kernels.
          between: applied to x before each layer; not with `looped`.
        """
        if looped:
            weights = products.looped(params["layers"])
            with jax.named_scope("layers"):
                return jax.lax.fori_loop(
                    0,
                    len(which),
                    lambda place, carry: self.block(0, weights(place), carry[0], positions, attend(place), carry[1]),
                    (x, cache),
                )
        for place, i in enumerate(which):
            x, cache = self.layer(params, i, x if between is None else between(x), positions, attend(place), cache)
        return x, cache

    def layer(
        self,
        params: Params,
        i: int,
        x: Float[jax.Array, "T H"],
        positions: Int32[jax.Array, " T"],
        attend: layers.Attend,
        cache: Any,
    ) -> tuple[Float[jax.Array, "T H"], Any]:
        """Runs layer i; returns the hidden states and the updated cache."""
        with jax.named_scope(f"layer_{i}"):
            return self.block(i, params["layers"][i], x, positions, attend, cache)

    def block(
        self,
        i: int,
        weights: dict[str, Any],
        x: Float[jax.Array, "T H"],
        positions: Int32[jax.Array, " T"],
        attend: layers.Attend,
        cache: Any,
    ) -> tuple[Float[jax.Array, "T H"], Any]:
        """Runs a layer of the kind of layer i, given its weights, as for a scan over stacked layers."""
        return nnx.merge(self._blocks[i][1], weights)(x, positions, attend, cache)

    def norm(self, params: Params, x: Float[jax.Array, "T H"]) -> Float[jax.Array, "T E"]:
        """What comes between the layers and the head's matrix: usually a norm."""
        with jax.named_scope("norm"):
            return nnx.merge(self._head, params["head"])(x)

    def logits(self, params: Params, x: Float[jax.Array, "S E"]) -> Float32[jax.Array, "S V"]:
        """Logits of normed x."""
        with jax.named_scope("head"):
            return self.logits_of(self.head_weights(params), x)[:, : self.config.vocab_size]

    def logits_of(self, head: HeadWeights, x: Float[jax.Array, "S E"]) -> Float32[jax.Array, "S tokens"]:
        """Logits of normed x by some rows of the head."""
        logits = products.project(x, head.table, jnp.float32)
        if head.bias is not None:
            logits += head.bias.astype(jnp.float32)
        return layers.soft_cap(logits, self.config.logit_soft_cap)

    def head_weights(self, params: Params) -> HeadWeights:
        """What logits are computed with."""
        piece = params["embed"] if self.config.tie_embeddings else params["head"]
        return HeadWeights(piece["tokens"]["table"], params["head"].get("bias"))

    @property
    def alibi_slopes(self) -> np.ndarray | None:
        """float32[N] ALiBi slopes of the heads that are held, or None."""
        slopes = self.config.alibi_slopes
        return None if slopes is None else np.append(slopes, np.float32(0))[list(self.head_sources.queries)]

    @property
    def unpadded(self) -> Model:
        """The model without padding, as a checkpoint stores it."""
        return self if self.padded_config == self.config else Model(self._family, self.config, self.config)

    def part(self, tree: Params, layers: range) -> Params:
        """The parameters of a pipeline stage (or of any tree like them).

        The first stage has the embedding; the last has the head, and the token table if tied.
        """
        config = self.config
        part: Params = {"layers": {i: tree["layers"][i] for i in layers}}
        if layers.stop == config.num_layers:
            part["head"] = tree["head"]
            if config.tie_embeddings:
                part["embed"] = {"tokens": tree["embed"]["tokens"]}
        if layers.start == 0:
            part["embed"] = tree["embed"]
        return part

    def shapes(self, dtype: DTypeLike) -> Params:
        """The parameters' shapes: jax.ShapeDtypeStruct at the leaves.

        Biases and norms are float32 or wider.
        """

        def shape(path: tuple[Any, ...], leaf: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(leaf.shape, _held(path, leaf, dtype))

        return jax.tree.map_with_path(shape, self._each_piece(lambda _, state: state))

    def _each_piece(self, of: Callable[[str, dict[str, Any]], Any]) -> Params:
        """A tree of `of(piece, its parameters)` for the embedding, each layer and the head."""
        return {
            "embed": of("embed", self._embed_state),
            "layers": [of("layer", state) for _, _, state in self._blocks],
            "head": of("head", self._head_state),
        }

    def axes(self) -> Params:
        """The same tree with each parameter's logical axis names: a tuple at each leaf."""
        return self._table(self._family.AXES)

    def stored(self) -> Params:
        """The same tree with how a checkpoint stores each parameter: a schema.Stored at each leaf."""

        def name(i: int, layer: dict[str, Any]) -> dict[str, Any]:
            return jax.tree.map(lambda leaf: leaf.of_layer(i), layer, is_leaf=is_tuple)

        tree = self._table(self.stored_table())
        return tree | {"layers": [name(i, layer) for i, layer in enumerate(tree["layers"])]}

    def stored_table(self) -> dict[str, Any]:
        """The family's table `TENSORS` for this configuration."""
        table = self._family.TENSORS
        return table if isinstance(table, dict) else table(self.config)

    def no_parameters(self) -> frozenset[str]:
        """Names, without prefix, of tensors that a checkpoint may hold and that mean nothing."""
        names = self._family.NO_PARAMETERS
        return frozenset(name.format(i=i) for name in names for i in range(self.config.num_layers))

    def _table(self, table: dict[str, Any]) -> Params:
        return self._each_piece(lambda piece, state: _entries_of(state, table[piece]))

    def axis_sizes(self) -> dict[str, int]:
        """Units along each logical axis; a unit may be several numbers (q, k, v of a head)."""
        return dict(self._axis_sizes)

    @functools.cached_property
    def _axis_sizes(self) -> dict[str, int]:
        axes, shapes = jax.tree.leaves(self.axes(), is_leaf=is_tuple), jax.tree.leaves(self.shapes(jnp.float32))
        sizes: dict[str, int] = {}
        for names, leaf in zip(axes, shapes, strict=True):
            sizes |= zip(names, leaf.shape, strict=True)
        heads = {"heads": self.padded_config.num_heads, "kv_heads": self.padded_config.num_kv_heads}
        return sizes | {axis: count for axis, count in heads.items() if axis == "heads" or axis in sizes}

    def init(self, seed: int, dtype: DTypeLike) -> Params:
        """Random parameters: normal weights (initializer_range), norms 1, biases 0."""

        def draw(piece: str, **layer: int):
            def make(key: jax.Array) -> dict[str, Any]:
                state = nnx.to_pure_dict(nnx.state(_made(self._family, self.padded_config, piece, key, **layer)))
                return jax.tree.map_with_path(lambda path, leaf: leaf.astype(_held(path, leaf, dtype)), state)

            return jax.jit(make)

        kinds = [self.config.layer_kind(layer) for layer in range(self.config.num_layers)]
        block = {kind: draw("Block", layer=kinds.index(kind)) for kind in dict.fromkeys(kinds)}
        keys = jax.random.split(jax.random.key(seed), self.config.num_layers + 2)
        return {
            "embed": draw("Embed")(keys[0]),
            "layers": [block[kind](keys[2 + i]) for i, kind in enumerate(kinds)],
            "head": draw("Head")(keys[1]),
        }


def _made(family: ModuleType, config: ModelConfig, piece: str, key: jax.Array, **layer: int) -> nnx.Module:
    return getattr(family, piece)(config, rngs=nnx.Rngs(key), **layer)


@functools.lru_cache(maxsize=128)
def _abstract(
    family: ModuleType, config: ModelConfig, piece: str, **layer: int
) -> tuple[nnx.Module, nnx.GraphDef, dict[str, Any]]:
    """The module of a piece without arrays, its structure, and its parameters by shape."""
    module = nnx.eval_shape(lambda: _made(family, config, piece, jax.random.key(0), **layer))
    graph, state = nnx.split(module)
    return module, graph, nnx.to_pure_dict(state)


def _held(path: tuple[Any, ...], leaf: Any, dtype: DTypeLike) -> np.dtype:
    """The dtype that a parameter is held in.

    Biases (those of experts are matrices) and other vectors are float32 or wider. They are added to or multiplied by
    float32 numbers, and a TPU needs an operation of its own to widen each one in every step.
    """
    is_wide = path[-1].key == "bias" or len(leaf.shape) == 1
    return np.promote_types(dtype, np.float32) if is_wide else np.dtype(dtype)


def _entries_of(state: dict[str, Any], table: dict[str, Any]) -> dict[str, Any]:
    """The entries of a family's table for the parameters in `state`."""
    return {
        name: _entries_of(below, table[name]) if isinstance(below, dict) else table[name]
        for name, below in state.items()
    }
