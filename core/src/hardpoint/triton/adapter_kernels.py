"""LoRA adapters in Triton: two products, of rows in tiles of one adapter each (`KernelSet.add_adapters`).

Grids follow from shapes alone: there are as many tiles as there could be, and one without rows ends at once. A row's result does not
depend on the rows of its tile.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _rows_of_tile(starts, tile, groups, GROUPS_PAD: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return a tile's group, and its rows' first and end among the adapted tokens; nothing is between them where there is no tile."""
    g = tl.arange(0, GROUPS_PAD)
    first = tl.load(starts + g, mask=g < groups, other=0)
    end = tl.load(starts + g + 1, mask=g < groups, other=0)
    tiles = (end - first + BLOCK_M - 1) // BLOCK_M
    before = tl.cumsum(tiles, 0) - tiles
    mine = (before <= tile) & (tile < before + tiles)
    begin = tl.sum(tl.where(mine, first + (tile - before) * BLOCK_M, 0), 0)
    return tl.sum(tl.where(mine, g, 0), 0), begin, tl.sum(tl.where(mine, end, 0), 0)


@triton.jit(do_not_specialize=["groups"])
def adapter_shrink(
    x, weight, sums, tokens, slots, starts, ranks, scales, groups, x_stride, slot_stride, parts_stride,
    COLUMNS: tl.constexpr, PARTS: tl.constexpr, MAX_RANK: tl.constexpr, RANKS: tl.constexpr, GROUPS_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, SINGLE: tl.constexpr,
):  # fmt: skip
    """Write x times the matrices A and the scale, float32[adapted tokens, PARTS, RANKS]. The grid is (tiles, PARTS, RANKS / BLOCK_R).

    Args:
        weight: the matrices A, [slots, PARTS * MAX_RANK, COLUMNS].
        SINGLE: in Triton's interpreter, which multiplies the bits of bfloat16 as if they were integers.
    """
    group, begin, end = _rows_of_tile(starts, tl.program_id(0), groups, GROUPS_PAD, BLOCK_M)
    part = tl.program_id(1)
    slot = tl.load(slots + group).to(tl.int64)
    rank = tl.load(ranks + slot * parts_stride + part)
    r = tl.program_id(2) * BLOCK_R + tl.arange(0, BLOCK_R)
    if (begin < end) & (tl.program_id(2) * BLOCK_R < rank):
        place = begin + tl.arange(0, BLOCK_M)
        there = place < end
        token = tl.load(tokens + place, mask=there, other=0)
        k = tl.arange(0, BLOCK_K)
        source = x + token[:, None] * x_stride + k[None, :]
        matrix = weight + slot * slot_stride + (part * MAX_RANK + r)[None, :] * COLUMNS + k[:, None]
        total = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
        for at in range(0, COLUMNS, BLOCK_K):
            some = at + k < COLUMNS
            values = tl.load(source + at, mask=there[:, None] & some[None, :], other=0.0)
            own = tl.load(matrix + at, mask=some[:, None] & (r < rank)[None, :], other=0.0)
            if SINGLE:
                values, own = values.to(tl.float32), own.to(tl.float32)
            total = tl.dot(values, own, total, input_precision="ieee")
        total *= tl.load(scales + slot * parts_stride + part)
        to = sums + (place.to(tl.int64)[:, None] * PARTS + part) * RANKS + r[None, :]
        tl.store(to, total, mask=there[:, None])


@triton.jit(do_not_specialize=["groups"])
def adapter_expand(
    sums, weight, out, tokens, slots, starts, ranks, spans, groups, out_stride, slot_stride, parts_stride,
    ROWS: tl.constexpr, PARTS: tl.constexpr, RANKS: tl.constexpr, GROUPS_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Add what `adapter_shrink` wrote, times the matrices B, to the tokens' rows of out. The grid is (tiles, PARTS, widest part / BLOCK_N).

    Args:
        weight: the matrices B transposed, [slots, max_rank, ROWS].
        spans: int32[PARTS, 2], (first, end) of each part's columns of out.
    """
    group, begin, end = _rows_of_tile(starts, tl.program_id(0), groups, GROUPS_PAD, BLOCK_M)
    part = tl.program_id(1)
    slot = tl.load(slots + group).to(tl.int64)
    rank = tl.load(ranks + slot * parts_stride + part)
    first = tl.load(spans + 2 * part) + tl.program_id(2) * BLOCK_N
    last = tl.load(spans + 2 * part + 1)
    if (begin < end) & (rank > 0) & (first < last):
        place = begin + tl.arange(0, BLOCK_M)
        there = place < end
        token = tl.load(tokens + place, mask=there, other=0)
        n = first + tl.arange(0, BLOCK_N)
        r = tl.arange(0, BLOCK_R)
        source = sums + (place.to(tl.int64)[:, None] * PARTS + part) * RANKS + r[None, :]
        matrix = weight + slot * slot_stride + r[:, None] * ROWS + n[None, :]
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for at in range(0, rank, BLOCK_R):
            some = at + r < rank
            values = tl.load(source + at, mask=there[:, None] & some[None, :], other=0.0)
            own = tl.load(matrix + at * ROWS, mask=some[:, None] & (n < last)[None, :], other=0.0)
            # What lies between the matrices is not rounded.
            total = tl.dot(values, own.to(tl.float32), total, input_precision="ieee")
        to = out + token[:, None] * out_stride + n[None, :]
        inside = there[:, None] & (n < last)[None, :]
        total += tl.load(to, mask=inside, other=0.0).to(tl.float32)
        tl.store(to, total.to(out.dtype.element_ty), mask=inside)
