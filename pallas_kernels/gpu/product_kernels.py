"""The Triton kernels of products: of runs of rows with a kernel each, and with int4 kernels.

Both compute tiles of y transposed, kernel times x: what is widened is then the left operand, which tensor cores take
from registers. Rows and columns beyond an edge are those at the edge once more, and are not stored. Names in capitals
are constants of a compiled kernel.
"""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

# Four bytes to four bfloat16. 0x4300 + n is 128 + n for n below 128, so with its sign's bit turned, a number is 136
# less: two instructions for two of them, where conversions from integers would take several for each.
_TO_BFLOAT16 = """{
    .reg .b32 n, first, second, one, less;
    mov.b32 one, 0x3f803f80;
    mov.b32 less, 0xc308c308;
    shr.u32 n, $2, SHIFT;
    lop3.b32 n, n, 0x88888888, 0x0f0f0f0f, 0x28;
    prmt.b32 first, n, 0x43434343, 0x4140;
    prmt.b32 second, n, 0x43434343, 0x4342;
    fma.rn.bf16x2 $0, first, one, less;
    fma.rn.bf16x2 $1, second, one, less;
}"""
_LOW, _HIGH = (tl.constexpr(_TO_BFLOAT16.replace("SHIFT", shift)) for shift in "04")


@triton.jit
@no_type_check
def runs_kernel(
    x,
    kernels,
    tiles,
    y,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    OPERANDS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Multiply the rows of a tile by some rows of its expert's kernel.

    x [R, INPUTS], kernels [G, OUTPUTS, INPUTS] (bits of float8 as uint8), tiles int32[n, 3], y float32[R, OUTPUTS].
    """
    tile, column = tl.program_id(0), tl.program_id(1) * COLUMNS
    expert, start, end = tl.load(tiles + tile * 3), tl.load(tiles + tile * 3 + 1), tl.load(tiles + tile * 3 + 2)
    if start < end:
        rows, columns = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
        x += start.to(tl.int64) * INPUTS
        kernels += (expert.to(tl.int64) * OUTPUTS + column) * INPUTS
        of_x = tl.minimum(rows, end - start - 1)[None, :] * INPUTS
        of_kernel = tl.minimum(columns, OUTPUTS - column - 1)[:, None] * INPUTS
        acc = tl.zeros((COLUMNS, ROWS), tl.float32)
        for i in range(tl.cdiv(INPUTS, DEPTH)):
            depth = i * DEPTH + tl.arange(0, DEPTH)
            if INPUTS % DEPTH == 0:
                left, right = tl.load(kernels + of_kernel + depth[None, :]), tl.load(x + of_x + depth[:, None])
            else:
                inside = depth < INPUTS
                left = tl.load(kernels + of_kernel + depth[None, :], mask=inside[None, :], other=0)
                right = tl.load(x + of_x + depth[:, None], mask=inside[:, None], other=0)
            if left.dtype == tl.uint8:
                left = _of_float8(left)
            acc = tl.dot(left.to(OPERANDS), right.to(OPERANDS), acc, input_precision=PRECISION)
        inside = (rows < end - start)[None, :] & (columns < OUTPUTS - column)[:, None]
        y += start.to(tl.int64) * OUTPUTS + column
        tl.store(y + rows[None, :] * OUTPUTS + columns[:, None], acc, mask=inside)


@triton.jit
@no_type_check
def _of_float8(bits):
    """float32 of the bits of float8_e4m3fn.

    The biases of the exponents differ by 120. The first eight numbers are multiples of 2^-9, subnormal in float8.
    """
    size = (bits & 0x7F).to(tl.uint32)
    normal = (size << 20) + (120 << 23)
    wide = tl.where(size < 8, (size.to(tl.float32) * 0.001953125).to(tl.uint32, bitcast=True), normal)
    wide = tl.where(size == 0x7F, 0x7FC00000, wide) | (bits & 0x80).to(tl.uint32) << 24
    return wide.to(tl.float32, bitcast=True)


@triton.jit
@no_type_check
def int4_kernel(
    even,
    odd,
    pairs,
    scales,
    zeros,
    y,
    N_ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    STEPS: tl.constexpr,
    PACKED: tl.constexpr,
    OPERANDS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Multiply a tile of rows by some rows of the kernel, over one part of the inputs.

    A part is STEPS times DEPTH inputs. even and odd [N_ROWS, INPUTS / 2], pairs uint8[OUTPUTS, INPUTS / 2], scales and
    zeros [OUTPUTS, INPUTS / GROUP], y float32[parts, N_ROWS, OUTPUTS]. If PACKED, operands are bfloat16 and widened
    four at a time.
    """
    HALF: tl.constexpr = DEPTH // 2
    PAIRS: tl.constexpr = INPUTS // 2
    N_GROUPS: tl.constexpr = INPUTS // GROUP
    row, column, part = tl.program_id(0) * ROWS, tl.program_id(1) * COLUMNS, tl.program_id(2)
    rows, columns = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    even += row.to(tl.int64) * PAIRS
    odd += row.to(tl.int64) * PAIRS
    pairs += column.to(tl.int64) * PAIRS
    scales += column.to(tl.int64) * N_GROUPS
    if zeros is not None:
        zeros += column.to(tl.int64) * N_GROUPS
    near = tl.minimum(columns, OUTPUTS - column - 1)[:, None]
    of_x = tl.minimum(rows, N_ROWS - row - 1)[None, :] * PAIRS
    first = part * STEPS
    end = tl.minimum(first + STEPS, tl.cdiv(INPUTS, DEPTH))
    # Loads of few bytes are not read ahead by the compiler: those of the next step are held here.
    scale, zero = _of_groups(scales, zeros, near, first, GROUP, N_GROUPS, DEPTH)
    acc = tl.zeros((COLUMNS, ROWS), tl.float32)
    for i in range(first, end):
        at = i * HALF + tl.arange(0, HALF)
        if PAIRS % HALF == 0:
            both = tl.load(pairs + near * PAIRS + at[None, :])
            left, right = tl.load(even + of_x + at[:, None]), tl.load(odd + of_x + at[:, None])
        else:
            inside = at < PAIRS
            both = tl.load(pairs + near * PAIRS + at[None, :], mask=inside[None, :], other=0)
            left = tl.load(even + of_x + at[:, None], mask=inside[:, None], other=0)
            right = tl.load(odd + of_x + at[:, None], mask=inside[:, None], other=0)
        next_scale, next_zero = _of_groups(scales, zeros, near, i + 1, GROUP, N_GROUPS, DEPTH)
        wide_scale = _over_inputs(scale, HALF)
        low, high = _widened(both, False, PACKED), _widened(both, True, PACKED)
        if zeros is not None:
            wide_zero = _over_inputs(zero, HALF).to(low.dtype)
            low -= wide_zero
            high -= wide_zero
        low = (low * wide_scale.to(low.dtype)).to(OPERANDS)
        high = (high * wide_scale.to(high.dtype)).to(OPERANDS)
        acc = tl.dot(low, left.to(OPERANDS), acc, input_precision=PRECISION)
        acc = tl.dot(high, right.to(OPERANDS), acc, input_precision=PRECISION)
        scale, zero = next_scale, next_zero
    y += (part * N_ROWS + row).to(tl.int64) * OUTPUTS + column
    inside = (rows < N_ROWS - row)[None, :] & (columns < OUTPUTS - column)[:, None]
    tl.store(y + rows[None, :] * OUTPUTS + columns[:, None], acc, mask=inside)


@triton.jit
@no_type_check
def _of_groups(scales, zeros, near, step, GROUP: tl.constexpr, N_GROUPS: tl.constexpr, DEPTH: tl.constexpr):
    """Scales and zero points of the groups of a step; beyond the last group, its own."""
    COUNT: tl.constexpr = tl.cdiv(DEPTH, GROUP)
    group = step * DEPTH // GROUP + tl.arange(0, COUNT)
    place = near * N_GROUPS + tl.minimum(group, N_GROUPS - 1)[None, :]
    scale = tl.load(scales + place)
    zero = scale
    if zeros is not None:
        zero = tl.load(zeros + place)
    return scale, zero


@triton.jit
@no_type_check
def _over_inputs(each, HALF: tl.constexpr):
    """A number for each pair of a step [columns, HALF], of one for each group."""
    COLUMNS: tl.constexpr = each.shape[0]
    COUNT: tl.constexpr = each.shape[1]
    return tl.broadcast_to(each[:, :, None], (COLUMNS, COUNT, HALF // COUNT)).reshape(COLUMNS, HALF)


@triton.jit
@no_type_check
def _widened(both, HIGH: tl.constexpr, PACKED: tl.constexpr):
    """The numbers of the high or the low halves of bytes: as bfloat16 if PACKED, else float32."""
    if PACKED:
        asm: tl.constexpr = _HIGH if HIGH else _LOW
        wide = tl.inline_asm_elementwise(asm, "=r,=r,r", [both], tl.bfloat16, is_pure=True, pack=4)
    elif HIGH:
        wide = ((both >> 4) ^ 8).to(tl.float32) - 8
    else:
        wide = ((both & 15) ^ 8).to(tl.float32) - 8
    return wide
