"""Compares the code of the TPU kernels with that of jax's own: python -m tests.aot.beside [v5e v6e].

Both are compiled for the same shapes in one run, without a device: 32 query heads on 8 KV heads of 128 in bfloat16, 512
tokens of 16 rows, pages of 128 slots. jax's `ragged_paged_attention` has one kernel for decodes and prompts. It gets
the sizes of its own table for these shapes: steps of 8 pages and 32 queries.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention
from jax.sharding import Mesh, SingleDeviceSharding

from jaxserve.planning import targets
from pallas_kernels.api import AttentionShape
from pallas_kernels.tpu import cuts
from sharding import devices
from tests.aot import bundles, test_tpu

TOKENS, ROWS, CONTEXT, PAGE = 512, 16, 2048, 128
HEADS, KV_HEADS, DIM = 32, 8, 128
PAGES, QUERIES = 8, 32  # of a step of jax's kernel
SLOT_BYTES = 2 * KV_HEADS * DIM * 2


class Code(NamedTuple):
    """Bundles of a kernel.

    Attributes:
      products: in the blocks with the products, for a MiB of a decode's keys and values, or for a MFLOP of a prompt.
      loop: in the whole loop, with every branch.
    """

    products: float
    loop: float


def ours(folder: Path, device: Any) -> dict[str, Code]:
    """The code of the kernels here, for decodes and for prompts."""
    dtype = jnp.dtype("bfloat16")
    shape = AttentionShape(
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
        dtype=dtype,
        pool_dtype=dtype,
        alibi=False,
        max_rows=ROWS,
        device_kind=device.device_kind,
    ).with_blocks(PAGE, CONTEXT)
    test_tpu.compiled_attention(device, shape, TOKENS, ROWS, 64)
    cut = cuts.cut(shape, TOKENS)
    part = cuts.part_of_tile(shape, cut)
    mib = cut.units * cut.unit_slots * SLOT_BYTES / 2**20
    mflop = 4 * part.rows * part.slots * DIM / 1e6
    prompts = bundles.blocks(folder, "attention_prompts")
    unmasked = min(block.bundles for block in prompts if block.products)
    masked = max(block.bundles for block in prompts if block.products)
    around = sum(block.bundles for block in prompts) - masked  # of a tile's step, which has several parts
    parts = shape.group * cut.tile // part.rows * (cut.tile_slots // part.slots)
    return {
        "decodes": _code(bundles.blocks(folder, "attention_decodes"), mib),
        "prompts": Code(unmasked / mflop, (unmasked * parts + around - unmasked) / parts / mflop),
    }


def of_jax(folder: Path, device: Any) -> dict[str, Code]:
    """The code of jax's kernel, in which a step is of some pages for some queries."""
    place = SingleDeviceSharding(device)

    def like(sizes: tuple[int, ...], dtype: Any = jnp.int32) -> Any:
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=place)

    def step(q, pages, kv_lens, tables, offsets, n_rows):
        return ragged_paged_attention(
            q,
            pages,
            kv_lens,
            tables,
            offsets,
            n_rows,
            sm_scale=DIM**-0.5,
            num_kv_pages_per_block=PAGES,
            num_queries_per_block=QUERIES,
            vmem_limit_bytes=64 * 2**20,
        )

    q, pages = like((TOKENS, HEADS, DIM), jnp.bfloat16), like((64, PAGE, 2 * KV_HEADS, DIM), jnp.bfloat16)
    with targets.lowering(Mesh(np.array([device]), ("x",))):
        lowered = jax.jit(step).lower(
            q, pages, like((ROWS,)), like((ROWS, CONTEXT // PAGE)), like((ROWS + 1,)), like((1,))
        )
    lowered.compile()
    code = bundles.blocks(folder, "ragged_paged_attention_kernel")
    slots = PAGES * PAGE
    return {
        "decodes": _code(code, slots * SLOT_BYTES / 2**20),
        "prompts": _code(code, 4 * QUERIES * HEADS * slots * DIM / 1e6),
    }


def _code(blocks: list[bundles.Block], work: float) -> Code:
    inside = [block for block in blocks if block.depth]
    return Code(
        sum(block.bundles for block in inside if block.products) / work, sum(block.bundles for block in inside) / work
    )


def main() -> None:
    folder = Path(tempfile.mkdtemp())
    bundles.dump_to(folder)
    print(f"jax {jax.__version__}; bundles a MiB of decodes, and a MFLOP of prompts: in products / in the whole loop")
    for generation in sys.argv[1:] or ["v5e", "v6e"]:
        device = targets.devices_of(devices.parse(test_tpu.GENERATIONS[generation]))[0]
        for name, code_of in (("ours", ours), ("jax's", of_jax)):
            for path in folder.iterdir():
                path.unlink()
            made = code_of(folder, device)
            figures = ", ".join(f"{kind} {code.products:.2f} / {code.loop:.2f}" for kind, code in made.items())
            print(f"{generation} {name}: {figures}", flush=True)


if __name__ == "__main__":
    main()
