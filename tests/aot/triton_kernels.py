"""The Triton kernels that a test compiles, and what NVIDIA's assembler makes of them."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import pytest

from pallas_kernels.gpu.triton_call import _compiled

TARGET = 'custom_call_target="triton_kernel_call_ffi"'  # of the calls in a program


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """What the assembler says of a kernel; shared memory in bytes.

    Attributes:
      name: the function's; of several from one function the second is name__1, in the order they were compiled.
      tensor_cores / tf32: products in its code that tensor cores take; those of TF32 among them.
      copies: instructions that copy to shared memory beside the arithmetic (cp.async).
      tile: instructions of its shortest loop with products; 0 if it has none.
      reloads: instructions in its innermost loops that read or write spilled registers.
      byte_loads: instructions there that load single bytes from shared memory.
    """

    name: str
    registers: int
    spilled: int
    shared: int
    warps: int
    tensor_cores: int
    tf32: int
    copies: int
    tile: int
    reloads: int
    byte_loads: int

    def resident(self, shared: int) -> int:
        """The programs that a processor with so many bytes of shared memory runs at once.

        It has 65,536 registers, which a warp gets by 256, and runs at most 64 warps and 32 programs; each program takes
        1 KiB of shared memory besides its own (CUDA's occupancy calculator, sm_80 and sm_90).
        """
        registers = -(-self.registers * 32 // 256) * 256 * self.warps
        return min(65536 // registers, shared // (self.shared + 1024), 64 // self.warps, 32)


@contextmanager
def compiled() -> Iterator[list[Any]]:
    """What Triton compiles in this context, whatever was compiled before."""
    import triton

    made = []

    def compile_and_keep(*args: Any, **options: Any) -> Any:
        made.append(compile_kernel(*args, **options))
        return made[-1]

    compile_kernel: Any = triton.compile
    _compiled.cache_clear()
    jax.clear_caches()  # a function that has been traced would not call for its kernels again
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton, "compile", compile_and_keep)
        yield made


def assembled(made: Iterable[Any], folder: Path) -> list[Kernel]:
    """Kernels as the assembler has them; their code goes to a folder."""
    packages = ("nvidia.cuda_nvcc", "triton.backends.nvidia")
    nvidia, triton = (importlib.util.find_spec(x).submodule_search_locations[0] for x in packages)  # type: ignore[union-attr, index]
    found, seen = [], Counter[str]()
    for each in made:
        name, text = each.metadata.name, each.asm["ptx"]
        title = f"{name}__{seen[name]}" if seen[name] else name
        seen[name] += 1
        path = folder / f"{title}.ptx"
        path.write_text(text)
        target = re.findall(r"\.target (\w+)", text)[0]
        code = path.with_suffix(".cubin")
        command = [f"{nvidia}/bin/ptxas", "-v", "--gpu-name", target, str(path), "-o", str(code)]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        command = [f"{triton}/bin/nvdisasm", "-c", str(code)]
        loops = innermost_loops(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        products = [len(re.findall(r";", loop)) for loop in loops if re.search(r"\bHG?MMA\b", loop)]
        registers, spilled = re.findall(r"Used (\d+) registers", said), re.findall(r"(\d+) bytes spill stores", said)
        found.append(
            Kernel(
                name=title,
                registers=int(registers[0]),
                spilled=int(spilled[0]),
                shared=each.metadata.shared,
                warps=each.metadata.num_warps,
                tensor_cores=len(re.findall(r"\b(?:wg)?mma(?:\.\w+)*\.m\d+n\d+k\d+", text)),
                tf32=len(re.findall(r"mma\S*\.tf32\.tf32", text)),
                copies=text.count("cp.async.cg"),
                tile=min(products, default=0),
                reloads=len(re.findall(r"\b(?:LDL|STL)\b", "".join(loops))),
                byte_loads=len(re.findall(r"\bLDS\.[US]8\b", "".join(loops))),
            )
        )
    return found


def innermost_loops(code: str) -> list[str]:
    """The loops without another inside, of a kernel as nvdisasm prints it."""
    lines = code.splitlines()
    labels = {line.strip(": "): i for i, line in enumerate(lines) if re.match(r"\s*\.L_x_\d+:", line)}
    jumps = ((re.search(r"BRA.*`\((\.L_x_\d+)\)", line), i) for i, line in enumerate(lines))
    loops = [(labels[found[1]], end) for found, end in jumps if found and labels[found[1]] < end]
    inner = [a for a in loops if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in loops)]
    return ["\n".join(lines[start : end + 1]) for start, end in inner]
