"""Pooling: from the hidden states of a prompt's chunks to what is returned of the prompt."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from hardpoint.interfaces.batch import Pooling

if TYPE_CHECKING:
    from torch import Tensor


class Pooler:
    """Pools hidden states: keeps what a chunked prompt's result still needs of the chunks before."""

    def __init__(self) -> None:
        self._partial: dict[int, tuple[Tensor, int]] = {}

    def add(self, seq_id: int, pooling: Pooling, hidden: Tensor, *, ends: bool, starts: bool = False) -> Tensor | None:
        """Take the hidden states [tokens, hidden_size] of a prompt's next chunk; return the pooled [rows, hidden_size] when it ends.

        One row, or with ALL a row for each token; a mean is float32. They are on the device, and may share the memory of `hidden`.

        Args:
            starts: the chunk is the prompt's beginning, also of a prompt that is computed once more.
        """
        if starts:
            self._partial.pop(seq_id, None)
        if pooling is Pooling.LAST:
            return hidden[-1:] if ends else None
        total, count = self._partial.pop(seq_id, (None, 0))
        if starts and ends and pooling is not Pooling.MEAN:
            return hidden if pooling is Pooling.ALL else hidden[:1]
        # A decoder may write its next step's result to the same memory.
        if pooling is Pooling.CLS:
            state, count = (hidden[:1].clone() if total is None else total), 1
        elif pooling is Pooling.ALL:
            state, count = (hidden.clone() if total is None else torch.cat((total, hidden))), 1
        else:
            chunk = hidden.float().sum(dim=0, keepdim=True)
            state, count = (chunk if total is None else total + chunk), count + len(hidden)
        if ends:
            return state / count if pooling is Pooling.MEAN else state
        self._partial[seq_id] = (state, count)
        return None

    def remove(self, seq_ids: Iterable[int]) -> None:
        """Forget sequences that ended before their prompt did."""
        for seq_id in seq_ids:
            self._partial.pop(seq_id, None)
