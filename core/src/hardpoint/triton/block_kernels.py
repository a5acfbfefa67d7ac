"""Products with weights in blocks in Triton: numbers are expanded in registers, and multiplied by in the activations' dtype.

The layout of a weight is `hardpoint.triton.blocks.BlockLayout`'s: for each group of a row's elements its bytes, [groups, ROWS_PAD, width],
so that the rows of a tile lie one after the other. An element is `scale * number - minimum`, or `scale * (number - zero point)`.

A row's result is the same, bit for bit, whatever rows are beside it: every product is of 16 rows, so that a device has one instruction for
it, and sums are taken in the same order, split by split, whether the splits are programs or a program's own.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hardpoint.triton.kernels import _decode_e4m3


@triton.jit
def _number(bits, FLOAT8: tl.constexpr):
    """Return what bytes mean, float32: signed whole numbers, or e4m3."""
    if FLOAT8:
        return _decode_e4m3(bits, tl.float16).to(tl.float32) * 256.0
    return bits.to(tl.int8, bitcast=True).to(tl.float32)


@triton.jit
def _dot(a, b, total, SINGLE: tl.constexpr):
    """Return total + a @ b in float32. SINGLE: in Triton's interpreter, which multiplies the bits of bfloat16 as if they were integers."""
    if SINGLE:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def _products(
    source, there0, there1, there2, there3, stride, weight, a0, a1, a2, a3, TILES: tl.constexpr, SINGLE: tl.constexpr
):
    """Add the products of the rows of each tile of 16 with the same expanded weight to the tiles' sums."""
    a0 = _dot(tl.load(source, mask=there0[:, None], other=0.0), weight, a0, SINGLE)
    if TILES == 4:
        a1 = _dot(tl.load(source + 16 * stride, mask=there1[:, None], other=0.0), weight, a1, SINGLE)
        a2 = _dot(tl.load(source + 32 * stride, mask=there2[:, None], other=0.0), weight, a2, SINGLE)
        a3 = _dot(tl.load(source + 48 * stride, mask=there3[:, None], other=0.0), weight, a3, SINGLE)
    return a0, a1, a2, a3


@triton.jit
def _store(out, total, bias, token, there, n, ROWS: tl.constexpr, BIASED: tl.constexpr):
    inside = n < ROWS
    if BIASED:
        total += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)[None, :]
    place = out + token.to(tl.int64)[:, None] * ROWS + n[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=there[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["num_tokens"])
def block_product(
    x, numbers, factors, lowers, block_scales, offsets, bias, out, sums, x_stride, num_tokens,
    ROWS: tl.constexpr, ROWS_PAD: tl.constexpr, GROUPS: tl.constexpr, BITS: tl.constexpr, FLOAT8: tl.constexpr, GROUP: tl.constexpr,
    IN_BLOCK: tl.constexpr, FACTORED: tl.constexpr, OFFSET: tl.constexpr, MIDDLE: tl.constexpr, SPLITS: tl.constexpr,
    SPLIT_GROUPS: tl.constexpr, TILES: tl.constexpr, SHARED: tl.constexpr, BIASED: tl.constexpr, BLOCK_N: tl.constexpr,
    SINGLE: tl.constexpr,
):  # fmt: skip
    """Write x times the expanded weight, and the bias. The grid is (ROWS_PAD / BLOCK_N, SPLITS if SHARED else 1, tiles of tokens / TILES).

    Args:
        numbers: uint8[GROUPS, ROWS_PAD, width]; of 4 BITS byte j has number j in its low half, and j + width in the high one, and MIDDLE
            is taken from each.
        factors, lowers: int8[GROUPS, ROWS_PAD], by which the scale, and the minimum, of a block of IN_BLOCK groups are multiplied, where
            they are FACTORED.
        block_scales: [GROUPS / IN_BLOCK, ROWS_PAD], offsets the same: minima (OFFSET 1) or zero points (OFFSET 2).
        sums: float32[SPLITS, tokens, ROWS], which a program of one split (SHARED) writes to, in the place of `out`.
    """
    width: tl.constexpr = GROUP * BITS // 8
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    j = tl.arange(0, width)
    token = tl.program_id(2) * (16 * TILES) + tl.arange(0, 16)
    there0, there1 = token < num_tokens, token + 16 < num_tokens
    there2, there3 = token + 32 < num_tokens, token + 48 < num_tokens
    rows = x + token.to(tl.int64)[:, None] * x_stride + j[None, :]
    t0 = tl.zeros([16, BLOCK_N], tl.float32)
    t1, t2, t3 = t0, t0, t0
    split = tl.program_id(1) if SHARED else 0
    for part in range(split, split + 1 if SHARED else SPLITS):
        a0 = tl.zeros([16, BLOCK_N], tl.float32)
        a1, a2, a3 = a0, a0, a0
        for group in range(part * SPLIT_GROUPS, tl.minimum((part + 1) * SPLIT_GROUPS, GROUPS)):
            # Groups times rows fit into 32 bits, and bytes do not.
            place = group * ROWS_PAD + n
            of_block = group // IN_BLOCK * ROWS_PAD + n
            bits = tl.load(numbers + place.to(tl.int64)[None, :] * width + j[:, None])
            scale = tl.load(block_scales + of_block).to(tl.float32)
            if FACTORED:
                scale *= tl.load(factors + place).to(tl.float32)
            if OFFSET:
                offset = tl.load(offsets + of_block).to(tl.float32)
                if FACTORED:
                    offset *= tl.load(lowers + place).to(tl.float32)
            source = rows + group * GROUP
            for half in tl.static_range(2 if BITS == 4 else 1):
                if BITS == 4:
                    number = ((bits >> 4) if half else (bits & 15)).to(tl.float32) - MIDDLE
                else:
                    number = _number(bits, FLOAT8)
                if OFFSET == 2:
                    number -= offset[None, :]
                number *= scale[None, :]
                if OFFSET == 1:
                    number -= offset[None, :]
                a0, a1, a2, a3 = _products(
                    source + half * width, there0, there1, there2, there3, x_stride, number.to(x.dtype.element_ty), a0, a1, a2, a3,
                    TILES, SINGLE,
                )  # fmt: skip
        t0, t1, t2, t3 = t0 + a0, t1 + a1, t2 + a2, t3 + a3
    if SHARED:
        _store(sums + split.to(tl.int64) * num_tokens * ROWS, t0, bias, token, there0, n, ROWS, False)
    else:
        _store(out, t0, bias, token, there0, n, ROWS, BIASED)
        if TILES == 4:
            _store(out, t1, bias, token + 16, there1, n, ROWS, BIASED)
            _store(out, t2, bias, token + 32, there2, n, ROWS, BIASED)
            _store(out, t3, bias, token + 48, there3, n, ROWS, BIASED)


@triton.jit(do_not_specialize=["num_tokens"])
def sum_splits(
    sums, bias, out, num_tokens, ROWS: tl.constexpr, SPLITS: tl.constexpr, BIASED: tl.constexpr, BLOCK: tl.constexpr
):
    """Write the sum of the splits' products, in their order, and the bias. The grid is (ROWS / BLOCK, tokens)."""
    token = tl.program_id(1)
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = n < ROWS
    place = token.to(tl.int64) * ROWS + n
    total = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(sums + num_tokens.to(tl.int64) * ROWS * split + place, mask=inside, other=0.0)
    if BIASED:
        total += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=inside)
