"""The contract of ragged paged attention, and the choice of the backend that serves it.

One call serves a mixed batch. Every chunk is a run of new tokens of one row; a decode is a run of length 1. Its keys
and values are written to the row's blocks, and each token attends to its row's positions up to its own. Chunks are
distinguished by data (`AttentionBatch`), never by a flag. A backend is one module of this package that exports
`BACKEND`. It owns the layout of its pool, its legal block sizes, the write and the attention.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from jaxtyping import Float, Float32


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """The static part of the attention of one model on one device.

    Attributes:
      num_heads: query heads on this device (N).
      num_kv_heads: key and value heads on this device (K); it divides num_heads, and query head n reads KV head
        n // (num_heads // num_kv_heads).
      head_dim: D.
      dtype: dtype of queries, keys, values and outputs; float32 or bfloat16.
      pool_dtype: dtype of the keys and values in the pool; int8 stands for `int8.quantize`, whose scales the pool
        holds too.
      alibi: whether scores have an ALiBi bias (Press et al., 2022).
      soft_cap: scores are soft_cap * tanh(score / soft_cap), or None (Gemma 2, arXiv:2408.00118, section 2).
      sinks: whether each head has a learned score that takes part in the softmax and adds no value (gpt-oss).
      windows: the distinct sliding windows of the layers, None for a layer without one.
      block_size: slots in a block; 0 before one is chosen (see `with_blocks`).
      slot_parts: devices that the slots of every block are split over; each holds a run of `local_slots` of them.
      max_blocks: blocks in a row's table; 0 before it is chosen.
      max_rows: most rows of a batch; 0 if unknown.
      device_kind: JAX's name of the device, for backends that support several; empty if unknown.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: np.dtype
    pool_dtype: np.dtype
    alibi: bool
    soft_cap: float | None = None
    sinks: bool = False
    windows: tuple[int | None, ...] = (None,)
    block_size: int = 0
    slot_parts: int = 1
    max_blocks: int = 0
    max_rows: int = 0
    device_kind: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", np.dtype(self.dtype))
        object.__setattr__(self, "pool_dtype", np.dtype(self.pool_dtype))
        for name in ("num_heads", "num_kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads is {self.num_kv_heads}; it must divide num_heads, which is {self.num_heads}"
            )
        if self.soft_cap is not None and not self.soft_cap > 0:
            raise ValueError(f"soft_cap is {self.soft_cap}; it must be more than 0, or None")
        if not self.windows or any(window is not None and window < 1 for window in self.windows):
            raise ValueError(f"windows is {self.windows}; each must be at least 1, or None")
        for name in ("block_size", "max_blocks", "max_rows"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must not be negative")
        if self.slot_parts < 1 or self.block_size % self.slot_parts:
            raise ValueError(f"block_size is {self.block_size}; it must be a multiple of {self.slot_parts}, slot_parts")

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def local_slots(self) -> int:
        """Slots of a block that this device holds."""
        return self.block_size // self.slot_parts

    def with_blocks(self, block_size: int, max_context: int) -> AttentionShape:
        """The same shape with blocks of `block_size` slots and tables for `max_context` tokens."""
        if block_size < 1:
            raise ValueError(f"block_size is {block_size}; it must be at least 1")
        return dataclasses.replace(self, block_size=block_size, max_blocks=-(-max_context // block_size))


class AttentionBatch(NamedTuple):
    """One iteration as the device sees it: at most C chunks over T flat tokens (the bucket).

    Chunks of length 1 come first, then the longer ones (a chunk of length 1 further back is served too), then empty
    chunks. Rows may share blocks that no chunk of this iteration writes. Table entries beyond a row's `kv_lens` are
    never read. Those within must name blocks of the pool; the host checks that before launch. In a layer with a sliding
    window, blocks that lie wholly before the window of a chunk's first token may belong to other rows; their contents
    have no effect.

    Attributes:
      query_offsets: int32[C+1]. Chunk c's tokens are the flat tokens query_offsets[c]:query_offsets[c+1];
        query_offsets[C] is the number of tokens in use; the rest of T is padding.
      kv_lens: int32[C]. Tokens of the row once this chunk is written (start + length); 0 for an empty chunk.
      block_tables: int32[C, max_blocks]. Block that holds positions [j * block_size, (j + 1) * block_size).
      token_chunk: int32[T]. Chunk of each flat token; any valid chunk for padding.
      positions: int32[T]. Position of each flat token in its row; 0 for padding.
    """

    query_offsets: jax.Array
    kv_lens: jax.Array
    block_tables: jax.Array
    token_chunk: jax.Array
    positions: jax.Array


# Why a backend refuses a shape with several `slot_parts`.
ONE_SLOT_PART = "slots of a block on several devices; xla and tpu serve these"


class PartialAttention(NamedTuple):
    """Attention to the slots of one part (`AttentionShape.slot_parts`), an average of values.

    The average over all slots is that of these averages, weighted by exp(lse).

    Attributes:
      out: [T, N, D].
      lse: float32[T, N]; None where there is one part. The logarithm of the sum of exp(score), plus a number that is
        the same for all parts. Very low, but finite, where a query sees no slot of the part; any finite number for
        padding.
    """

    out: jax.Array
    lse: Any


class Backend(Protocol):
    """The interface of a backend, which each backend module exports as `BACKEND`.

    One pool holds the blocks of all layers, layer after layer: donate it and chain it through them. (A pool with an
    axis of layers, scanned as xs/ys, is copied slice by slice.)
    """

    @property
    def name(self) -> str: ...

    @property
    def platforms(self) -> frozenset[str] | None:
        """JAX platforms it runs on ("cpu", "gpu", "tpu"); None for all."""
        ...

    def supports(self, shape: AttentionShape) -> str | None:
        """None if it can serve the shape, otherwise the reason as text."""
        ...

    def default_block_size(self, shape: AttentionShape) -> int:
        """The fastest number of slots of a block on a device; reads no `block_size` or `max_blocks`."""
        ...

    def default_pool_dtype(self, dtype: np.dtype, platform: str) -> np.dtype:
        """The dtype of keys and values in the pool, for queries of `dtype`."""
        ...

    def pool(self, shape: AttentionShape, n_blocks: int) -> Any:
        """Pytree of `ShapeDtypeStruct`: a pool of n_blocks blocks in all.

        Its initial contents may be arbitrary.

        The first axis of every leaf counts blocks (there may be more than asked for), and holds all of a block's data,
        so blocks can be copied without the backend.
        """
        ...

    def pool_axes(self, shape: AttentionShape) -> Any:
        """The same pytree with a tuple of axis names at each leaf.

        The name "heads" is for the axis that holds KV heads, or parts of them, one after another, and "slots" for that
        of a block's slots. Others have None.
        """
        ...

    def saves_on_decodes(self, n_tokens: int, n_chunks: int) -> bool:
        """Whether a program of decodes only runs fewer kernels at these sizes (T and C)."""
        ...

    def prepare(
        self,
        batch: AttentionBatch,
        shape: AttentionShape,
        *,
        decodes_only: bool = False,
        part: jax.Array | int = 0,
    ) -> Any:
        """A pytree for `attend` that all layers of one iteration share, computed once per step.

        Args:
          decodes_only: whether no chunk is longer than 1, known when the program is traced.
          part: which of the shape's `slot_parts` this device holds.
        """
        ...

    def attend(
        self,
        q: Float[jax.Array, "T N D"],
        k: Float[jax.Array, "T K D"],
        v: Float[jax.Array, "T K D"],
        pool: Any,
        meta: Any,
        shape: AttentionShape,
        *,
        slopes: Float32[jax.Array | np.ndarray, " N"] | None,
        scale: float,
        window: int | None = None,
        sinks: Float[jax.Array, " N"] | None = None,
        first_block: jax.Array | int = 0,
    ) -> tuple[Float[jax.Array, "T N D"] | PartialAttention, Any]:
        """Write k and v to their slots, then attend causally.

        A score is soft-capped after `scale`, and biased after that.

        Args:
          q, k, v: arrays of shape.dtype.
          pool: the blocks of all layers. If the step's jit donates it, it is updated in place.
          meta: the result of `prepare` for this iteration.
          slopes: ALiBi slopes, if shape.alibi; the bias of a score is slopes[n] * (key position - query position).
          scale: factor of the scores, typically head_dim ** -0.5.
          window: the layer's sliding window, one of shape.windows: a token at position p attends to positions above
            p - window. None attends to all.
          sinks: the score of each head's sink, if shape.sinks: exp(sink) joins the sum that weights are divided by.
            It is neither scaled nor capped nor biased. With several `slot_parts`, it is of one part, and very low but
            finite in the others.
          first_block: first block of this layer: block tables count from it.

        Returns:
          (out of shape.dtype, pool). Rows of out that belong to padding are zeros. With several `slot_parts`, only
          slots of this part are written and attended to, and out is a `PartialAttention`.
        """
        ...


class Selection(NamedTuple):
    backend: Backend
    reason: str


# Name -> module, best first: `auto` takes the first one that runs on the platform and supports the shape.
MODULES: Mapping[str, str] = {
    "tpu": "pallas_kernels.tpu",
    "gpu": "pallas_kernels.gpu",
    "cpu": "pallas_kernels.cpu",
    "xla": "pallas_kernels.xla",
}


def load(name: str) -> Backend:
    """The backend called `name`. ValueError, with the known names, if there is none."""
    if name not in MODULES:
        raise ValueError(f"attention backend {name!r} is not known; it must be auto or one of {', '.join(MODULES)}")
    return importlib.import_module(MODULES[name]).BACKEND


def select(name: str, shape: AttentionShape, platform: str) -> Selection:
    """Pick the backend that serves `shape` on `platform`, and say why.

    Args:
      name: a backend's name, or `auto` for the first in the table that can serve.
      shape: block_size may still be 0; call again with the chosen size to have the backend check it.
      platform: "cpu", "gpu" or "tpu" (`jax.default_backend()`).

    Raises:
      ValueError: a named backend cannot serve (with its reason), the name is unknown, or no backend can serve.
    """
    if name != "auto":
        backend = load(name)
        refusal = _refusal(backend, shape, platform)
        if refusal:
            raise ValueError(f"attention backend {name!r} cannot serve: {refusal}")
        return Selection(backend, f"{name} was asked for")
    refusals: list[str] = []
    for candidate in MODULES:
        backend = load(candidate)
        refusal = _refusal(backend, shape, platform)
        if refusal is None:
            return Selection(backend, "; ".join([f"{candidate} is the first that serves {platform}", *refusals]))
        refusals.append(f"not {candidate}: {refusal}")
    raise ValueError(f"no attention backend can serve {shape} on {platform}: {'; '.join(refusals)}")


def _refusal(backend: Backend, shape: AttentionShape, platform: str) -> str | None:
    if backend.platforms is not None and platform not in backend.platforms:
        return f"it runs on {', '.join(sorted(backend.platforms))}, not on {platform}"
    return backend.supports(shape)
