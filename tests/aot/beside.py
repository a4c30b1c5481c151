"""Compares the code of the TPU kernels with that of others: python -m tests.aot.beside.

All are compiled for the same shapes in one run, without a device: 32 query heads on 8 KV heads of 128 in bfloat16, 512
tokens of 16 rows, pages of 128 slots. jax's `ragged_paged_attention` has one kernel for decodes and prompts. It gets
the sizes of its own table for these shapes: steps of 8 pages and 32 queries. `--tpu-inference FOLDER` adds version 3 of
tpu-inference's, from a checkout of its repository, with the sizes that it chooses itself.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
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
from tests.aot import bundles, test_tpu, tpus

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
    alone, masked, joint = sorted(block.bundles for block in prompts if block.products)
    around = sum(block.bundles for block in prompts) - alone - masked - joint  # of a tile's step, which has several
    steps = shape.group * cut.tile // part.rows * (cut.tile_slots // part.slots) // cut.joint_parts
    return {
        "decodes": _code(bundles.blocks(folder, "attention_decodes"), mib),
        "prompts": Code(joint / cut.joint_parts / mflop, (joint + around / steps) / cut.joint_parts / mflop),
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


def of_tpu_inference(checkout: Path, folder: Path, device: Any) -> dict[str, Code]:
    """The code of tpu-inference's kernels, with the sizes of its own rule."""
    kernel = _without_packages(checkout, "tpu_inference", "kernels.ragged_paged_attention.v3.kernel")
    kernel.get_tpu_version = lambda: 5 if "v5" in device.device_kind else 6
    place = SingleDeviceSharding(device)

    def like(sizes: tuple[int, ...], dtype: Any = jnp.int32) -> Any:
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=place)

    dtype = jnp.dtype("bfloat16")
    q, kv = like((TOKENS, HEADS, DIM), dtype), like((TOKENS, KV_HEADS, DIM), dtype)
    pages = like(kernel.get_kv_cache_shape(64, PAGE, KV_HEADS, DIM, dtype), dtype)
    columns = CONTEXT // PAGE
    with targets.lowering(Mesh(np.array([device]), ("x",))):
        step = partial(kernel.ragged_paged_attention, sm_scale=DIM**-0.5, vmem_limit_bytes=64 * 2**20)
        lengths = like((ROWS,)), like((ROWS * columns,)), like((ROWS + 1,)), like((3,))
        jax.jit(step).lower(q, kv, kv, pages, *lengths).compile()
    sizes = partial(kernel.get_default_block_sizes, dtype, dtype, HEADS, KV_HEADS, DIM, PAGE, TOKENS, ROWS, columns)
    decode, mixed = sizes(case=kernel.RpaCase.DECODE), sizes(case=kernel.RpaCase.MIXED)
    prompts = [block for block in bundles.blocks(folder, "RPAm-*") if block.depth]
    products = sum(block.bundles for block in prompts if block.products)
    mflop = 4 * mixed["bq_sz"] * HEADS * mixed["bkv_csz"] * DIM / 1e6
    around = sum(block.bundles for block in prompts if not block.products)
    times = mixed["bkv_sz"] // mixed["bkv_csz"]
    return {
        "decodes": _code(bundles.blocks(folder, "RPAd-*"), decode["bkv_sz"] * SLOT_BYTES / 2**20),
        "prompts": Code(products / mflop, (products + around / times) / mflop),
    }


def _without_packages(checkout: Path, package: str, module: str) -> ModuleType:
    """A module of a checkout, imported without what its packages import."""
    names = module.split(".")
    for depth in range(len(names)):
        name = ".".join([package, *names[:depth]])
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__path__ = [str(checkout / name.replace(".", "/"))]
    return importlib.import_module(f"{package}.{module}")


def _code(blocks: list[bundles.Block], work: float) -> Code:
    inside = [block for block in blocks if block.depth]
    return Code(
        sum(block.bundles for block in inside if block.products) / work, sum(block.bundles for block in inside) / work
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("generations", nargs="*", default=["v5e", "v6e"])
    parser.add_argument("--tpu-inference", type=Path, metavar="FOLDER", help="a checkout of its repository")
    args = parser.parse_args()
    kernels: dict[str, Callable[[Path, Any], dict[str, Code]]] = {"ours": ours, "jax's": of_jax}
    if args.tpu_inference:
        kernels["tpu-inference's"] = partial(of_tpu_inference, args.tpu_inference)
    folder = Path(tempfile.mkdtemp())
    bundles.dump_to(folder)
    print(f"jax {jax.__version__}; bundles a MiB of decodes, and a MFLOP of prompts: in products / in the whole loop")
    for generation in args.generations:
        device = targets.devices_of(devices.parse(tpus.GENERATIONS[generation]))[0]
        for name, code_of in kernels.items():
            for path in folder.iterdir():
                path.unlink()
            made = code_of(folder, device)
            figures = ", ".join(f"{kind} {code.products:.2f} / {code.loop:.2f}" for kind, code in made.items())
            print(f"{generation} {name}: {figures}", flush=True)


if __name__ == "__main__":
    main()
