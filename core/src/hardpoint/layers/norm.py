"""Root mean square normalisation (arXiv:1910.07467)."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hardpoint.layers.operators import TORCH_OPERATORS
from hardpoint.layers.weights import Layer, WeightShard, write_rows

if TYPE_CHECKING:
    from hardpoint.layers.context import ModelContext


class RMSNorm(Layer):
    """`x / sqrt(mean(x²) + eps) * weight` over the last axis, computed in float32.

    Args:
        offset: added to the stored weight when it is loaded, for families that store `weight - 1`. The sum loses its precision
            when it is rounded to 8 bits, so it stays in float32, which only torch's operators take.
    """

    weight: Tensor

    def __init__(self, size: int, eps: float, context: ModelContext, *, offset: float = 0.0) -> None:
        super().__init__()
        self.eps, self.offset = eps, offset
        self._operators = TORCH_OPERATORS if offset else context.operators
        self.add_weight(
            "weight",
            [WeightShard("weight", (size,))],
            dtype=torch.float32 if offset else context.dtype,
            write=partial(_write_offset, offset) if offset else write_rows,
            verbatim=not offset,
        )

    def forward(self, x: Tensor, branch: Tensor | None = None) -> Tensor:
        """Return x [..., size] normalised. Where a branch is given, it is added to x first, in place, in the same launch."""
        if branch is None:
            return self._operators.rms_norm(x, self.weight, self.eps)
        return self._operators.add_rms_norm(branch, x, self.weight, self.eps)


def _write_offset(offset: float, stored: Tensor, row: int, values: Tensor) -> None:
    stored[row : row + len(values)].copy_(values.float() + offset)
