"""Moving blocks of a KV cache with torch's own operations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hardpoint.interfaces.errors import InvalidBatch
from hardpoint.worker import copy_blocks, kv_memory

BLOCKS = 5
PAIRS = st.lists(st.tuples(st.integers(0, BLOCKS - 1), st.integers(0, BLOCKS - 1)), max_size=8)


def cache(axis: int, blocks: int = BLOCKS) -> torch.Tensor:
    shape = [2, 2, 3, 4]
    shape[axis] = blocks
    return torch.rand(shape, generator=torch.Generator().manual_seed(blocks))


@given(pairs=PAIRS, axis=st.integers(0, 3), is_same=st.booleans(), piece=st.sampled_from([1, 200, 1 << 20]))
def test_copies_are_those_of_one_pair_after_the_other(
    pairs: list[tuple[int, int]], axis: int, is_same: bool, piece: int
) -> None:
    source = cache(axis)
    destination = source if is_same else cache(axis, BLOCKS)
    expected_source = source.clone()
    expected = expected_source if is_same else destination.clone()
    for one, other in pairs:
        expected.select(axis, other).copy_(expected_source.select(axis, one))
    limit, kv_memory._PIECE_BYTES = kv_memory._PIECE_BYTES, piece
    try:
        copy_blocks(source, destination, np.array(pairs, np.int32).reshape(-1, 2), axis)
    finally:
        kv_memory._PIECE_BYTES = limit
    assert torch.equal(destination, expected)
    assert torch.equal(source, expected_source)


@pytest.mark.parametrize("pairs", [[[0, 5]], [[-1, 0]], [[5, 0]], [[0, -2]]])
def test_block_outside_is_refused_and_nothing_is_copied(pairs: list[Any]) -> None:
    blocks = cache(1)
    before = blocks.clone()
    with pytest.raises(InvalidBatch, match="numbered 0 to 4"):
        copy_blocks(blocks, blocks, np.array([[0, 1], *pairs], np.int32), 1)
    assert torch.equal(blocks, before)


def test_caches_that_do_not_match_are_refused() -> None:
    one = cache(1)
    for other in (cache(1).double(), torch.rand(2, 5, 3, 5), torch.rand(2, 5, 3)):
        with pytest.raises(InvalidBatch, match="number of blocks only"):
            copy_blocks(one, other, np.array([[0, 0]], np.int32), 1)
    with pytest.raises(InvalidBatch, match=r"int32\[k, 2\]"):
        copy_blocks(one, one, np.array([[0, 0, 0]], np.int32), 1)
