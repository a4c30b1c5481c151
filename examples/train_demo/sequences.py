"""The engine's model over whole sequences, without a KV pool, for training and scoring."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxserve.models import Model, Params


def forward(model: Model, params: Params, tokens: jax.Array) -> jax.Array:
    """Final states float32[B * S, H] of sequences int32[B, S], computed as B * S flat tokens."""
    config = model.config
    batch, length = tokens.shape
    position = jnp.arange(length)
    distance = (position[None, :] - position[:, None]).astype(jnp.float32)  # [query, key]
    slopes = jnp.asarray(config.alibi_slopes)[:, None, None]
    bias = jnp.where(distance > 0, -jnp.inf, slopes * distance)  # [N, S, S]

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, i: int) -> tuple[jax.Array, int]:
        q, k, v = (x.reshape(batch, length, config.num_heads, config.head_dim) for x in (q, k, v))
        scores = jnp.einsum("bqnd,bknd->bnqk", q, k) * config.attention_scale(i) + bias
        out = jnp.einsum("bnqk,bknd->bqnd", jax.nn.softmax(scores), v)
        return out.reshape(batch * length, config.num_heads, config.head_dim), i

    positions = jnp.tile(position, batch)
    x = model.embed(params, tokens.reshape(-1), positions)
    for i in range(config.num_layers):
        x, _ = model.layer(params, i, x, positions, attend, i)
    return model.norm(params, x)


def next_token_losses(model: Model, params: Params, tokens: jax.Array) -> jax.Array:
    """float32[B, S]: -ln p of tokens[:, 1:] given those before, for tokens int32[B, S + 1]."""
    x = forward(model, params, tokens[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(model.logits(params, x), tokens[:, 1:].reshape(-1))
    return losses.reshape(tokens[:, 1:].shape)


def mean_loss(model: Model, params: Params, stream: np.ndarray, window: int = 256, batch: int = 8) -> float:
    """Mean -log p over stream[1:], natural logarithm, for stream int32[tokens].

    Windows overlap by half: but for the first one, every token is judged with at least half a window before it.
    """
    half = window // 2
    starts = range(0, max(len(stream) - 1 - half, 1), half)
    padded = np.concatenate([stream, np.zeros(window, np.int32)])
    windows = np.stack([padded[start : start + window + 1] for start in starts])
    judged = np.zeros((len(windows), window), bool)
    for row, start in enumerate(starts):
        judged[row, (half if row else 0) : len(stream) - 1 - start] = True
    assert judged.sum() == len(stream) - 1
    windows = np.concatenate([windows, np.zeros((-len(windows) % batch, window + 1), np.int32)])
    losses = jax.jit(partial(next_token_losses, model))
    found = np.concatenate([losses(params, windows[i : i + batch]) for i in range(0, len(windows), batch)])
    return float(found[: len(judged)][judged].astype(np.float64).mean())


def sample(
    model: Model, params: Params, prompts: Sequence[Sequence[int]], *, count: int, temperature: float, seed: int
) -> list[list[int]]:
    """Draws `count` tokens after each prompt; every step computes all sequences anew."""
    width = max(map(len, prompts)) + count
    tokens = np.zeros((len(prompts), width), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    lengths = np.array([len(prompt) for prompt in prompts])
    rows = np.arange(len(prompts))

    @jax.jit
    def draw(params: Params, tokens: jax.Array, last: jax.Array, key: jax.Array) -> jax.Array:
        x = forward(model, params, tokens).reshape(*tokens.shape, -1)[rows, last]
        return jax.random.categorical(key, model.logits(params, x) / temperature)

    for step in range(count):
        key = jax.random.fold_in(jax.random.key(seed), step)
        tokens[rows, lengths + step] = draw(params, tokens, lengths - 1 + step, key)
    return [tokens[row, length : length + count].tolist() for row, length in enumerate(lengths)]
