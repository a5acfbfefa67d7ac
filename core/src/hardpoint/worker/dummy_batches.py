"""Steps of zero tokens, which are run for what they take or compile."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hardpoint.interfaces.batch import StepBatch


def dummy_decode(context: int, block_size: int) -> StepBatch:
    """Return the decode of one sequence of `context` tokens, whose keys and values are what the first blocks hold."""
    batch = dummy_batch(num_tokens=context, max_len=context, block_size=block_size, max_seqs=1)
    return replace(
        batch,
        token_ids=batch.token_ids[-1:],
        positions=batch.positions[-1:],
        slot_mapping=batch.slot_mapping[-1:],
        query_start=np.array([0, 1], np.int32),
        num_decodes=1,
    )


def dummy_batch(*, num_tokens: int, max_len: int, block_size: int, max_seqs: int) -> StepBatch:
    """Return a step of `num_tokens` zero tokens in as few sequences as `max_len` allows, each sampled: decodes if that is 1, else prefills.

    The sequences own the first blocks of the cache, in order. What does not fit into `max_seqs` sequences is left out.
    """
    lengths = [min(max_len, num_tokens - start) for start in range(0, num_tokens, max_len)][:max_seqs]
    query_start = np.cumsum([0, *lengths]).astype(np.int32)
    blocks_per_seq = -(-max(lengths) // block_size)
    block_table = np.arange(len(lengths) * blocks_per_seq, dtype=np.int32).reshape(len(lengths), blocks_per_seq)
    positions = np.concatenate([np.arange(length, dtype=np.int64) for length in lengths])
    rows = np.arange(len(lengths), dtype=np.int32)
    owner = np.repeat(rows, lengths)
    slots = block_table[owner, positions // block_size] * block_size + positions % block_size
    no_pairs = np.empty((0, 2), np.int32)
    return StepBatch(
        token_ids=np.zeros(len(positions), np.int64),
        positions=positions,
        slot_mapping=slots.astype(np.int32),
        query_start=query_start,
        context_lens=np.asarray(lengths, np.int32),
        block_table=block_table,
        rows=rows,
        seq_ids=rows.astype(np.int64),
        num_decodes=len(lengths) if max_len == 1 else 0,
        sample_rows=rows,
        sample_seq_ids=rows.astype(np.int64),
        state_rows=rows,
        sample_state_rows=rows,
        sample_positions=np.zeros(len(lengths), np.int32),
        swap_out=no_pairs,
        swap_in=no_pairs,
        copies=no_pairs,
        preempted=np.empty(0, np.int64),
    )
