"""The arrays that the GPU backend's kernels read."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax


class GpuPool(NamedTuple):
    """Keys and values: arrays, their `ShapeDtypeStruct`, or the names of their axes.

    Scales belong to int8 (`int8.quantize`) and are None otherwise.
    """

    keys: Any  # [n_blocks, K, block_size, D]
    values: Any  # likewise
    key_scales: Any = None  # float32[n_blocks, K, block_size]
    value_scales: Any = None  # likewise


class Context(NamedTuple):
    """The pool, block tables, slopes and sinks of a layer."""

    pool: GpuPool
    tables: Any  # int32[C, max_blocks]
    first_block: Any  # int32[1]
    slopes: Any  # float32[N] or None
    sinks: Any  # likewise


class GpuMetadata(NamedTuple):
    """The work of an iteration, which all layers share.

    Attributes:
      slots: int32[T, 2]. Block and slot in it that each token is written to; block -1 for padding.
      decodes / prompts: int32[n, 4]. Queries that one program computes together: first flat token, number (0 for
        none), position of the last, chunk.
      prompt_tokens: int32[T, 4]. Each token of `prompts`, and the other columns of the tile that it is in.
      tables: int32[C, max_blocks].
    """

    slots: jax.Array
    decodes: jax.Array
    prompts: jax.Array | None
    prompt_tokens: jax.Array | None
    tables: jax.Array
