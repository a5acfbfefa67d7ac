"""Operators between matrix products, in Triton: each reads and writes a token's row once, and computes in float32.

A row's result depends on that row alone, bit for bit.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rms_norm(
    x, weight, out, eps, outer_stride, inner_stride, inner,
    N: tl.constexpr, N_PAD: tl.constexpr,
):  # fmt: skip
    """Write RMSNorm of each row of x. Row r is at x[r // inner, r % inner]; out is contiguous. The grid is (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, N_PAD)
    inside = n < N
    place = x + (row // inner) * outer_stride + (row % inner) * inner_stride
    values = tl.load(place + n, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values) / N + eps)
    factors = tl.load(weight + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * N + n, (values * scale * factors).to(out.dtype.element_ty), mask=inside)


@triton.jit
def add_rms_norm(
    x, residual, weight, out, eps, x_stride, residual_stride,
    N: tl.constexpr, N_PAD: tl.constexpr,
):  # fmt: skip
    """Add rows of x to those of the residual, in place, and write RMSNorm of the sums, as they were stored. The grid is (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, N_PAD)
    inside = n < N
    kept = residual + row * residual_stride + n
    total = tl.load(x + row * x_stride + n, mask=inside, other=0.0).to(tl.float32)
    total += tl.load(kept, mask=inside, other=0.0).to(tl.float32)
    stored = total.to(residual.dtype.element_ty)
    tl.store(kept, stored, mask=inside)
    values = stored.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values) / N + eps)
    factors = tl.load(weight + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * N + n, (values * scale * factors).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _rotate(x, heads, exist, stride, i, inside, cos, sin, HALF: tl.constexpr):
    """Rotate heads of one token in place."""
    first = x + heads[:, None] * stride + i[None, :]
    there = exist[:, None] & inside[None, :]
    a = tl.load(first, mask=there, other=0.0).to(tl.float32)
    b = tl.load(first + HALF, mask=there, other=0.0).to(tl.float32)
    tl.store(first, (a * cos - b * sin).to(x.dtype.element_ty), mask=there)
    tl.store(first + HALF, (b * cos + a * sin).to(x.dtype.element_ty), mask=there)


@triton.jit
def rotary(
    q, k, positions, cos, sin, q_token_stride, q_head_stride, k_token_stride, k_head_stride,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr,
):  # fmt: skip
    """Rotate the first 2 * HALF elements of every head of q and k in place: element i with element i + HALF.

    The grid is (tokens, tiles of HEADS heads: those of q, then those of k).
    """
    token, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    q_tiles: tl.constexpr = (Q_HEADS + HEADS - 1) // HEADS
    i = tl.arange(0, HALF_PAD)
    inside = i < HALF
    row = tl.load(positions + token).to(tl.int64) * HALF
    c = tl.load(cos + row + i, mask=inside, other=0.0)[None, :]
    s = tl.load(sin + row + i, mask=inside, other=0.0)[None, :]
    if tile < q_tiles:
        heads = tile * HEADS + tl.arange(0, HEADS)
        _rotate(q + token * q_token_stride, heads, heads < Q_HEADS, q_head_stride, i, inside, c, s, HALF)
    else:
        heads = (tile - q_tiles) * HEADS + tl.arange(0, HEADS)
        _rotate(k + token * k_token_stride, heads, heads < K_HEADS, k_head_stride, i, inside, c, s, HALF)


@triton.jit
def activated(gate, up, ACTIVATION: tl.constexpr):
    """Return the gated activation of float32 values; ACTIVATION is the activation's number in `operators.ACTIVATIONS`."""
    if ACTIVATION == 2:
        # A NaN is kept, which the minimum of the hardware would drop.
        gate = tl.where(gate > 7.0, 7.0, gate)
        up = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up)) + 1.0
        steep = 1.702 * gate
    elif ACTIVATION == 1:
        # tanh(y) = 2 sigmoid(2y) - 1, with y = sqrt(2/pi) (x + 0.044715 x^3).
        steep = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    else:
        steep = gate
    if ACTIVATION == 3:
        result = 0.5 * gate * (1.0 + tl.erf(0.7071067811865476 * gate)) * up
    else:
        result = gate / (1.0 + tl.exp(-steep)) * up
    return result


@triton.jit
def gated_activation(x, out, x_stride, N: tl.constexpr, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr):
    """Write the gated activation of x[:, :N] and x[:, N:]. The grid is (rows, N / BLOCK)."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = n < N
    gate = tl.load(x + row * x_stride + n, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_stride + N + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * N + n, activated(gate, up, ACTIVATION).to(out.dtype.element_ty), mask=inside)
