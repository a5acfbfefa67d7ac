"""What LoRA adapters (arXiv:2106.09685) add to the products of linear layers, for batches whose tokens go through unlike ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from hardpoint.interfaces.kernels import AdapterRows, AdapterWeights, KernelSet


class AdapterSlots:
    """The adapters of a model, as all its linear layers share them.

    Args:
        max_adapters: slots.
        max_rank: greatest rank of an adapter.
        operators: add them, where they have an operator for it.

    Attributes:
        rows: which tokens of the present step go through which adapter; None where none does.
    """

    def __init__(self, max_adapters: int, max_rank: int, operators: KernelSet) -> None:
        self.max_adapters, self.max_rank = max_adapters, max_rank
        self.rows: AdapterRows | None = None
        self._operators = operators

    @contextmanager
    def during(self, rows: AdapterRows | None) -> Iterator[None]:
        """Let the layers add adapters to the tokens of a step."""
        self.rows = rows
        try:
            yield
        finally:
            self.rows = None

    def add(self, out: Tensor, x: Tensor, weights: AdapterWeights) -> None:
        """Add to `out` [T, outputs], in place, what the present step's adapters make of x [T, inputs]."""
        assert self.rows is not None
        if not self._operators.add_adapters(out, x, weights, self.rows):
            add_adapters(out, x, weights, self.rows)


def add_adapters(out: Tensor, x: Tensor, weights: AdapterWeights, rows: AdapterRows) -> None:
    """Do what `KernelSet.add_adapters` does, by torch, an adapter at a time."""
    max_rank = weights.up.shape[1]
    for slot, first, end in rows.groups:
        tokens = rows.tokens[first:end]
        inner = x.index_select(0, tokens).float() @ weights.down[slot].float().T
        up, scales = weights.up[slot].float(), weights.scales[slot]
        inner = inner.view(len(tokens), len(weights.spans), max_rank) * scales[:, None]
        added = [inner[:, part] @ up[:, begin:stop] for part, (begin, stop) in enumerate(weights.spans)]
        sums = out.index_select(0, tokens).float()
        for (begin, stop), one in zip(weights.spans, added, strict=True):
            sums[:, begin:stop] += one
        out.index_copy_(0, tokens, sums.to(out.dtype))
