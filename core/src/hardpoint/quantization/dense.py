"""Weights stored as they are, in the activations' dtype."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch.nn import functional

from hardpoint.quantization.base import LinearMethod

if TYPE_CHECKING:
    from torch import Tensor, nn


class Dense(LinearMethod):
    """A matrix in the activations' dtype, multiplied by torch."""

    def create(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        return torch.empty((rows, columns), dtype=dtype, device="meta")

    def write(self, stored: Tensor, row: int, values: Tensor) -> None:
        stored[row : row + len(values)].copy_(values)

    def multiply(self, layer: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
        return functional.linear(x, cast("Tensor", layer.weight), bias)


DENSE = Dense()
"""The method of checkpoints that are not quantised, where the backend has no layout of its own."""


def dense(rows: int, columns: int, dtype: torch.dtype) -> LinearMethod:
    """Return `DENSE`, whatever the shape."""
    return DENSE
