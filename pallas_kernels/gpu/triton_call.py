"""Calls of Triton kernels in JAX programs.

A kernel is compiled when a program that calls it is traced, for the GPU that the program is for; no GPU has to be
there. XLA calls it through jaxlib's `triton_kernel_call_ffi`, which command buffers (CUDA graphs) can hold.
"""

from __future__ import annotations

import importlib.util
import zlib
from collections.abc import Mapping
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.gpu import interpreter

# CUDA compute capability, times 10, and processors, by parts of JAX's device names.
_GPUS = {"A100": (80, 108), "H100": (90, 132), "H200": (90, 132)}
_TYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "int8": "i8", "uint8": "u8", "int32": "i32"}


def capability(device_kind: str) -> int | None:
    """Ten times the compute capability of a device; None if the kernels do not serve it."""
    return next((value for name, (value, _) in _GPUS.items() if name in device_kind), None)


def processors(device_kind: str) -> int:
    """The streaming multiprocessors of a device; 1 of a device that the kernels do not serve."""
    return next((count for name, (_, count) in _GPUS.items() if name in device_kind), 1)


def missing() -> str | None:
    """What the kernels need and is not installed here."""
    if jax.__version_info__ < (0, 11):
        return f"jax {jax.__version__}; its kernels need jax 0.11"
    return None if importlib.util.find_spec("triton") else "no Triton (pip install triton)"


def operands(dtype: Any, interpret: bool) -> Any:
    """Triton's type for operands; its interpreter, where bfloat16 is integers, takes float32."""
    import triton.language as tl

    wanted = jnp.dtype(jnp.float32 if interpret else dtype)
    return {"bfloat16": tl.bfloat16, "float16": tl.float16, "float32": tl.float32}[wanted.name]


def triton_call(
    kernel: Any,
    grid: tuple[int, ...],
    inputs: Mapping[str, jax.Array | None],
    *,
    changed: Mapping[str, jax.Array | None] | None = None,
    new: Mapping[str, jax.ShapeDtypeStruct | None] | None = None,
    constants: Mapping[str, Any],
    warps: int,
    stages: int,
    resident: int | None = None,
    device_kind: str,
    interpret: bool = False,
) -> dict[str, jax.Array]:
    """Run a kernel on a grid of programs; returns the arrays of `changed` and `new` by name.

    Args:
      kernel: a `triton.jit` function whose arguments are those of `inputs`, `changed` and `new`, in this order, and
        `constants`. A pointer to None is the constant None.
      changed: arrays that are updated in place.
      new: shapes of output arrays; their initial contents are arbitrary.
      warps / stages: of a program; steps of a loop whose operands are read ahead.
      resident: programs for which a processor has registers at once; without it, a program has all that it can use.
      device_kind: JAX's name of the GPU.
      interpret: run in Triton's interpreter, on a CPU.

    Raises:
      RuntimeError: kernels for the device cannot be compiled here.
    """
    changed, new = changed or {}, new or {}
    absent = [name for name, x in (*inputs.items(), *changed.items(), *new.items()) if x is None]
    constants = dict(constants) | dict.fromkeys(absent)
    given, kept = ({name: x for name, x in arrays.items() if x is not None} for arrays in (inputs, changed))
    made = {name: x for name, x in new.items() if x is not None}
    if interpret:
        out = interpreter.call(kernel, grid, given, kept, made, constants)
    else:
        pointers = {name: _TYPES[x.dtype.name] for name, x in (given | kept | made).items()}
        served, absent_here = capability(device_kind), missing()
        if served is None or absent_here:
            raise RuntimeError(f"no kernels for device {device_kind!r}: {absent_here or 'they serve other GPUs'}")
        launch = _compiled(
            kernel, *(tuple(x.items()) for x in (pointers, constants)), grid, warps, stages, resident, served
        )
        # What changes is the last input and the last output, so the kernel gets no pointer to it twice.
        results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (*made.values(), *kept.values())]
        aliases = {len(given) + i: len(made) + i for i in range(len(kept))}
        run = jax.ffi.ffi_call("triton_kernel_call_ffi", results, input_output_aliases=aliases)
        out = run(*given.values(), *kept.values(), opaque=launch)
    return dict(zip((*made, *kept), out, strict=True))


@cache
def _compiled(
    kernel: Any,
    pointers: tuple[tuple[str, str], ...],
    constants: tuple[tuple[str, Any], ...],
    grid: tuple[int, ...],
    warps: int,
    stages: int,
    resident: int | None,
    capability: int,
) -> bytes:
    """What jaxlib launches: a kernel's PTX, its grid and its parameters."""
    import triton
    from jaxlib import gpu_triton  # what jax_triton calls
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = dict(pointers)
    names = list(kernel.arg_names)
    signature = {name: f"*{types[name]}" if name in types else "constexpr" for name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name in types}
    source = ASTSource(kernel, signature, dict(constants), aligned)
    target = GPUTarget("cuda", capability, 32)
    options = {"num_warps": warps, "num_stages": stages}
    if resident is not None:  # a processor has 65,536 registers, and a thread at most 255
        options["maxnreg"] = min(65536 // (resident * warps * 32) // 8 * 8, 255)
    done = triton.compile(source, target=target, options=options)
    name, text = done.metadata.name, str(done.asm["ttir"])
    held = gpu_triton.TritonKernel(name, warps, 1, done.metadata.shared, done.asm["ptx"], text, capability)
    parameters = [gpu_triton.create_array_parameter(0, 16) for _ in types]
    launch = gpu_triton.TritonKernelCall(held, *grid, *(1,) * (3 - len(grid)), parameters)
    return zlib.compress(launch.to_proto(name, b""))
