"""Dense weights in the layout of the backend's own linear layers, where it has one."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from hardpoint.interfaces.attention import Refusal
from hardpoint.interfaces.dtypes import DType
from hardpoint.interfaces.kernels import LinearRequest
from hardpoint.quantization.base import LinearMethod, MethodOfShape
from hardpoint.quantization.dense import DENSE

if TYPE_CHECKING:
    from torch import Tensor, nn

    from hardpoint.interfaces.kernels import Activation, KernelSet, LinearProgram


class Packed(LinearMethod):
    """One layer's weight, stored and multiplied by a program of the kernel set."""

    verbatim = False

    def __init__(self, program: LinearProgram) -> None:
        self._program = program

    def create(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(self._program.weight_shape(), dtype=dtype, device="meta")

    def write(self, stored: Tensor, row: int, values: Tensor) -> None:
        self._program.write(stored, row, values)

    def multiply(self, layer: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
        return self._program.run(x, cast("Tensor", layer.weight), bias)

    def multiply_activated(
        self, layer: nn.Module, x: Tensor, bias: Tensor | None, activation: Activation
    ) -> Tensor | None:
        return self._program.run_activated(x, cast("Tensor", layer.weight), bias, activation)


def packed(kernels: KernelSet) -> MethodOfShape:
    """Return the choice of a kernel set's layout for every layer that it has one for; others are dense."""

    def method(rows: int, columns: int, dtype: torch.dtype) -> LinearMethod:
        planned = kernels.plan_linear(LinearRequest(rows, columns, DType.of(dtype)))
        return DENSE if isinstance(planned, Refusal) else Packed(planned)

    return method
