"""The reference: ragged attention in NumPy and float64, written for clarity, not speed."""

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
) -> list[np.ndarray]:
    """Causal attention of each chunk over its own row.

    Args:
      q: per chunk [length, N, D]: queries of the last `length` positions of the row.
      keys, values: per chunk [kv_len, K, D]: the whole row, this chunk included, in position order.
      slopes: [N] ALiBi slopes or None; the bias is slope * key position (Press et al., 2022).
      scale: factor of the scores.

    Returns:
      Per chunk float64 [length, N, D].
    """
    return [_attention(*chunk, slopes, scale) for chunk in zip(q, keys, values, strict=True)]


def _attention(q: np.ndarray, keys: np.ndarray, values: np.ndarray, slopes: np.ndarray | None, scale: float):
    q, keys, values = (np.asarray(x, np.float64) for x in (q, keys, values))
    length, num_heads, _ = q.shape
    kv_len, num_kv_heads, _ = keys.shape
    keys = np.repeat(keys, num_heads // num_kv_heads, axis=1)  # [L, N, D]
    values = np.repeat(values, num_heads // num_kv_heads, axis=1)
    key_position = np.arange(kv_len)
    query_position = kv_len - length + np.arange(length)
    scores = np.einsum("qnd,knd->nqk", q, keys) * scale  # [N, length, L]
    if slopes is not None:
        scores += np.asarray(slopes, np.float64)[:, None, None] * key_position
    scores = np.where(key_position <= query_position[:, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True, initial=-np.inf))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("nqk,knd->qnd", weights, values)
