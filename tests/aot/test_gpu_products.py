"""What the compilers for A100 and H200 make of products with narrow weights and of experts; no device is asked for."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxserve.models.products import Quantized
from jaxserve.planning import targets
from jaxserve.runner import compiler_options, matmul
from pallas_kernels.gpu import grouped
from tests.aot import test_gpu, triton_kernels
from tests.aot.test_gpu import on_one

pytestmark = test_gpu.pytestmark


@pytest.mark.parametrize(
    ("device", "rows", "experts", "inputs", "outputs", "dtype", "kernel_dtype"),
    [
        ("a100-80g:1", 512, 128, 2048, 192, "bfloat16", "bfloat16"),  # Qwen3-30B-A3B over 4 devices, 64 tokens
        ("h200:1", 512, 128, 2048, 192, "bfloat16", "bfloat16"),
        ("h200:1", 512, 128, 192, 2048, "bfloat16", "int8"),
        ("a100-80g:1", 256, 32, 2880, 720, "float16", "int8"),  # gpt-oss-20b, 64 tokens
        ("a100-80g:1", 8192, 128, 2048, 192, "bfloat16", "bfloat16"),  # 1,024 tokens
        ("h200:1", 8192, 128, 2048, 192, "bfloat16", "int8"),
        ("a100-80g:1", 4096, 8, 4096, 3584, "bfloat16", "int8"),  # Mixtral-8x7B, 2,048 tokens
        ("h200:1", 4096, 8, 4096, 3584, "bfloat16", "bfloat16"),
        ("a100-80g:1", 4096, 8, 4096, 3584, "float32", "float32"),
        ("h200:1", 64, 8, 3000, 1000, "float32", "float32"),
    ],
)
def test_kernels_of_experts_are_read_in_place(
    device, rows, experts, inputs, outputs, dtype, kernel_dtype, tmp_path, tell
) -> None:
    """One kernel, which spills nothing; no other operation touches the experts' kernels."""
    one, abstract = on_one(device)
    arguments = [((rows, inputs), dtype), ((experts, outputs, inputs), kernel_dtype), ((experts,), "int32")]
    shapes = [abstract(dims, each) for dims, each in arguments]
    with triton_kernels.compiled() as made, targets.lowering(one):
        kind = one.devices.flat[0].device_kind
        lowered = jax.jit(partial(grouped.multiply_runs, device_kind=kind)).lower(*shapes)
    program = lowered.compile(compiler_options.of("gpu", absent=True))
    (kernel,) = triton_kernels.assembled(made, tmp_path)
    large = rf"\[{experts},\d+,\d+\]\S* ([a-z][\w-]*)\("
    assert set(re.findall(large, program.as_text())) == {"parameter"}
    temporaries = program.memory_analysis().temp_size_in_bytes
    tiling = grouped.runs_tiling(rows, experts, dtype)
    tell(
        "products of experts for GPUs (shared memory and temporaries in bytes)",
        device=device,
        rows=rows,
        kernels=f"{experts} x {outputs} x {inputs}",
        dtypes=f"{dtype} / {kernel_dtype}",
        tile=f"{tiling.rows} x {tiling.columns}",
        registers=kernel.registers,
        spilled=kernel.spilled,
        shared=kernel.shared,
        temporaries=temporaries,
    )
    assert kernel.spilled == 0
    assert kernel.tensor_cores > 0
    assert temporaries < 16 * (rows + 16 * experts)  # the table of tiles


def lowered_product(
    device: str, rows: int, outputs: int, inputs: int, held: str, group: int | None, zeros: bool
) -> Any:
    """The product of bfloat16 rows with a narrow kernel, lowered for a device."""
    one, like = on_one(device)
    counts = (outputs,) if group is None else (outputs, inputs // group)
    points = like(counts, "int8") if zeros else None
    matrix = Quantized(like((outputs, inputs), held), like(counts, "bfloat16"), points)
    kind = one.devices.flat[0].device_kind
    product = partial(matmul.DeviceProducts(native=None, device_kind=kind), dtype=jnp.bfloat16)
    with targets.lowering(one):
        return jax.jit(product).lower(like((rows, inputs), "bfloat16"), matrix)


def check(kernel: triton_kernels.Kernel, temporaries: int, tell: Callable[..., None]) -> None:
    """Tells what was made of a kernel that spills nothing and multiplies in tensor cores."""
    tell(
        registers=kernel.registers,
        spilled=kernel.spilled,
        shared=kernel.shared,
        temporaries=f"{temporaries / 2**20:.1f} MiB",
    )
    assert kernel.spilled == 0
    assert kernel.tensor_cores > 0


@pytest.mark.parametrize("device", ["a100-80g:1", "h200:1"])
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "group", "zeros"),
    [(8, 11008, 4096, 32, False), (256, 4096, 11008, 128, True)],  # of Llama-2-7B
)
def test_int4_kernels_are_widened_inside_the_product(device, rows, outputs, inputs, group, zeros, tmp_path, tell):
    """What the program has beside its arguments has no space for the wide kernel."""
    with triton_kernels.compiled() as made:
        lowered = lowered_product(device, rows, outputs, inputs, "int4", group, zeros)
    program = lowered.compile(compiler_options.of("gpu", absent=True))
    (kernel,) = triton_kernels.assembled(made, tmp_path)
    temporaries = program.memory_analysis().temp_size_in_bytes
    cells = {"device": device, "rows": rows, "kernel": f"{outputs} x {inputs}", "group": group, "zeros": zeros}
    check(kernel, temporaries, partial(tell, "products with int4 kernels for GPUs", **cells))
    # The two halves of x, and sums of parts of the inputs.
    assert temporaries < 2**20 + 4 * rows * (inputs + 8 * outputs)


@pytest.mark.parametrize("device", ["a100-80g:1", "h200:1"])
@pytest.mark.parametrize("rows", [8, 256])
def test_float8_kernels_are_widened_inside_the_product(device, rows, tmp_path, tell):
    """By our kernel on A100, which has no instructions for float8, and by XLA's on H200."""
    with triton_kernels.compiled() as made:
        lowered = lowered_product(device, rows, 11008, 4096, "float8_e4m3fn", None, False)
    temporaries = lowered.compile(compiler_options.of("gpu", absent=True)).memory_analysis().temp_size_in_bytes
    kernels = triton_kernels.assembled(made, tmp_path)
    assert len(kernels) == device.startswith("a100")
    for kernel in kernels:
        check(kernel, temporaries, partial(tell, "products with float8 kernels for A100", rows=rows))
    assert temporaries < 11008 * 4096 // 4
