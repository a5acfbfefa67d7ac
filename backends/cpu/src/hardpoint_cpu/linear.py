"""Linear layers on the host: weights in the tiles that the native kernels read, packed as they are stored."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hardpoint.interfaces import DType, LinearProgram, LinearRequest
from hardpoint_cpu import _native
from hardpoint_cpu.decoder import DTYPE_CODES, InvalidOperand

if TYPE_CHECKING:
    from torch import Tensor

_TILE = 16
_STORE = 0


class CpuLinear(LinearProgram):
    """A native linear layer. A row's result is the same, bit for bit, whatever the batch and the number of threads."""

    def __init__(self, request: LinearRequest) -> None:
        super().__init__(request)
        self._dtype = request.dtype.to_torch()
        self._code = DTYPE_CODES[self._dtype]

    def weight_shape(self) -> tuple[int, ...]:
        """Return the shape of the packed weight: whole tiles of 16 rows."""
        return packed_shape(self._request.rows, self._request.columns, self._request.dtype)

    def write(self, stored: Tensor, row: int, values: Tensor) -> None:
        """Pack rows from `row` on."""
        source = values.to(device="cpu", dtype=self._dtype).contiguous()
        rows, columns = source.shape
        _native.pack_weight(source.data_ptr(), columns, rows, columns, self._code, row, 0, 1, stored.data_ptr())

    def run(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return `x @ weight.T + bias`; raises InvalidOperand for tensors that are not as the request said."""
        asked = self._request
        if x.shape[-1] != asked.columns or x.dtype is not self._dtype or tuple(weight.shape) != self.weight_shape():
            raise InvalidOperand(
                f"x is [..., {asked.columns}] of {self._dtype}, the packed weight {list(self.weight_shape())}",
                found=f"x {list(x.shape)} of {x.dtype}, weight {list(weight.shape)}",
            )
        rows = x.reshape(-1, asked.columns)
        rows = rows if rows.stride(-1) == 1 else rows.contiguous()
        offsets = None if bias is None else bias.to(torch.float32).contiguous()
        out = torch.empty((*x.shape[:-1], asked.rows), dtype=self._dtype)
        workspace = torch.empty(_native.linear_workspace_bytes(len(rows), asked.columns, self._code), dtype=torch.uint8)
        _native.linear(
            weight.data_ptr(),
            asked.rows,
            asked.columns,
            self._code,
            rows.data_ptr(),
            rows.stride(0),
            len(rows),
            0 if offsets is None else offsets.data_ptr(),
            _STORE,
            0.0,
            out.data_ptr(),
            asked.rows,
            self._code,
            asked.rows,
            0,
            workspace.data_ptr(),
            workspace.numel(),
        )
        return out


def packed_shape(rows: int, columns: int, dtype: DType) -> tuple[int, int]:
    """Return the shape of memory for a packed weight [rows, columns]; see native/gemm.hpp."""
    return -(-rows // _TILE) * _TILE, columns + columns % 2 if dtype is DType.BFLOAT16 else columns
