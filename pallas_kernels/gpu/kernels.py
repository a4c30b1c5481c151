"""The Triton kernels of the GPU backend.

Arrays are those of `layout`: q and out [T, N, D]; keys and values of the pool [n_blocks, K, BLOCK, D], their scales
[n_blocks, K, BLOCK]; tables int32[C, MAX_BLOCKS]; items int32[n, 4]; parts of contexts [n, MOST_PARTS, N, D] and
[n, MOST_PARTS, N], of n items or tokens. Names in capitals are constants of a compiled kernel: HEADS is N, KV_HEADS is
K, WIDTH the least power of two that is at least DIM, which is D, and INDICES that of items or of parts. WORD numbers
are loaded as one, two of an int8 pool. Queries and sums are then in two parts, for even and for odd dimensions: tensor
cores' loads take words, and bytes would be loaded one by one.
"""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

LOWEST = tl.constexpr(-1e30)  # replaces minus infinity where a difference of two of them must not be NaN
LOG2_E = tl.constexpr(1.4426950408889634)

# Two words to their low and to their high bytes in bfloat16. 0x4300 + n is 128 + n for n below 128, and 0x4380 is 256:
# a byte is 128 + its low bits, less 128 or, with the sign's bit, 256.
_BYTES_TO_BFLOAT16 = tl.constexpr("""{
    .reg .b32 high, number, sign, minus;
    mov.b32 minus, 0xbf80bf80;
    lop3.b32 number, $2, 0x007f007f, 0x43004300, 0xea;
    lop3.b32 sign, $2, 0x00800080, 0x43004300, 0xea;
    fma.rn.bf16x2 $0, sign, minus, number;
    shr.u32 high, $2, 8;
    lop3.b32 number, high, 0x007f007f, 0x43004300, 0xea;
    lop3.b32 sign, high, 0x00800080, 0x43004300, 0xea;
    fma.rn.bf16x2 $1, sign, minus, number;
}""")


# Writing.


@triton.jit
@no_type_check
def write_kernel(
    new_keys,
    new_values,
    new_key_scales,
    new_value_scales,
    slots,
    first_block,
    keys,
    values,
    key_scales,
    value_scales,
    out,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Write a token's keys and values, AT_ONCE heads at a time; for padding, clear its output."""
    token = tl.program_id(0)
    block, slot = tl.load(slots + token * 2), tl.load(slots + token * 2 + 1)
    dims = tl.arange(0, WIDTH)
    if block >= 0:
        place = (block + tl.load(first_block)).to(tl.int64) * KV_HEADS
        for first in tl.static_range(0, KV_HEADS, AT_ONCE):
            heads = first + tl.arange(0, AT_ONCE)
            inside = (heads < KV_HEADS)[:, None] & (dims < DIM)[None, :]
            new = (token * KV_HEADS + heads)[:, None] * DIM + dims[None, :]
            slot_of_head = (place + heads) * BLOCK + slot
            held = slot_of_head[:, None] * DIM + dims[None, :]
            tl.store(keys + held, tl.load(new_keys + new, mask=inside), mask=inside)
            tl.store(values + held, tl.load(new_values + new, mask=inside), mask=inside)
            if key_scales is not None:
                new, some = token * KV_HEADS + heads, heads < KV_HEADS
                tl.store(key_scales + slot_of_head, tl.load(new_key_scales + new, mask=some), mask=some)
                tl.store(value_scales + slot_of_head, tl.load(new_value_scales + new, mask=some), mask=some)
    else:
        for first in tl.static_range(0, HEADS, AT_ONCE):
            heads = first + tl.arange(0, AT_ONCE)
            inside = (heads < HEADS)[:, None] & (dims < DIM)[None, :]
            cleared = tl.zeros((AT_ONCE, WIDTH), out.dtype.element_ty)
            tl.store(out + (token * HEADS + heads)[:, None] * DIM + dims[None, :], cleared, mask=inside)


# Attending.


@triton.jit
@no_type_check
def _seen(count, last, SLOTS: tl.constexpr, WINDOW: tl.constexpr):
    """What `count` queries, of which the last is at position `last`, see of a context.

    Returns the first position, the number of tiles before the one that it is in, and the number of tiles seen.
    """
    first, before = last * 0, last * 0
    if WINDOW is not None:
        first = tl.maximum(last - count - WINDOW + 2, 0)
        before = first // SLOTS
    return first, before, tl.where(count > 0, last // SLOTS + 1 - before, 0)


@triton.jit
@no_type_check
def _tiles_of_part(n_tiles, PART: tl.constexpr, MOST_PARTS: tl.constexpr):
    """The tiles of each part but the last: PART, or more where MOST_PARTS would not do."""
    n_parts = tl.maximum(tl.minimum(tl.cdiv(n_tiles, PART), MOST_PARTS), 1)
    return tl.maximum(tl.cdiv(n_tiles, n_parts), 1)


@triton.jit
@no_type_check
def _with_sink(maximum, sink):
    """The factor of the sums so far and the sink's term, when a sink joins a softmax.

    The sums are relative to `maximum`; the results are relative to the maximum with the sink.
    """
    raised = tl.maximum(maximum, sink * LOG2_E)
    return tl.exp2(maximum - raised), tl.exp2(sink * LOG2_E - raised)


@triton.jit
@no_type_check
def _numbers(words, OPERANDS: tl.constexpr):
    """What is loaded, as operands: (numbers,), or (low bytes, high bytes) of words of two int8."""
    if words.dtype == tl.int16:
        if tl.bfloat16 == OPERANDS:
            numbers = tl.inline_asm_elementwise(
                _BYTES_TO_BFLOAT16, "=r,=r,r", [words], (tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
            )
        else:
            numbers = (((words << 8) >> 8).to(OPERANDS), (words >> 8).to(OPERANDS))
    else:
        numbers = (words.to(OPERANDS),)
    return numbers


@triton.jit
@no_type_check
def _step(
    i,
    maximum,
    total,
    acc,
    query,
    query_position,
    slope,
    last,
    chunk,
    end,
    first_seen,
    head,
    keys,
    values,
    key_scales,
    value_scales,
    tables,
    first_block,
    MASKED: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    MAX_BLOCKS: tl.constexpr,
    WIDTH: tl.constexpr,
    WORD: tl.constexpr,
    SLOTS: tl.constexpr,
    WINDOW: tl.constexpr,
    SCALE: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    OPERANDS: tl.constexpr,
):
    """Add tile i of a context to a running softmax.

    The softmax is maximum and total, [rows] each, and acc, which is WORD arrays of [rows, D / WORD].
    Where it is masked, slots that no query sees are read as zeros: they may hold NaN, and 0 * NaN is NaN.
    """
    WORDS: tl.constexpr = DIM // WORD
    slots = tl.arange(0, SLOTS)
    position = i * SLOTS + slots
    seen = position < end
    if WINDOW is not None:
        seen &= position >= first_seen
    if BLOCK % SLOTS == 0:  # a tile lies in one block
        block = tl.load(tables + chunk * MAX_BLOCKS + tl.minimum(i * SLOTS, last) // BLOCK)
        place = ((block + tl.load(first_block)).to(tl.int64) * KV_HEADS + head) * BLOCK + (i * SLOTS) % BLOCK
        near, place_of_scale = slots[:, None] * WORDS, place + slots
        keys, values = keys + place * WORDS, values + place * WORDS
    else:
        column = tl.where(seen, position // BLOCK, 0)
        block = tl.load(tables + chunk * MAX_BLOCKS + column) + tl.load(first_block)
        place_of_scale = (block.to(tl.int64) * KV_HEADS + head) * BLOCK + position % BLOCK
        near = place_of_scale[:, None] * WORDS
    words = tl.arange(0, WIDTH // WORD)[None, :]
    near = near + words
    if MASKED:
        inside = seen[:, None] & (words < WORDS)
        key, value = tl.load(keys + near, mask=inside, other=0), tl.load(values + near, mask=inside, other=0)
    elif DIM < WIDTH:
        inside = (words < WORDS) & (slots[:, None] >= 0)
        key, value = tl.load(keys + near, mask=inside, other=0), tl.load(values + near, mask=inside, other=0)
    else:
        key, value = tl.load(keys + near), tl.load(values + near)
    key, value = _numbers(key, OPERANDS), _numbers(value, OPERANDS)
    scores = tl.dot(query[0], tl.trans(key[0]), input_precision="tf32x3")
    if WORD == 2:
        scores = tl.dot(query[1], tl.trans(key[1]), scores, input_precision="tf32x3")
    factor: tl.constexpr = SCALE * LOG2_E if SOFT_CAP is None else 1.0  # of scores, in the exponent of a weight
    if key_scales is not None:
        if MASKED:
            scores *= tl.load(key_scales + place_of_scale, mask=seen, other=0)[None, :]
        else:
            scores *= tl.load(key_scales + place_of_scale)[None, :]
    if SOFT_CAP is not None:
        half = tl.exp2(scores * (-2 * LOG2_E * SCALE / SOFT_CAP))  # tanh(x) is 2 / (1 + exp(-2x)) - 1
        scores = (2 / (1 + half) - 1) * (SOFT_CAP * LOG2_E)
    if slope is not None:
        scores += slope[:, None] / factor * (position - last).to(tl.float32)[None, :]
    if MASKED:
        visible = position[None, :] <= query_position[:, None]
        if WINDOW is not None:
            visible &= position[None, :] > query_position[:, None] - WINDOW
        scores = tl.where(visible, scores, LOWEST)
    raised = tl.maximum(maximum, tl.max(scores, axis=1))
    shrink = tl.exp2((maximum - raised) * factor)
    weights = tl.exp2(scores * factor - (raised * factor)[:, None])
    if MASKED:
        weights = tl.where(visible, weights, 0)
    total = total * shrink + tl.sum(weights, axis=1)
    if value_scales is not None:
        if MASKED:
            weights *= tl.load(value_scales + place_of_scale, mask=seen, other=0)[None, :]
        else:
            weights *= tl.load(value_scales + place_of_scale)[None, :]
    weights, shrink = weights.to(OPERANDS), shrink[:, None]
    sums = (tl.dot(weights, value[0], acc[0] * shrink, input_precision="tf32x3"),)
    if WORD == 2:
        sums += (tl.dot(weights, value[1], acc[1] * shrink, input_precision="tf32x3"),)
    return raised, total, sums


@triton.jit
@no_type_check
def tile_kernel(
    q,
    keys,
    values,
    key_scales,
    value_scales,
    tables,
    first_block,
    slopes,
    sinks,
    items,
    out,
    part_acc,
    part_maximum,
    part_total,
    ITEMS: tl.constexpr,
    INDICES: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    MAX_BLOCKS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    OF_TOKENS: tl.constexpr,
    SLOTS: tl.constexpr,
    PART: tl.constexpr,
    MOST_PARTS: tl.constexpr,
    WINDOW: tl.constexpr,
    SCALE: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    OPERANDS: tl.constexpr,
):
    """Attention of the queries of items and the heads of a KV head, in parts of contexts.

    The programs divide the parts of all items and KV heads among themselves. Results of parts are those of tokens or,
    where an item has one query, of items.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    WORD: tl.constexpr = 1 if key_scales is None else 2
    if WORD == 2:
        keys, values = keys.to(tl.pointer_type(tl.int16)), values.to(tl.pointer_type(tl.int16))
    factor: tl.constexpr = SCALE * LOG2_E if SOFT_CAP is None else 1.0
    index = tl.arange(0, INDICES)
    counts = tl.load(items + index * 4 + 1, mask=index < ITEMS, other=0)
    lasts = tl.load(items + index * 4 + 2, mask=index < ITEMS, other=0)
    tiles = _seen(counts, lasts, SLOTS, WINDOW)[2]
    parts = tl.cdiv(tiles, _tiles_of_part(tiles, PART, MOST_PARTS))
    ends = tl.cumsum(parts, axis=0)
    n_work = tl.sum(parts, axis=0) * KV_HEADS
    for work in tl.range(tl.program_id(0), n_work, tl.num_programs(0), disable_licm=True):
        head, part = work % KV_HEADS, work // KV_HEADS
        item = tl.sum((ends <= part).to(tl.int32), axis=0)
        which = part - tl.sum(tl.where(index < item, parts, 0), axis=0)
        start, count = tl.load(items + item * 4), tl.load(items + item * 4 + 1)
        last, chunk = tl.load(items + item * 4 + 2), tl.load(items + item * 4 + 3)
        first_seen, before, n_tiles = _seen(count, last, SLOTS, WINDOW)
        each = _tiles_of_part(n_tiles, PART, MOST_PARTS)
        first = before + which * each
        end = tl.minimum(first + each, before + n_tiles)
        end_seen = tl.minimum(last + 1, end * SLOTS)
        row, dims = tl.arange(0, ROWS), tl.arange(0, WIDTH // WORD) * WORD
        of_chunk, heads = row // GROUP, head * GROUP + row % GROUP
        position = last + 1 - count + of_chunk
        inside = (row < count * GROUP)[:, None] & (dims < DIM)[None, :]
        place = ((start + of_chunk) * HEADS + heads)[:, None] * DIM + dims[None, :]
        query = (tl.load(q + place, mask=inside, other=0).to(OPERANDS),)
        if WORD == 2:
            query += (tl.load(q + place + 1, mask=inside, other=0).to(OPERANDS),)
        slope = None
        if slopes is not None:
            slope = tl.load(slopes + heads) * LOG2_E
        maximum = tl.full((ROWS,), LOWEST, tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        acc = (tl.zeros((ROWS, WIDTH // WORD), tl.float32),) * WORD
        # Tiles of which every query sees every slot need no mask: those from `inner` to `outer`.
        inner = first
        outer = tl.maximum(tl.minimum((last + 2 - count) // SLOTS, end), first)
        if WINDOW is not None:
            inner = tl.minimum(tl.maximum((tl.maximum(last - WINDOW, -1) + SLOTS) // SLOTS, first), outer)
        for run in tl.static_range(1 if WINDOW is None else 0, 3):  # before, between and behind the two
            low = inner if run == 1 else outer if run == 2 else first
            high = outer if run == 1 else end if run == 2 else inner
            for i in range(low, high):
                maximum, total, acc = _step(
                    i, maximum, total, acc, query, position, slope, last, chunk, end_seen, first_seen, head,
                    keys, values, key_scales, value_scales, tables, first_block,
                    run != 1, KV_HEADS, DIM, BLOCK, MAX_BLOCKS, WIDTH, WORD, SLOTS, WINDOW, SCALE, SOFT_CAP, OPERANDS,
                )  # fmt: skip
        maximum *= factor
        if part_acc is None:
            share = 1.0
            if sinks is not None:
                sink = tl.load(sinks + heads)
                if slope is not None:  # the bias of all rows counts from the last query
                    sink += slope / LOG2_E * (position - last).to(tl.float32)
                share, more = _with_sink(maximum, sink)
                total = total * share + more
            share = share / tl.where(total > 0, total, 1)
            for byte in tl.static_range(WORD):
                tl.store(out + place + byte, (acc[byte] * share[:, None]).to(out.dtype.element_ty), mask=inside)
        else:
            of = start + of_chunk if OF_TOKENS else item
            scalar = (of * MOST_PARTS + which) * HEADS + heads
            for byte in tl.static_range(WORD):
                tl.store(part_acc + scalar[:, None].to(tl.int64) * DIM + dims[None, :] + byte, acc[byte], mask=inside)
            tl.store(part_maximum + scalar, maximum, mask=row < count * GROUP)
            tl.store(part_total + scalar, total, mask=row < count * GROUP)


@triton.jit
@no_type_check
def combine_kernel(
    part_acc,
    part_maximum,
    part_total,
    sinks,
    items,
    out,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    SLOTS: tl.constexpr,
    PART: tl.constexpr,
    MOST_PARTS: tl.constexpr,
    WINDOW: tl.constexpr,
    INDICES: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Combine the parts of a query of a head, AT_ONCE at a time, and the sink if any."""
    item, head = tl.program_id(0), tl.program_id(1)
    start, count = tl.load(items + item * 4), tl.load(items + item * 4 + 1)
    if count > 0:
        n_tiles = _seen(count, tl.load(items + item * 4 + 2), SLOTS, WINDOW)[2]
        n_parts = tl.cdiv(n_tiles, _tiles_of_part(n_tiles, PART, MOST_PARTS))
        first, index, dims = item * MOST_PARTS, tl.arange(0, INDICES), tl.arange(0, WIDTH)
        scalar = (first + index) * HEADS + head
        maximum = tl.load(part_maximum + scalar, mask=index < n_parts, other=LOWEST)
        highest = tl.max(maximum, axis=0)
        shares = tl.load(part_total + scalar, mask=index < n_parts, other=0) * tl.exp2(maximum - highest)
        total, acc = tl.sum(shares, axis=0), tl.zeros((WIDTH,), tl.float32)
        for i in range(0, n_parts, AT_ONCE):
            which = i + tl.arange(0, AT_ONCE)
            scalar = (first + which) * HEADS + head
            share = tl.exp2(tl.load(part_maximum + scalar, mask=which < n_parts, other=LOWEST) - highest)
            inside = (which < n_parts)[:, None] & (dims < DIM)[None, :]
            part = tl.load(part_acc + scalar[:, None].to(tl.int64) * DIM + dims[None, :], mask=inside, other=0)
            acc += tl.sum(part * share[:, None], axis=0)
        if sinks is not None:
            share, more = _with_sink(highest, tl.load(sinks + head))
            acc, total = acc * share, total * share + more
        tl.store(out + (start * HEADS + head) * DIM + dims, (acc / total).to(out.dtype.element_ty), mask=dims < DIM)
