"""Layers that attend in chunks are given to a backend as sequences of chunks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from reference import ReferenceAttention, step_batch

from hardpoint.interfaces import AttentionLayer, AttentionRequest, DType, Refusal
from hardpoint.worker.kv_groups import in_chunks, plan_groups

FULL = AttentionLayer(num_heads=4, num_kv_heads=2, head_dim=64, scale=0.125)


def test_a_step_in_chunks_has_a_sequence_for_each_chunk_with_tokens() -> None:
    """A decode in its second chunk, one at the first place of its third, and a prefill over a border."""
    block, chunk = 4, 8
    tables = np.arange(30, dtype=np.int32).reshape(3, 10)
    batch = step_batch([([7], 9), ([8], 16), (list(range(9)), 5)], tables.tolist(), block)
    found = in_chunks(batch, chunk, block)
    assert found.query_start.tolist() == [0, 1, 2, 5, 11]
    assert found.context_lens.tolist() == [2, 1, 8, 6]
    assert found.positions.tolist() == [1, 0, 5, 6, 7, 0, 1, 2, 3, 4, 5]
    assert found.num_decodes == 2
    assert found.block_table[found.rows].tolist() == [[2, 3], [14, 15], [20, 21], [22, 23]]
    assert np.array_equal(found.slot_mapping, batch.slot_mapping)
    assert in_chunks(batch, 0, block) is batch


def test_layers_in_chunks_are_refused_where_there_is_one_block_table_or_blocks_do_not_fit() -> None:
    attention = ReferenceAttention()
    request = AttentionRequest((replace(FULL, chunk=24), FULL), DType.FLOAT32, DType.FLOAT32, 8, 64)
    groups = plan_groups(attention, request, divides=True)
    assert not isinstance(groups, Refusal)
    assert [(group.layers, group.window, group.chunk) for group in groups] == [((1,), 0, 0), ((0,), 24, 24)]
    assert all(layer.chunk is None for group in groups for layer in group.plan.request.layers)
    for refused in (
        plan_groups(attention, request, divides=False),
        plan_groups(attention, replace(request, block_size=16), divides=True),
    ):
        assert isinstance(refused, Refusal)
    assert "chunks" in " ".join(attention.capabilities().explain(request))
