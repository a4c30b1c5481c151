"""Native ragged attention for CPUs: one XLA custom call writes keys and values and attends.

The call is in `attention.cc`. The pool is that of the plain-JAX backend. The call is compiled on first use with the
local C++ compiler for the local CPU, and cached (`build.py`). Without a compiler the backend supports nothing and says
why.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Float32

from pallas_kernels.api import ONE_SLOT_PART, AttentionBatch, AttentionShape
from pallas_kernels.cpu import build
from pallas_kernels.xla import XlaBackend, XlaPool, effective_window

_NO_WINDOW = 2**31  # more than any position


class CpuBackend(XlaBackend):
    name = "cpu"
    platforms = frozenset({"cpu"})

    def supports(self, shape: AttentionShape) -> str | None:
        if shape.slot_parts > 1:
            return ONE_SLOT_PART
        return super().supports(shape) or build.refusal()

    def prepare(
        self,
        batch: AttentionBatch,
        shape: AttentionShape,
        *,
        decodes_only: bool = False,
        part: jax.Array | int = 0,
    ) -> Any:
        del shape, decodes_only, part
        return batch

    def attend(
        self,
        q: Float[jax.Array, "T N D"],
        k: Float[jax.Array, "T K D"],
        v: Float[jax.Array, "T K D"],
        pool: XlaPool,
        meta: Any,
        shape: AttentionShape,
        *,
        slopes: Float32[jax.Array | np.ndarray, " N"] | None,
        scale: float,
        window: int | None = None,
        sinks: Float[jax.Array, " N"] | None = None,
        first_block: jax.Array | int = 0,
    ) -> tuple[Float[jax.Array, "T N D"], XlaPool]:
        window = effective_window(window, shape)
        per_head = (jnp.zeros(0, jnp.float32) if x is None else jnp.asarray(x, jnp.float32) for x in (slopes, sinks))
        held, structure = jax.tree.flatten(pool)
        operands = (
            q,
            k,
            v,
            meta.query_offsets,
            meta.kv_lens,
            meta.block_tables,
            jnp.asarray(first_block, jnp.int32),
            *per_head,
        )
        like = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in (q, *held)]
        call = jax.ffi.ffi_call(
            build.ATTENTION, like, input_output_aliases={len(operands) + i: 1 + i for i in range(len(held))}
        )
        with jax.named_scope("attention"):
            out, *held = call(
                *operands,
                *held,
                window=np.int64(_NO_WINDOW if window is None else window),
                scale=np.float32(scale),
                soft_cap=np.float32(shape.soft_cap or 0),
            )
        return out, jax.tree.unflatten(structure, held)


BACKEND = CpuBackend()
