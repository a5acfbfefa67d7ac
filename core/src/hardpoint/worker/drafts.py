"""Drafted tokens as a worker computes them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hardpoint.interfaces.batch import StepBatch


def as_decodes(batch: StepBatch) -> StepBatch:
    """Return a step with each token of a sequence that has drafted tokens as a decode of its own, over that sequence's block table.

    So a drafted token is computed as it is in a step of its own, by the same kernels with the same order of sums, and a step of decodes and
    drafts alone is one that may have been captured. What the tokens before it write is there when it attends: a layer writes the keys and
    values of a whole step first.
    """
    if not len(batch.sample_tokens):
        return batch
    lengths = np.diff(batch.query_start)
    is_drafted = np.zeros(batch.num_seqs, np.bool_)
    is_drafted[batch.sample_rows[batch.sample_tokens != batch.query_start[batch.sample_rows + 1] - 1]] = True
    owners = np.repeat(np.arange(batch.num_seqs), np.where(is_drafted, lengths, 1))
    alone = is_drafted[owners]
    query_start = np.concatenate(([0], np.cumsum(np.where(alone, 1, lengths[owners])))).astype(np.int32)
    # A token's context is counted by the tokens that follow it: with pictures, its position is not its number in the sequence.
    following = batch.query_start[owners + 1] - 1 - query_start[:-1]
    contexts = batch.context_lens[owners] - np.where(alone, following, 0)
    return replace(
        batch,
        query_start=query_start,
        context_lens=contexts.astype(np.int32),
        rows=batch.rows[owners],
        seq_ids=batch.seq_ids[owners],
        state_rows=batch.state_rows[owners],
        num_decodes=batch.num_decodes + int(alone.sum()),
        sample_rows=(np.searchsorted(query_start, batch.sample_tokens, side="right") - 1).astype(np.int32),
        sample_tokens=batch.sample_tokens[:0],
    )
