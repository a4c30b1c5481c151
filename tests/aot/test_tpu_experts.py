"""The TPU kernels for experts, compiled for TPUs that are not there."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import SingleDeviceSharding

from jaxserve.models.experts import gated
from jaxserve.planning import model_catalog, targets
from jaxserve.runner import compiler_options
from pallas_kernels.tpu import grouped
from pallas_kernels.tpu.grouped import Stack
from pallas_kernels.tpu.layout import LANES
from pallas_kernels.tpu.routing import Router
from sharding import devices
from tests.aot import bundles, tpus

pytestmark = tpus.MARKS

# The model, and over how many devices the inner state of each expert is divided.
MODELS = [("mixtral-8x7b", 8), ("gpt-oss-20b", 4), ("qwen3-30b-a3b", 4)]


@pytest.mark.parametrize(
    ("generation", "name", "parts", "dtype", "tokens"),
    [
        pytest.param(generation, *model, dtype, 1024, marks=() if not i or (i + j) % 3 == 0 else pytest.mark.weekly)
        for i, (model, dtype) in enumerate(
            [(MODELS[0], "bfloat16"), (MODELS[1], "bfloat16"), (MODELS[2], "bfloat16"), (MODELS[0], "int8")]
        )
        for j, generation in enumerate(tpus.GENERATIONS)
    ]
    + [("v5e", *MODELS[2], "bfloat16", 8192), ("v6e", *MODELS[1], "bfloat16", 300)]
    + [
        pytest.param(generation, *model, dtype, tokens, marks=marks)
        for model, dtype, tokens, weekly in [
            (MODELS[0], "bfloat16", 16, ("v4",)),
            (MODELS[1], "bfloat16", 3, ("v4", "v5p", "tpu7x")),
            (MODELS[2], "bfloat16", 128, ("v4", "v5p", "v6e")),
            (MODELS[0], "int8", 64, ("v5e", "v5p", "tpu7x")),
        ]
        for generation in tpus.GENERATIONS
        for marks in [pytest.mark.weekly if generation in weekly else ()]
    ]
    + [("v6e", *MODELS[1], "bfloat16", 256)],
)
def test_the_kernels_of_experts_compile(tell, hold, code, generation, name, parts, dtype, tokens):
    """They read kernels in place: in memory there are a row of each choice, its inner state and its result, or the
    inner states of few tokens for every expert, and no kernel, copied or widened."""
    config = model_catalog.find(name)[1]
    hidden, inner = config.hidden_size, config.ffn_size // parts
    count, per_token = config.num_experts, config.experts_per_token
    device = targets.devices_of(devices.parse(tpus.GENERATIONS[generation]))[0]
    kind, dtypes = device.device_kind, (jnp.dtype("bfloat16"), jnp.dtype(dtype))
    place, has_bias = SingleDeviceSharding(device), name == "gpt-oss-20b"

    def like(sizes, dtype: Any = jnp.bfloat16, order=None) -> Any:
        at = place if order is None else Format(Layout(order), place)
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=at)

    def stack(outputs, inputs) -> Stack:
        scales, bias = (like((count, outputs), jnp.float32, (0, 1)) for _ in range(2))
        values = like((count, outputs, inputs), dtype, (0, 2, 1))
        return Stack(values, scales if dtype == "int8" else None, bias if has_bias else None)

    assert grouped.supports(tokens, per_token, hidden, inner, dtypes, kind)
    step = partial(grouped.mixture, per_token=per_token, add_up=True, activation=gated, parts=parts, device_kind=kind)
    router = Router(like((count, hidden)), like((count,), jnp.float32) if has_bias else None)
    stacks = stack(inner, hidden), stack(inner, hidden), stack(hidden, inner)
    with targets.lowering(jax.sharding.Mesh([device], ("x",))):
        lowered = jax.jit(step).lower(
            like((tokens, hidden)), like((tokens,), jnp.int32), router, like((1,), jnp.int32), *stacks
        )
    memory = lowered.compile(compiler_options.of("tpu", absent=True)).memory_analysis()
    assert memory is not None
    few = tokens <= grouped.tile_rows(kind)
    rows = per_token * -(-tokens // LANES) * LANES
    values = count * -(-tokens // 16) * 16 * -(-inner // LANES) * LANES if few else rows * (3 * hidden + inner)
    assert memory.temp_size_in_bytes < 2 * values + 2**22
    figures = figures_of(code, hidden, inner, dtypes, kind, few=few)
    tell(
        "kernels of experts, compiled without a device",
        device=generation,
        model=name,
        parts=parts,
        dtype=dtype,
        tokens=tokens,
        temporaries=f"{memory.temp_size_in_bytes / 2**20:.1f} MiB",
        **figures,
    )
    if tokens == 1024 or few:
        told = f", {tokens} tokens" if few else ""
        hold(f"{generation}, kernels of experts of {name} in {dtype}{told}", figures)


def figures_of(
    code: Path, hidden: int, inner: int, dtypes: tuple[Any, Any], kind: str, *, few: bool
) -> dict[str, float]:
    """Bundles of a step of each of the two products, with what is done to its result.

    For few tokens, whose pace is that of memory, for what it reads.
    """
    figures = {}
    for what, stacks, inputs, outputs in (("inner", 2, hidden, inner), ("outer", 1, inner, hidden)):
        blocks = grouped.blocks(inputs, outputs, stacks, dtypes, kind)
        assert blocks is not None
        products = [block for block in bundles.blocks(code, f"experts_{what}") if block.products]
        count, values = sum(block.bundles for block in products), stacks * inputs * blocks.step
        if few:
            figures[f"bundles a MiB of kernels, {what}"] = round(count / (values * dtypes[1].itemsize / 2**20))
        else:
            mflop = 2 * grouped.tile_rows(kind) * values / 1e6
            figures[f"bundles a MFLOP, {what}"] = round(count / mflop, 2)
    return figures
