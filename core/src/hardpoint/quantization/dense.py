"""Weights stored as they are, in the activations' dtype."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch.nn import functional

from hardpoint.quantization.base import LinearMethod

if TYPE_CHECKING:
    from torch import Tensor, nn


class Dense(LinearMethod):
    """A matrix in the activations' dtype, multiplied by torch.

    A layout that some device would multiply by faster would be a copy outside of the memory that sleep gives back.
    """

    def create(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        return torch.empty((rows, columns), dtype=dtype, device="meta")

    def write(self, stored: Tensor, row: int, values: Tensor) -> None:
        stored[row : row + len(values)].copy_(values)

    def multiply(self, layer: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
        return functional.linear(x, cast("Tensor", layer.weight), bias)


DENSE = Dense()
"""The method of every checkpoint that is not quantised."""
