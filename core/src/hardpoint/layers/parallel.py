"""How a model is divided among ranks, in numbers.

Tensor parallelism (Megatron-LM, arXiv:1909.08053): the rows of projections into attention and feed-forward and the columns of those out
of them are divided, so that one sum over the ranks follows attention and one the feed-forward; embedding and head are
divided by vocabulary. Attention is divided by whole KV heads with their query heads, which need not divide evenly. Pipeline
parallelism: each stage has consecutive layers, the first the embedding, the last the final norm and the head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hardpoint.interfaces.capabilities import AttentionLayer
    from hardpoint.interfaces.collectives import Collectives

_UNIT = 16
"""Rows that matrix units take at once: shards are multiples of it, the last one apart."""

Span = tuple[int, int]
"""(first, end)."""


@dataclass(frozen=True)
class ParallelRank:
    """A rank among those that share a model; see `WorkerConfig`."""

    tensor_rank: int = 0
    tensor_size: int = 1
    stage: int = 0
    stages: int = 1

    @property
    def is_alone(self) -> bool:
        """The rank has the whole model."""
        return self.tensor_size * self.stages == 1

    @property
    def is_first(self) -> bool:
        """The rank's stage embeds tokens."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """The rank's stage has the final norm and the head."""
        return self.stage + 1 == self.stages


@dataclass(frozen=True)
class Ranks:
    """What a rank reaches the others by.

    Attributes:
        tensor: the ranks that share its layers, by their `tensor_rank`; None where there are no others.
        pipeline: the ranks that have its place in the other stages, by their `stage`; None where there is one stage.
    """

    tensor: Collectives | None = None
    pipeline: Collectives | None = None


ALONE = ParallelRank()
"""The rank that has the whole model."""
NO_OTHERS = Ranks()
"""What it reaches others by."""


def layers_of_stage(num_layers: int, rank: ParallelRank) -> Span:
    """Return a stage's layers: consecutive, as many as any other stage's or one more."""
    return even_span(num_layers, rank.stages, rank.stage)


def head_spans(layer: AttentionLayer, rank: ParallelRank) -> tuple[Span, Span]:
    """Return a rank's (query heads, KV heads); where ranks outnumber KV heads, several have the same one."""
    heads, kv_heads, size = layer.num_heads, layer.num_kv_heads, rank.tensor_size
    if size <= kv_heads:
        keys = even_span(kv_heads, size, rank.tensor_rank)
        return scaled(keys, heads // kv_heads), keys
    key = rank.tensor_rank // (size // kv_heads)
    return scaled((rank.tensor_rank, rank.tensor_rank + 1), heads // size), (key, key + 1)


def head_obstacle(layer: AttentionLayer, size: int) -> str | None:
    """Return why a layer's heads cannot be divided among `size` ranks, or None."""
    groups = layer.num_heads // layer.num_kv_heads
    if size > layer.num_kv_heads and (size % layer.num_kv_heads or groups % (size // layer.num_kv_heads)):
        return (
            f"{layer.num_heads} query heads over {layer.num_kv_heads} KV heads do not divide among {size} ranks: more ranks "
            f"than KV heads must be a multiple of these that divides the query heads"
        )
    return None


def aligned_spans(total: int, size: int) -> list[Span]:
    """Divide `total` rows into shards of one length, but for the last ones, which may be shorter or empty."""
    width = -(-total // size)
    rounded = -(-width // _UNIT) * _UNIT
    if rounded * (size - 1) < total:
        width = rounded
    return [(min(rank * width, total), min((rank + 1) * width, total)) for rank in range(size)]


def aligned_obstacle(total: int, what: str, size: int) -> str | None:
    """Return why `total` rows cannot be divided among `size` ranks, or None."""
    if all(end > first for first, end in aligned_spans(total, size)):
        return None
    return f"the {what} of {total} leaves nothing for some of {size} ranks"


def even_span(total: int, size: int, rank: int) -> Span:
    """Return one of `size` spans whose lengths differ by one at most, the longer ones first."""
    length, longer = divmod(total, size)
    first = rank * length + min(rank, longer)
    return first, first + length + (rank < longer)


def length(span: Span) -> int:
    """Return how many a span has."""
    return span[1] - span[0]


def scaled(span: Span, factor: int) -> Span:
    """Return the span of what there is `factor` of for each."""
    return span[0] * factor, span[1] * factor


def shifted(span: Span, by: int) -> Span:
    """Return the span further on."""
    return span[0] + by, span[1] + by
