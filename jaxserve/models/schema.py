"""Model configurations, their parsing from config.json, and the storage of parameters."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class NarrowFormat:
    """How the numbers of a matrix are held.

    Attributes:
      dtype: of the values.
      group: consecutive inputs that share a scale; -1 for all, None for one scale per row without a group.
      zeros: whether groups have zero points.
    """

    dtype: str
    group: int | None = None
    zeros: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A model's shape; a family adds its own switches in a subclass.

    Attributes:
      family: name of the module in jaxserve.models that computes it.
      max_position: most tokens of one request; None where positions have no limit (ALiBi).
      activation: a name in ACTIVATIONS.
      tie_embeddings: whether the head is the token table.
      windows: sliding window of each layer, None for a layer without one; empty if no layer has one.
      soft_cap / logit_soft_cap: caps of attention scores and of logits (`layers.soft_cap`), or None.
      sinks: whether each head has an attention sink.
      num_experts / experts_per_token: feed-forwards of a layer, and how many of them serve a token; 0 without experts.
      eos_token_ids: tokens that end a text; may be empty.
      initializer_range: standard deviation of freshly drawn weights.
      stored: how the checkpoint has quantized its matrices, if `--quantize` can keep that.
    """

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    max_position: int | None
    alibi: bool
    norm_eps: float
    activation: str
    tie_embeddings: bool
    windows: tuple[int | None, ...] = ()
    soft_cap: float | None = None
    logit_soft_cap: float | None = None
    sinks: bool = False
    num_experts: int = 0
    experts_per_token: int = 0
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    initializer_range: float = 0.02
    stored: NarrowFormat | None = None

    @property
    def alibi_slopes(self) -> np.ndarray | None:
        """float32[N] ALiBi slopes, or None for a model that has learned positions."""
        return alibi_slopes(self.num_heads) if self.alibi else None

    @property
    def layers_alike(self) -> bool:
        """Whether all layers compute the same function of their weights."""
        return len({self.layer_kind(layer) for layer in range(self.num_layers)}) == 1

    def layer_kind(self, layer: int) -> Hashable:
        """What a layer computes, apart from its weights: equal for layers that are alike."""
        return self.attention_scale(layer), self.window(layer)

    def window(self, layer: int) -> int | None:
        """The layer's window: most tokens that one attends to, itself included; None for all."""
        return self.windows[layer] if self.windows else None

    @property
    def distinct_windows(self) -> tuple[int | None, ...]:
        """The sliding windows of the layers, each once."""
        return tuple(dict.fromkeys(self.window(layer) for layer in range(self.num_layers)))

    def attention_scale(self, layer: int) -> float:
        """The factor applied to query-key products in this layer."""
        return 1.0 / math.sqrt(self.head_dim)


class HeadSources(NamedTuple):
    """Which head of the checkpoint each head of a padded model is; -1 for one that is zeros."""

    queries: tuple[int, ...]
    keys: tuple[int, ...]


def head_sources(config: ModelConfig, padded_config: ModelConfig) -> HeadSources:
    """The heads of a padded model.

    Where it has a multiple of the KV heads, each is repeated and its queries are shared out among the copies; other
    KV heads beyond the model's are zeros. Queries that a group lacks are zeros.
    """
    kv_heads, group = config.num_kv_heads, config.num_heads // config.num_kv_heads
    padded_kv_heads = padded_config.num_kv_heads
    padded_group = padded_config.num_heads // padded_kv_heads
    copies = padded_kv_heads // kv_heads if padded_kv_heads % kv_heads == 0 else 1
    keys = tuple(head // copies if head // copies < kv_heads else -1 for head in range(padded_kv_heads))

    def query(head: int, place: int) -> int:
        within = head % copies * padded_group + place
        return keys[head] * group + within if keys[head] >= 0 and within < group else -1

    queries = tuple(query(head, place) for head in range(padded_kv_heads) for place in range(padded_group))
    return HeadSources(queries, keys)


def alibi_slopes(num_heads: int) -> np.ndarray:
    """float32[N] slopes of ALiBi (arXiv:2108.12409, section 3).

    Up to the largest power of two P within num_heads they are 2^(-8 i / P), i = 1..P; the heads beyond it take every
    other slope of the sequence for 2 P, as BLOOM was trained.
    """
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2.0 ** (-8.0 * i / power) for i in range(1, power + 1)]
    slopes += [2.0 ** (-4.0 * i / power) for i in range(1, 2 * (num_heads - power), 2)]
    return np.asarray(slopes, np.float32)


class Stored(NamedTuple):
    """How a Hugging Face checkpoint stores a parameter.

    Attributes:
      name: of the tensor, without the prefix that all but the head's share; {i} is the layer, {qkv} stands for q, k and
        v where each is a tensor of its own, and {e} for the expert where each has a tensor of its own.
      transposed: whether it lies [in, out] rather than [out, in].
      parts: whether all queries, all keys and all values follow each other in it, rather than those of each KV head.
      every: (first, step) of its outputs where others lie between them; None for all.
      experts: how many there are, where each has a tensor of its own.
      share: (i, n) where it is n parameters of one shape, output after output, and this is number i.
    """

    name: str
    transposed: bool = False
    parts: bool = False
    every: tuple[int, int] | None = None
    experts: int = 0
    share: tuple[int, int] = (0, 1)

    def of_layer(self, i: int) -> Stored:
        """The same for layer i."""
        return self._replace(name=self.name.replace("{i}", str(i)))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tensors: one, those of q, k and v, or one for each expert."""
        if self.experts:
            return tuple(self.name.replace("{e}", str(expert)) for expert in range(self.experts))
        if "{qkv}" in self.name:
            return tuple(self.name.replace("{qkv}", part) for part in "qkv")
        return (self.name,)

    def view(self, values: np.ndarray) -> np.ndarray:
        """A tensor in the parameter's layout: [out, in], a bias [out]; stacks have leading axes."""
        if self.transposed:
            values = values.swapaxes(-1, -2)
        if self.every is not None:
            first, step = self.every
            values = values[..., first::step, :] if self.transposed else values[..., first::step]
        return values

    def region(self, of_view: tuple[slice, ...]) -> tuple[slice, ...]:
        """The part of a tensor that is this part, a slice(start, stop) for each axis, of its `view`."""
        parts = list(of_view)
        if self.every is not None:
            (first, step), axis = self.every, -2 if self.transposed else -1
            start, stop = parts[axis].start, parts[axis].stop
            parts[axis] = slice(first + start * step, first + (stop - 1) * step + 1, step)
        if self.transposed:
            parts[-2:] = parts[:-3:-1]
        return tuple(parts)


# Names that Hugging Face gives an activation -> ours (jaxserve.models.layers.ACTIVATIONS).
_ACTIVATION_NAMES = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_new",
    "gelu_fast": "gelu_new",
    "gelu_accurate": "gelu_new",
    "gelu_pytorch_tanh": "gelu_new",
    "gelu_python_tanh": "gelu_new",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
}


@dataclass(frozen=True, slots=True)
class Fields:
    """Reads the entries of a config.json; every invalid one raises ValueError with its name.

    A null entry counts as absent, as in Hugging Face. Methods take the names of an entry, the preferred one
    first; one without a name is absent.
    """

    entries: Mapping[str, Any]

    def _find(self, names: tuple[str, ...]) -> tuple[str, Any]:
        for name in names:
            if self.entries.get(name) is not None:
                return name, self.entries[name]
        return names[0] if names else "", None

    def count(self, *names: str, default: int | None = None) -> int:
        """A whole number of at least 1."""
        name, value = self._find(names)
        if value is None:
            if default is None:
                raise ValueError(f"{' or '.join(names)} is missing")
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} is {value!r}; it must be a whole number of at least 1")
        return value

    def count_or_none(self, *names: str, default: int | None) -> int | None:
        """A whole number of at least 1; None if null, the default if absent (as in transformers)."""
        given = any(name in self.entries for name in names)
        return self.count(*names, default=0) or None if given else default

    def number(self, *names: str, default: float) -> float:
        """A finite number, not negative."""
        name, value = self._find(names)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
            raise ValueError(f"{name} is {value!r}; it must be a number of at least 0")
        return float(value)

    def number_or_none(self, name: str, *, default: float | None) -> float | None:
        """A positive number; None if null or 0, the default if absent (as in transformers)."""
        return self.number(name, default=0.0) or None if name in self.entries else default

    def within(self, name: str) -> Fields:
        """The entries of an object; none if it is absent."""
        value = self.entries.get(name)
        if value is not None and not isinstance(value, Mapping):
            raise ValueError(f"{name} is {value!r}; it must be an object")
        return Fields(value or {})

    def flag(self, *names: str, default: bool) -> bool:
        """true or false."""
        name, value = self._find(names)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ValueError(f"{name} is {value!r}; it must be true or false")
        return value

    def activation(self, *names: str, default: str) -> str:
        """The name in ACTIVATIONS of an activation."""
        name, value = self._find(names)
        value = default if value is None else value
        if not isinstance(value, str) or value not in _ACTIVATION_NAMES:
            raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(_ACTIVATION_NAMES)}")
        return _ACTIVATION_NAMES[value]

    def tokens(self, name: str, vocab_size: int, *, default: int | None) -> tuple[int, ...]:
        """Token ids, from one or a list; none if null, the default if absent (as in transformers)."""
        value = self.entries.get(name, default)
        listed = [] if value is None else value if isinstance(value, list) else [value]
        for token in listed:
            if isinstance(token, bool) or not isinstance(token, int):
                raise ValueError(f"{name} is {value!r}; it must be a token id or a list of token ids")
        # Ids beyond the vocabulary (and -1) are how some checkpoints say that there is no such token.
        return tuple(token for token in listed if 0 <= token < vocab_size)

    def token(self, name: str, vocab_size: int, *, default: int | None) -> int | None:
        """Like `tokens` for one token; None if there is none."""
        return next(iter(self.tokens(name, vocab_size, default=default)), None)

    def refuse(self, name: str, *, unless: Any = None, because: str) -> None:
        """Raises ValueError for a value that the model does not support."""
        value = self.entries.get(name)
        if value is not None and value != unless:
            served = "leave it out" if unless is None else f"only {unless!r} is"
            raise ValueError(f"{name} is {value!r}, which is not supported ({because}); {served}")


def head_size(hidden_size: int, num_heads: int) -> int:
    """Size of a head where the heads share the hidden size evenly."""
    if hidden_size % num_heads:
        raise ValueError(f"the hidden size {hidden_size} does not divide into {num_heads} heads")
    return hidden_size // num_heads
