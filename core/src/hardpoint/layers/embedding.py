"""Embedding and head, each divided among the ranks by vocabulary, and small embeddings that every rank has."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from hardpoint.layers.parallel import Span, aligned_obstacle, aligned_spans, length
from hardpoint.layers.weights import Layer, StoredWeight, WeightShard, take_rows
from hardpoint.quantization import DENSE, Blocks, LinearMethod

if TYPE_CHECKING:
    from hardpoint.layers.context import ModelContext


def _vocabulary(vocab_size: int, context: ModelContext) -> Span:
    return aligned_spans(vocab_size, context.rank.tensor_size)[context.rank.tensor_rank]


class VocabEmbedding(Layer):
    """Rows of the vocabulary; a rank without a token's row adds zero to the sum.

    Args:
        scale: of the embedding.
    """

    weight: Tensor

    def __init__(self, vocab_size: int, hidden_size: int, context: ModelContext, *, scale: float = 1.0) -> None:
        super().__init__()
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        self.scale = scale
        self.method: LinearMethod = DENSE
        self._ranks = context.ranks.tensor
        self._first, self._end = _vocabulary(vocab_size, context)
        whole = WeightShard("weight", (vocab_size, hidden_size))
        self.add_weight("weight", take_rows([whole], [(self._first, self._end)]), dtype=context.dtype)

    def forward(self, token_ids: Tensor) -> Tensor:
        """Return [T, hidden_size] of token ids int64[T]."""
        if self._ranks is None:
            hidden = self._rows(token_ids)
        else:
            own = token_ids - self._first
            elsewhere = (own < 0) | (own >= self._end - self._first)
            hidden = self._rows(own.masked_fill(elsewhere, 0))
            hidden = hidden.masked_fill(elsewhere[:, None], 0)
            self._ranks.all_reduce(hidden)
        return hidden if self.scale == 1.0 else hidden * self.scale

    def _rows(self, numbers: Tensor) -> Tensor:
        if isinstance(self.method, Blocks):
            return self.method.gather(self.weight, numbers)
        return functional.embedding(numbers, self.weight)

    def tensor_obstacle(self, size: int) -> str | None:
        """Return why the layer cannot be divided among `size` ranks, or None."""
        return aligned_obstacle(self.vocab_size, "vocabulary", size)


class SmallEmbedding(Layer):
    """Rows of positions or of types of tokens; every rank has all."""

    weight: Tensor

    def __init__(self, num_rows: int, hidden_size: int, context: ModelContext) -> None:
        super().__init__()
        self.num_rows = num_rows
        self.add_weight("weight", [WeightShard("weight", (num_rows, hidden_size))], dtype=context.dtype)

    def forward(self, rows: Tensor) -> Tensor:
        """Return [T, hidden_size] of row numbers int64[T]."""
        return functional.embedding(rows, self.weight)


class LMHead(Layer):
    """Logits of hidden states: of the whole vocabulary, whichever rank has its rows.

    Args:
        tied: the embedding whose weight is the head's; None for a head of its own.
        soft_cap: logits become `soft_cap * tanh(logit / soft_cap)`.
        divisor: of the logits.
    """

    weight: Tensor

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        context: ModelContext,
        *,
        tied: VocabEmbedding | None = None,
        soft_cap: float | None = None,
        divisor: float = 1.0,
    ) -> None:
        super().__init__()
        self.vocab_size, self.soft_cap, self.divisor = vocab_size, soft_cap, divisor
        self.is_tied = tied is not None
        self._ranks, self._operators = context.ranks.tensor, context.operators
        self._first, end = _vocabulary(vocab_size, context)
        self._width = length(aligned_spans(vocab_size, context.rank.tensor_size)[0])
        self.method: LinearMethod = DENSE
        if tied is not None:
            self.tie(tied)
        else:
            rows, dtype = end - self._first, context.dtype
            self.method = method = context.linear_method(rows, hidden_size, dtype)
            shards = take_rows([WeightShard("weight", (vocab_size, hidden_size))], [(self._first, end)])
            stored = StoredWeight(shards, method.write, method.verbatim)
            self.add_stored("weight", stored, method.create(rows, hidden_size, dtype))

    def tie(self, embedding: VocabEmbedding) -> None:
        """Take the weight of an embedding, and its method."""
        self.weight, self.method = embedding.weight, embedding.method

    def logits(self, hidden: Tensor) -> Tensor:
        """Return float32[rows, vocab_size] of hidden states [rows, hidden_size]."""
        logits = self._own_logits(hidden)
        if self._ranks is None:
            return logits
        if not len(logits):
            return logits.new_empty((0, self.vocab_size))
        padded = functional.pad(logits, (0, self._width - logits.shape[1]))
        # Only the last ranks' parts are padded, so that the padding is at the end.
        return self._ranks.all_gather(padded, 1)[:, : self.vocab_size].contiguous()

    def argmax(self, hidden: Tensor) -> Tensor:
        """Return int64[rows], the lowest id of the highest logit of each row; logits stay on their ranks."""
        logits = self._own_logits(hidden)
        best = self._operators.argmax(logits)
        if self._ranks is None or not len(best):
            return best
        # float32 has all integers up to 2^24, more than any vocabulary.
        own = torch.stack((logits.gather(1, best[:, None])[:, 0], (best + self._first).float()), dim=1)
        values, tokens = self._ranks.all_gather(own, 1).view(len(best), -1, 2).unbind(-1)
        # The lowest rank of the highest value has the lowest id.
        return tokens.gather(1, self._operators.argmax(values.contiguous())[:, None])[:, 0].long()

    def _own_logits(self, hidden: Tensor) -> Tensor:
        logits = self.method.multiply(self, hidden, None).float()
        if self.divisor != 1.0:
            logits = logits / self.divisor
        return logits if self.soft_cap is None else torch.tanh(logits / self.soft_cap) * self.soft_cap
