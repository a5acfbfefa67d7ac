"""Dummy batches are legal batches; embeddings do not depend on how a prompt is cut into chunks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hardpoint.interfaces import Pooling
from hardpoint.worker.dummy_batches import dummy_batch
from hardpoint.worker.pooler import Pooler


@pytest.mark.parametrize(
    ("num_tokens", "max_len", "max_seqs", "lengths"),
    [(10, 4, 8, [4, 4, 2]), (10, 4, 2, [4, 4]), (3, 64, 1, [3]), (1, 1, 1, [1]), (3, 1, 2, [1, 1])],
)
def test_a_dummy_batch_has_whole_sequences_in_distinct_slots(
    num_tokens: int, max_len: int, max_seqs: int, lengths: list[int]
) -> None:
    batch = dummy_batch(num_tokens=num_tokens, max_len=max_len, block_size=2, max_seqs=max_seqs)
    assert np.diff(batch.query_start).tolist() == lengths
    assert batch.context_lens.tolist() == lengths
    assert batch.num_tokens == sum(lengths) == len(set(batch.slot_mapping.tolist()))
    assert batch.num_decodes == (len(lengths) if max_len == 1 else 0)
    for row, length in enumerate(lengths):
        own = slice(batch.query_start[row], batch.query_start[row + 1])
        assert batch.positions[own].tolist() == list(range(length))
        blocks = batch.block_table[row, batch.positions[own] // 2]
        assert (batch.slot_mapping[own] // 2 == blocks).all()


def test_a_dummy_batch_takes_no_more_blocks_than_its_tokens_need() -> None:
    """The profile zeroes a cache of just these: of a context of 128k and steps of 2048 tokens 128 blocks, and not 8192."""
    batch = dummy_batch(num_tokens=2048, max_len=1 << 17, block_size=16, max_seqs=256)
    assert batch.block_table.max() + 1 == 2048 // 16


@pytest.mark.parametrize("pooling", list(Pooling))
def test_an_embedding_does_not_depend_on_chunking(pooling: Pooling) -> None:
    """Nor on what becomes of a chunk's memory, in which a decoder may put its next result."""
    hidden = torch.randn(7, 5, generator=torch.Generator().manual_seed(0))
    whole = Pooler().add(1, pooling, hidden, ends=True)
    pooler = Pooler()
    reused = hidden[:3].clone()
    assert pooler.add(1, pooling, reused, ends=False) is None
    reused.fill_(9.0)
    assert pooler.add(2, pooling, torch.ones(2, 5), ends=False) is None
    in_chunks = pooler.add(1, pooling, hidden[3:], ends=True)
    assert whole is not None
    assert in_chunks is not None
    np.testing.assert_allclose(in_chunks, whole, rtol=1e-6)
    expected = {
        Pooling.LAST: hidden[-1:],
        Pooling.CLS: hidden[:1],
        Pooling.MEAN: hidden.mean(0, keepdim=True),
        Pooling.ALL: hidden,
    }[pooling]
    np.testing.assert_allclose(whole, expected.numpy(), rtol=1e-5)


@pytest.mark.parametrize("pooling", list(Pooling))
def test_a_prompt_that_is_computed_once_more_counts_once(pooling: Pooling) -> None:
    hidden = torch.randn(7, 5, generator=torch.Generator().manual_seed(0))
    pooler = Pooler()
    pooler.add(1, pooling, hidden[:3] + 1, ends=False, starts=True)
    pooler.add(1, pooling, hidden[:3], ends=False, starts=True)
    embedding = pooler.add(1, pooling, hidden[3:], ends=True)
    whole = Pooler().add(1, pooling, hidden, ends=True, starts=True)
    assert embedding is not None
    assert whole is not None
    np.testing.assert_allclose(embedding, whole, rtol=1e-6)


def test_a_removed_sequence_leaves_nothing_behind() -> None:
    pooler = Pooler()
    pooler.add(1, Pooling.MEAN, torch.full((2, 3), 9.0), ends=False)
    pooler.remove([1, 5])
    embedding = pooler.add(1, Pooling.MEAN, torch.ones(2, 3), ends=True)
    assert embedding is not None
    np.testing.assert_array_equal(embedding, np.ones((1, 3), np.float32))
