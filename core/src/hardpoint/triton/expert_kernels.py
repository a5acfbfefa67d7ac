"""The experts of a mixture in Triton: routing, rows sorted by expert in whole tiles, two products over each tile's expert, the sum.

Grids follow from shapes alone: there are as many tiles as there could be, and one without an expert ends at once. A row is one token
and one of its experts: row r is token r // TOP_K.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hardpoint.triton.row_kernels import activated


@triton.jit
def route(
    logits, chosen, shares, stride,
    N: tl.constexpr, N_PAD: tl.constexpr, TOP_K: tl.constexpr, TOP_PAD: tl.constexpr, RENORMALISE: tl.constexpr,
):  # fmt: skip
    """Write each token's TOP_K experts of the greatest logits, the lower of equals first, and their weights. The grid is (tokens,)."""
    token = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, N_PAD)
    x = tl.load(logits + token * stride + n, mask=n < N, other=-float("inf")).to(tl.float32)
    top = tl.max(x, 0)
    left = n < N
    place = tl.arange(0, TOP_PAD)
    values = tl.full([TOP_PAD], -float("inf"), tl.float32)
    experts = tl.zeros([TOP_PAD], tl.int32)
    for i in tl.static_range(TOP_K):
        # A NaN is as low as can be, so that there is an expert to choose in any row.
        open_values = tl.where(left & (x == x), x, -float("inf"))
        best = tl.max(open_values, 0)
        expert = tl.min(tl.where(left & (open_values == best), n, N_PAD), 0)
        left = left & (n != expert)
        value = tl.sum(tl.where(n == expert, x, 0.0), 0)
        experts = tl.where(place == i, expert, experts)
        values = tl.where(place == i, value, values)
    powers = tl.exp(values - top)
    total = tl.sum(tl.where(place < TOP_K, powers, 0.0), 0) if RENORMALISE else tl.sum(tl.exp(x - top), 0)
    tl.store(chosen + token * TOP_K + place, experts, mask=place < TOP_K)
    tl.store(shares + token * TOP_K + place, powers / total, mask=place < TOP_K)


@triton.jit(do_not_specialize=["rows", "tiles"])
def sort_rows(
    chosen, sorted_rows, tile_experts, rows, tiles,
    EXPERTS: tl.constexpr, EXPERTS_PAD: tl.constexpr, BLOCK_M: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Write the rows sorted by expert, each expert's filled up to whole tiles with the row `rows`; and each tile's expert, -1 for none.

    The grid is (EXPERTS,): a program writes its expert's rows and tiles, in the order of the rows.
    """
    expert = tl.program_id(0)
    experts = tl.arange(0, EXPERTS_PAD)
    c = tl.arange(0, CHUNK)
    counts = tl.zeros([EXPERTS_PAD], tl.int32)
    for begin in range(0, rows, CHUNK):
        inside = begin + c < rows
        counts += tl.histogram(tl.load(chosen + begin + c, mask=inside, other=0), EXPERTS_PAD, mask=inside)
    needed = (counts + BLOCK_M - 1) // BLOCK_M
    first_tile = tl.sum(tl.where(experts < expert, needed, 0), 0)
    own_tiles = tl.sum(tl.where(experts == expert, needed, 0), 0)
    first = first_tile * BLOCK_M

    seen = 0
    for begin in range(0, rows, CHUNK):
        mine = tl.load(chosen + begin + c, mask=begin + c < rows, other=-1) == expert
        counted = mine.to(tl.int32)
        tl.store(sorted_rows + first + seen + tl.cumsum(counted, 0) - 1, begin + c, mask=mine)
        seen += tl.sum(counted, 0)
    for begin in range(seen, own_tiles * BLOCK_M, CHUNK):
        tl.store(
            sorted_rows + first + begin + c, tl.zeros([CHUNK], tl.int32) + rows, mask=begin + c < own_tiles * BLOCK_M
        )
    for begin in range(0, own_tiles, CHUNK):
        tl.store(
            tile_experts + first_tile + begin + c, tl.zeros([CHUNK], tl.int32) + expert, mask=begin + c < own_tiles
        )
    if expert == EXPERTS - 1:
        for begin in range(first_tile + own_tiles, tiles, CHUNK):
            tl.store(tile_experts + begin + c, tl.full([CHUNK], -1, tl.int32), mask=begin + c < tiles)


@triton.jit
def _multiplied(a, b, total, SINGLE: tl.constexpr):
    """Return total + a @ b in float32. SINGLE: in Triton's interpreter, which multiplies the bits of bfloat16 as if they were integers."""
    if SINGLE:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit(do_not_specialize=["rows"])
def expert_gate_up(
    x, gate_up, bias, out, sorted_rows, tile_experts, x_stride, rows,
    TOP_K: tl.constexpr, HIDDEN: tl.constexpr, INNER: tl.constexpr, BIASED: tl.constexpr, ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SINGLE: tl.constexpr,
):  # fmt: skip
    """Write the activation of each row's product with its expert's gate and up, [rows, INNER]. The grid is (INNER / BLOCK_N, tiles)."""
    tile = tl.program_id(1)
    expert = tl.load(tile_experts + tile).to(tl.int64)
    if expert < 0:
        return
    row = tl.load(sorted_rows + tile * BLOCK_M + tl.arange(0, BLOCK_M))
    there = row < rows
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = n < INNER
    k = tl.arange(0, BLOCK_K)
    source = x + (row // TOP_K).to(tl.int64)[:, None] * x_stride + k[None, :]
    gates = gate_up + (expert * 2 * INNER + n)[None, :] * HIDDEN + k[:, None]
    ups = gates + INNER * HIDDEN
    gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for begin in range(0, HIDDEN, BLOCK_K):
        some = begin + k < HIDDEN
        values = tl.load(source + begin, mask=there[:, None] & some[None, :], other=0.0)
        wanted = inside[None, :] & some[:, None]
        gate = _multiplied(values, tl.load(gates + begin, mask=wanted, other=0.0), gate, SINGLE)
        up = _multiplied(values, tl.load(ups + begin, mask=wanted, other=0.0), up, SINGLE)
    if BIASED:
        own = bias + expert * 2 * INNER + n
        gate += tl.load(own, mask=inside, other=0.0).to(tl.float32)[None, :]
        up += tl.load(own + INNER, mask=inside, other=0.0).to(tl.float32)[None, :]
    place = out + row.to(tl.int64)[:, None] * INNER + n[None, :]
    tl.store(place, activated(gate, up, ACTIVATION).to(out.dtype.element_ty), mask=there[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["rows"])
def expert_down(
    inner, down, bias, shares, out, sorted_rows, tile_experts, rows,
    HIDDEN: tl.constexpr, INNER: tl.constexpr, BIASED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SINGLE: tl.constexpr,
):  # fmt: skip
    """Write each row's product with its expert's down, times the row's share, [rows, HIDDEN]. The grid is (HIDDEN / BLOCK_N, tiles)."""
    tile = tl.program_id(1)
    expert = tl.load(tile_experts + tile).to(tl.int64)
    if expert < 0:
        return
    row = tl.load(sorted_rows + tile * BLOCK_M + tl.arange(0, BLOCK_M))
    there = row < rows
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = n < HIDDEN
    k = tl.arange(0, BLOCK_K)
    source = inner + row.to(tl.int64)[:, None] * INNER + k[None, :]
    weights = down + (expert * HIDDEN + n)[None, :] * INNER + k[:, None]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for begin in range(0, INNER, BLOCK_K):
        some = begin + k < INNER
        values = tl.load(source + begin, mask=there[:, None] & some[None, :], other=0.0)
        wanted = inside[None, :] & some[:, None]
        total = _multiplied(values, tl.load(weights + begin, mask=wanted, other=0.0), total, SINGLE)
    if BIASED:
        total += tl.load(bias + expert * HIDDEN + n, mask=inside, other=0.0).to(tl.float32)[None, :]
    total *= tl.load(shares + row, mask=there, other=0.0)[:, None]
    place = out + row.to(tl.int64)[:, None] * HIDDEN + n[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=there[:, None] & inside[None, :])


@triton.jit
def sum_rows(parts, out, TOP_K: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr):
    """Write the sum of each token's TOP_K rows, in their order. The grid is (tokens, N / BLOCK)."""
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = n < N
    total = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(TOP_K):
        total += tl.load(parts + (token * TOP_K + i) * N + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * N + n, total.to(out.dtype.element_ty), mask=inside)
