"""Rotary positions (RoFormer, arXiv:2104.09864) and ways to stretch them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float32, Int32

from jaxserve.models.schema import Fields, ModelConfig

KINDS = ("default", "linear", "dynamic", "yarn", "llama3")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotary:
    """Rotates the first numbers of each head, in pairs, by angles that grow with the position.

    Attributes:
      size: numbers of a head that are rotated; pair i turns by position / theta^(2 i / size) before stretching.
      kind: how frequencies are stretched. "linear" divides all of them (arXiv:2306.15595). "dynamic" raises theta with
        the position beyond `original` (NTK-aware; each token by its own position, so that cached keys stay valid).
        "yarn" divides the slow ones (arXiv:2309.00071, section 3.2), and so does "llama3", with other bounds.
      factor: by how much the context is stretched.
      original: positions that the model was trained on before stretching.
      low / high: yarn: rotations over `original` below which a pair is divided and above which it is not
        (beta_slow, beta_fast). llama3: the same, as low_freq_factor and high_freq_factor.
      truncate: yarn: whether the bounds are rounded to whole pairs.
      attention_factor: yarn: factor of rotated queries and keys.
      interleaved: whether pairs are neighbours (GPT-J) rather than numbers of the two halves (GPT-NeoX).
    """

    size: int
    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    original: int = 0
    low: float = 1.0
    high: float = 32.0
    truncate: bool = True
    attention_factor: float = 1.0
    interleaved: bool = False

    def __call__(
        self, x: Float32[jax.Array, "T *N D"], positions: Int32[jax.Array, " T"]
    ) -> Float32[jax.Array, "T *N D"]:
        """x rotated."""
        return jax.lax.platform_dependent(x, positions, tpu=self.rotated_by_product, default=self.rotated)

    def rotated(
        self, x: Float32[jax.Array, "T *N D"], positions: Int32[jax.Array, " T"]
    ) -> Float32[jax.Array, "T *N D"]:
        """x rotated, where numbers are easily moved in a head."""
        angles = positions[:, None].astype(jnp.float32) * self._at(positions)
        cos, sin = (jnp.float32(self.attention_factor) * wave(angles) for wave in (jnp.cos, jnp.sin))
        # Joined after they are computed: otherwise a CPU would compute them for each head.
        rest = self._rest(cos, x)
        waves = self._heads(cos, cos, rest + 1), self._heads(-sin, sin, rest)
        if self.interleaved:
            partners = jnp.take(x, self._partner(x.shape[-1]), axis=-1, mode="clip")
        else:
            first, second, rest = jnp.split(x, (self.size // 2, self.size), axis=-1)
            partners = self._heads(second, first, rest)
        cos, sin = (jnp.expand_dims(wave, range(1, x.ndim - 1)) for wave in waves)
        return x * cos + partners * sin

    def rotated_by_product(
        self, x: Float32[jax.Array, "T *N D"], positions: Int32[jax.Array, " T"]
    ) -> Float32[jax.Array, "T *N D"]:
        """The same for TPUs, where partners come from an exact product with a permutation.

        The compiler fuses it with what follows; to move numbers between lanes it makes several operations.
        """
        partner, each = self._partner(x.shape[-1]), self._at(positions)
        swap = np.eye(len(partner), dtype=np.float32)[partner]
        partners = jnp.dot(x, swap, precision=jax.lax.Precision.HIGHEST)
        factor = np.where(partner == np.arange(len(partner)), 1.0, self.attention_factor).astype(np.float32)
        angles = positions[:, None].astype(jnp.float32) * self._heads(-each, each, self._rest(each, x))
        cos, sin = (jnp.expand_dims(wave(angles) * factor, range(1, x.ndim - 1)) for wave in (jnp.cos, jnp.sin))
        return x * cos + partners * sin

    def _partner(self, dim: int) -> np.ndarray:
        """int[dim]: where in a head the other number of each number's pair is.

        Numbers that are not rotated have their own place.
        """
        index, distance = np.arange(dim), 1 if self.interleaved else self.size // 2
        partner = np.where(index // distance % 2 == 0, index + distance, index - distance)
        return np.where(index < self.size, partner, index)

    def _rest(self, pairs: jax.Array | np.ndarray, x: jax.Array) -> jax.Array:
        """Zeros for the numbers of a head that are not rotated, beside [..., size / 2]."""
        return jnp.zeros((*pairs.shape[:-1], x.shape[-1] - self.size), jnp.float32)

    def _heads(self, first: Any, second: Any, rest: jax.Array) -> jax.Array:
        """Heads with these numbers as their pairs, and the rest behind them."""
        if not self.interleaved:
            return jnp.concatenate([first, second, rest], axis=-1)
        pairs = jnp.stack([first, second], axis=-1)
        return jnp.concatenate([pairs.reshape(*first.shape[:-1], self.size), rest], axis=-1)

    def _at(self, positions: jax.Array) -> jax.Array | np.ndarray:
        """Each token's frequencies: [size / 2], or [T, size / 2] where they depend on its position."""
        if self.kind != "dynamic":
            return self.frequencies()
        length = jnp.maximum(positions + 1, self.original).astype(jnp.float32)
        stretch = self.factor * length / self.original - (self.factor - 1)  # of theta, to a power
        exponents = np.arange(0, self.size, 2, dtype=np.float32) / max(self.size - 2, 1)
        return self.frequencies() / stretch[:, None] ** exponents

    def frequencies(self) -> np.ndarray:
        """float32[size / 2] radians per position; of "dynamic", those up to `original`."""
        plain = self.theta ** -(np.arange(0, self.size, 2) / self.size)
        if self.kind == "linear":
            plain = plain / self.factor
        elif self.kind == "yarn":
            plain = plain * (1 - (1 - 1 / self.factor) * self._divided())
        elif self.kind == "llama3":
            rotations = self.original * plain / (2 * math.pi)
            kept = np.clip((rotations - self.low) / (self.high - self.low), 0, 1)
            plain = plain * (kept + (1 - kept) / self.factor)
        return plain.astype(np.float32)

    def _divided(self) -> np.ndarray:
        """YaRN's ramp: the share of a frequency that it divides, 0 for fast pairs, 1 for slow ones."""

        def pair(rotations: float) -> float:
            return self.size * math.log(self.original / (rotations * 2 * math.pi)) / (2 * math.log(self.theta))

        first, last = pair(self.high), pair(self.low)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, self.size - 1)
        return np.clip((np.arange(self.size // 2) - first) / max(last - first, 0.001), 0, 1)

    def entries(self) -> dict[str, Any]:
        """The object `rope_parameters` of a config.json, from which `parse` makes an equal value."""
        found: dict[str, Any] = {"rope_type": self.kind, "rope_theta": self.theta}
        if self.kind == "default":
            return found
        found |= {"factor": self.factor, "original_max_position_embeddings": self.original}
        if self.kind == "yarn":
            names = {"beta_slow": self.low, "beta_fast": self.high, "truncate": self.truncate}
            found |= names | {"attention_factor": self.attention_factor}
        if self.kind == "llama3":
            found |= {"low_freq_factor": self.low, "high_freq_factor": self.high}
        return found

    def longest(self, max_position: int) -> int:
        """Positions of the stretched model, whose config.json says `max_position`."""
        return int(self.original * self.factor) if self.kind in ("linear", "dynamic", "yarn") else max_position


def rotated(fields: Fields, values: dict[str, Any], **defaults: Any) -> dict[str, Any]:
    """Adds the rotation (see `parse`) and stretched positions to `ConfigNames.read`'s result."""
    turned = parse(fields.entries, values["head_dim"], max_position=values["max_position"], **defaults)
    return values | {"rotary": turned, "max_position": turned.longest(values["max_position"])}


def rotated_entries(turned: Rotary, config: ModelConfig) -> dict[str, Any]:
    """The entries of a config.json that `rotated` reads."""
    stretched = turned.kind in ("linear", "dynamic")
    share = {"partial_rotary_factor": turned.size / config.head_dim} if turned.size < config.head_dim else {}
    return {
        "max_position_embeddings": turned.original if stretched else config.max_position,
        "rope_parameters": turned.entries() | share,
    }


def parse(
    entries: Mapping[str, Any],
    head_dim: int,
    *,
    max_position: int,
    theta: float = 10000.0,
    share: float | None = None,
    kinds: tuple[str, ...] = KINDS,
    kind_of_layer: str | None = None,
) -> Rotary:
    """The rotation that a config.json asks for.

    It reads `rope_parameters`, as transformers 5 writes it, or `rope_scaling` and `rope_theta` of versions before.

    Args:
      max_position: its max_position_embeddings.
      theta / share: what holds where it does not say, of rope_theta and partial_rotary_factor; without a share, the
        family always rotates whole heads.
      kinds: the ways to stretch positions that the model knows.
      kind_of_layer: entry of `rope_parameters` to read, where it has one for each kind ("full_attention", ...).

    Raises:
      ValueError: a value is out of range, or the kind of stretching is not served.
    """
    fields = Fields(entries)
    name = "rope_scaling" if entries.get("rope_scaling") else "rope_parameters"
    inner = fields.within(name)
    if kind_of_layer is not None and isinstance(inner.entries.get(kind_of_layer), Mapping):
        inner = inner.within(kind_of_layer)
    kind = inner.entries.get("rope_type") or inner.entries.get("type") or "default"
    if kind not in kinds:
        served = f"{', '.join(kinds)} {'are' if len(kinds) > 1 else 'is'}"
        raise ValueError(f"{name} is of rope_type {kind!r}, which is not supported; {served}")
    theta = inner.number("rope_theta", default=fields.number("rope_theta", default=theta))
    if share is None:
        for where in (fields, inner):
            where.refuse("partial_rotary_factor", unless=1, because="the family rotates whole heads")
    else:
        share = inner.number("partial_rotary_factor", default=fields.number("partial_rotary_factor", default=share))
    size = int(head_dim * (1.0 if share is None else share))
    if size % 2 or not 2 <= size <= head_dim:
        raise ValueError(
            f"the rotated share of a head is {share}, which is {size} of its {head_dim} numbers; it must be pairs of "
            "them"
        )
    if theta <= 1:
        raise ValueError(f"rope_theta is {theta}; it must be more than 1")
    if kind == "default":
        return Rotary(size=size, theta=theta)
    factor = inner.number("factor", default=0.0)
    if factor < 1:
        raise ValueError(f"{name} has factor {inner.entries.get('factor')!r}; it must be at least 1")
    # "linear" and "dynamic" stretch what max_position_embeddings says.
    original = inner.count("original_max_position_embeddings", default=max_position)
    low, high = ("beta_slow", "beta_fast") if kind == "yarn" else ("low_freq_factor", "high_freq_factor")
    bounds = {
        "low": inner.number(low, default=1.0),
        "high": inner.number(high, default=32.0 if kind == "yarn" else 4.0),
    }
    if not 0 < bounds["low"] < bounds["high"]:
        raise ValueError(f"{name} has {low} {bounds['low']} and {high} {bounds['high']}; the first must be less")
    more: dict[str, Any] = {}
    if kind == "yarn":
        more["truncate"] = inner.flag("truncate", default=True)
        more["attention_factor"] = inner.number("attention_factor", default=_yarn_factor(inner, factor))
    return Rotary(
        size=size,
        theta=theta,
        kind=kind,
        factor=factor,
        original=original,
        **(bounds if kind in ("yarn", "llama3") else {}),
        **more,
    )


def _yarn_factor(inner: Fields, factor: float) -> float:
    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0

    weight, of_all = inner.number("mscale", default=0.0), inner.number("mscale_all_dim", default=0.0)
    return scale(weight) / scale(of_all) if weight and of_all else scale(1.0)
