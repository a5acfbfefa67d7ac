"""The bytes of KV blocks, compared with a count of every byte."""

from __future__ import annotations

import numpy as np
import pytest

from hardpoint.interfaces import DType, KVCacheSpec
from hardpoint.worker.kv_memory import live_ranges

LAYOUTS = [
    ("kv", "block", "head", "token", "dim"),
    ("block", "kv", "token", "head", "dim"),
    ("kv", "head", "block", "token", "dim"),
]


def _expected(blocks: list[int], spec: KVCacheSpec, num_blocks: int) -> np.ndarray:
    live = np.zeros(spec.shape(num_blocks), dtype=bool)
    np.moveaxis(live, spec.axes.index("block") + 1, 0)[blocks] = True
    return np.repeat(live.reshape(-1), spec.dtype.itemsize)


@pytest.mark.parametrize("axes", LAYOUTS)
@pytest.mark.parametrize("blocks", [[0], [9], [3, 4, 5], [0, 9], [1, 3, 5, 6], list(range(10))])
def test_ranges_hold_the_blocks_bytes_and_no_others(axes: tuple[str, ...], blocks: list[int]) -> None:
    spec = KVCacheSpec(num_layers=3, block_size=4, num_kv_heads=2, head_dim=8, dtype=DType.BFLOAT16, axes=axes)
    ranges = live_ranges(blocks, spec, 10)
    held = np.zeros(10 * spec.block_bytes, dtype=bool)
    for start, size in ranges:
        assert size > 0
        held[start : start + size] = True
    assert np.array_equal(held, _expected(blocks, spec, 10))
    ends = [start + size for start, size in ranges]
    assert all(end < start for end, (start, _) in zip(ends, ranges[1:], strict=False)), "neighbours are joined"


def test_no_blocks_are_no_ranges_and_all_blocks_are_one() -> None:
    spec = KVCacheSpec(2, 4, 2, 8, DType.FLOAT32)
    assert live_ranges([], spec, 6) == []
    assert live_ranges(list(range(6)), spec, 6) == [(0, 6 * spec.block_bytes)]
