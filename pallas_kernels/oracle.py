"""References in NumPy, float64: ragged attention, products of runs of rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def ragged_attention(
    q: Sequence[np.ndarray],
    keys: Sequence[np.ndarray],
    values: Sequence[np.ndarray],
    *,
    slopes: np.ndarray | None,
    scale: float,
    soft_cap: float | None = None,
    window: int | None = None,
    sinks: np.ndarray | None = None,
) -> list[np.ndarray]:
    """Causal attention of each chunk over its own row.

    Args:
      q: per chunk [length, N, D]: queries of the last `length` positions of the row.
      keys, values: per chunk [kv_len, K, D]: the whole row, this chunk included, in position order.
      slopes: [N] ALiBi slopes or None; the bias is slope * (key position - query position) (Press et al., 2022).
      scale: factor of the scores.
      soft_cap: scores become soft_cap * tanh(score / soft_cap), before the bias; or None.
      window: a query at position p attends to positions above p - window; None for all.
      sinks: [N] scores that join each head's softmax without a value; or None.

    Returns:
      Per chunk float64 [length, N, D].
    """
    return [_attention(*chunk, slopes, scale, soft_cap, window, sinks) for chunk in zip(q, keys, values, strict=True)]


def _attention(
    q: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    slopes: np.ndarray | None,
    scale: float,
    soft_cap: float | None,
    window: int | None,
    sinks: np.ndarray | None,
) -> np.ndarray:
    q, keys, values = (np.asarray(x, np.float64) for x in (q, keys, values))
    length, num_heads, _ = q.shape
    kv_len, num_kv_heads, _ = keys.shape
    q = q.swapaxes(0, 1)  # [N, length, D]
    keys = np.repeat(keys, num_heads // num_kv_heads, axis=1).swapaxes(0, 1)  # [N, L, D]
    values = np.repeat(values, num_heads // num_kv_heads, axis=1).swapaxes(0, 1)
    key_position = np.arange(kv_len)
    query_position = kv_len - length + np.arange(length)[:, None]
    scores = q @ keys.mT * scale  # [N, length, L]
    if soft_cap is not None:
        scores = soft_cap * np.tanh(scores / soft_cap)
    if slopes is not None:
        scores += np.asarray(slopes, np.float64)[:, None, None] * (key_position - query_position)
    visible = key_position <= query_position
    if window is not None:
        visible &= key_position > query_position - window
    scores = np.where(visible, scores, -np.inf)
    highest = scores.max(-1, keepdims=True, initial=-np.inf)
    sink = np.full((num_heads, 1, 1), -np.inf) if sinks is None else np.asarray(sinks, np.float64)[:, None, None]
    highest = np.maximum(highest, sink)
    weights = np.exp(scores - highest)
    weights /= weights.sum(-1, keepdims=True) + np.exp(sink - highest)
    # Values that no query sees may be NaN.
    return (weights @ np.where(visible.any(0)[:, None], values, 0)).swapaxes(0, 1)


def runs_product(x: np.ndarray, kernels: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Runs of sizes[g] rows of x [R, in] times kernels[g] [out, in], as float64 [rows, out]."""
    runs = np.split(np.asarray(x, np.float64), np.cumsum(sizes))  # the last has the rows beyond
    return np.concatenate([run @ np.asarray(kernel, np.float64).T for run, kernel in zip(runs, kernels, strict=False)])
