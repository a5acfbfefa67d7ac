"""What every way of storing a linear layer's weight has in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from hardpoint.interfaces.kernels import Activation


class LinearMethod(ABC):
    """How a linear layer's weight [rows, columns] is stored and multiplied by; without state of its own."""

    verbatim: bool = True
    """Whether a checkpoint's bytes of the same dtype are the stored ones, so that they can be read again straight from the file."""

    @abstractmethod
    def create(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """Return the stored weight on the meta device; a method with scales registers them beside it when it multiplies by them."""

    @abstractmethod
    def write(self, stored: Tensor, row: int, values: Tensor) -> None:
        """Store rows of the weight, in any floating dtype, from `row` on."""

    @abstractmethod
    def multiply(self, layer: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return `x @ weight.T + bias` for the layer's parameter `weight`; x is [..., columns]."""

    def multiply_activated(
        self, layer: nn.Module, x: Tensor, bias: Tensor | None, activation: Activation
    ) -> Tensor | None:
        """Return `act(x @ weight.T + bias)` in one pass; None where the method has no such pass, and nothing was done."""
        return None


MethodOfShape = Callable[[int, int, "torch.dtype"], LinearMethod]
"""(rows, columns, dtype): chooses the method of a layer whose weight has this shape."""
