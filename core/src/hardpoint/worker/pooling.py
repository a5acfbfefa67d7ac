"""Embeddings from hidden states, over prompts that may arrive in chunks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from hardpoint.interfaces.batch import FloatArray, Pooling

if TYPE_CHECKING:
    from torch import Tensor


class Pooler:
    """Keeps what a chunked prompt's embedding still needs of the chunks before."""

    def __init__(self) -> None:
        self._partial: dict[int, tuple[Tensor, int]] = {}

    def add(
        self, seq_id: int, pooling: Pooling, hidden: Tensor, *, ends: bool, starts: bool = False
    ) -> FloatArray | None:
        """Take the hidden states [tokens, hidden_size] of a prompt's next chunk; return the embedding when it ends.

        Args:
            starts: the chunk is the prompt's beginning, also of a prompt that is computed once more.
        """
        if starts:
            self._partial.pop(seq_id, None)
        if pooling is Pooling.LAST:
            return _to_numpy(hidden[-1]) if ends else None
        total, count = self._partial.pop(seq_id, (None, 0))
        if pooling is Pooling.CLS:
            # A decoder may write its next step's result to the same memory.
            state, count = (hidden[0].clone() if total is None else total), 1
        else:
            chunk = hidden.float().sum(dim=0)
            state, count = (chunk if total is None else total + chunk), count + len(hidden)
        if ends:
            return _to_numpy(state / count)
        self._partial[seq_id] = (state, count)
        return None

    def remove(self, seq_ids: Iterable[int]) -> None:
        """Forget sequences that ended before their prompt did."""
        for seq_id in seq_ids:
            self._partial.pop(seq_id, None)


def _to_numpy(vector: Tensor) -> FloatArray:
    array: FloatArray = vector.float().numpy(force=True).copy()
    return array
