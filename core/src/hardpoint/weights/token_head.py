"""A head that labels texts, made of rows of the language model's head: rerankers that answer "yes" or "no" (Qwen3-Reranker)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hardpoint.interfaces.errors import CorruptWeights
from hardpoint.weights.checkpoint import Checkpoint, with_made

if TYPE_CHECKING:
    from torch import Tensor

HEAD = "score.weight"
_LM_HEAD = ("lm_head.weight",)
_EMBEDDINGS = ("model.embed_tokens.weight", "embed_tokens.weight")


@dataclass(frozen=True)
class TokenHead:
    """Which rows, of which tensor, the head is made of.

    Attributes:
        token_ids: of the rows.
        is_difference: the head is one row, the second less the first; otherwise it is the rows themselves.
        tied: they are rows of the embedding.
    """

    token_ids: tuple[int, ...]
    is_difference: bool
    tied: bool

    @property
    def num_rows(self) -> int:
        """Rows of the head."""
        return 1 if self.is_difference else len(self.token_ids)

    def is_source(self, name: str) -> bool:
        """Whether a checkpoint's tensor is the one that has the rows."""
        return name in (_EMBEDDINGS if self.tied else _LM_HEAD)

    def of(self, rows: Tensor) -> Tensor:
        """Return the head of the tokens' rows [tokens, hidden_size]; a difference is float32."""
        return (rows[1:].float() - rows[:1].float()) if self.is_difference else rows

    def with_head(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) pairs, and after the one with the rows the head that is made of it."""
        for name, tensor in weights:
            yield name, tensor
            if self.is_source(name):
                yield HEAD, self.of(tensor[list(self.token_ids)])


class _HeadOfTokens(Checkpoint):
    """The head alone, of the rows of a language model's checkpoint."""

    def __init__(self, inner: Checkpoint, head: TokenHead) -> None:
        self._inner, self._head = inner, head
        found = inner.shapes()
        self._source = next((name for name in found if head.is_source(name)), "")
        if not self._source or max(head.token_ids) >= found[self._source][0]:
            raise CorruptWeights(
                "the checkpoint does not have the rows that the head is made of",
                found=f"rows {list(head.token_ids)}, and {self._source or 'no tensor'} {found.get(self._source, '')}".rstrip(),
                hint="Check classifier_from_token and tie_word_embeddings",
            )

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {HEAD: (self._head.num_rows, self._inner.shapes()[self._source][1])}

    def rows(self, name: str, begin: int = 0, end: int | None = None) -> Iterator[tuple[int, Tensor]]:
        import torch

        rows = [values for one in self._head.token_ids for _, values in self._inner.rows(self._source, one, one + 1)]
        yield begin, self._head.of(torch.cat(rows))[begin:end]


def with_token_head(checkpoint: Checkpoint, head: TokenHead) -> Checkpoint:
    """Return a language model's checkpoint with a head of tokens' rows beside its tensors; raises CorruptWeights."""
    return with_made(checkpoint, _HeadOfTokens(checkpoint, head), (), checkpoint.dtype())
