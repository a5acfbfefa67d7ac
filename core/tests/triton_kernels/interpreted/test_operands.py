"""The interpreter, made quicker, leaves it to numpy to broadcast operands, and remembers numbers."""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl


@triton.jit
def mixed_operands(numbers, out, scalar, N: tl.constexpr):
    row = tl.arange(0, N)[:, None]
    column = tl.arange(0, 2 * N)[None, :]
    place = numbers + row * (2 * N) + column
    # What stands in place of the masked is zero in some places.
    loaded = tl.load(place, mask=row < column, other=column % 2)
    chosen = tl.where(row > 1, loaded, 0.25) + tl.where(row < column, 1, -1)
    bits = (row | 1) ^ (column >> 1)
    divided = (7 - row) // (column + 1) + (scalar + column) % 3
    result = tl.minimum(chosen * scalar, 3.0) - bits / 2 + tl.maximum(divided, 1)
    tl.store(out + row * (2 * N) + column, result)


def test_operands_of_all_shapes_and_kinds_are_computed_as_numpy_computes_them() -> None:
    n, generator = 8, torch.Generator().manual_seed(0)
    row, column = np.arange(n, dtype=np.int32)[:, None], np.arange(2 * n, dtype=np.int32)[None]
    for scalar in (1, 3, 2):  # with numbers that are remembered, too
        numbers = torch.randn(n, 2 * n, generator=generator)
        out = torch.full_like(numbers, torch.nan)
        mixed_operands[(1,)](numbers, out, scalar, n)
        loaded = np.where(row < column, numbers.numpy(), (column % 2).astype(np.float32))
        chosen = np.where(row > 1, loaded, np.float32(0.25)) + np.where(row < column, 1, -1).astype(np.float32)
        bits = ((row | 1) ^ (column >> 1)).astype(np.float32)
        divided = ((7 - row) // (column + 1) + (scalar + column) % 3).astype(np.float32)
        expected = np.minimum(chosen * scalar, np.float32(3)) - bits / np.float32(2) + np.maximum(divided, 1)
        assert np.array_equal(out.numpy(), expected)
