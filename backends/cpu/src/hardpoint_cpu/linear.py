"""Linear layers on the host: weights in the tiles that the native kernels read, packed as they are stored."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hardpoint.interfaces import Activation, BlockFormat, DType, LinearProgram, LinearRequest
from hardpoint_cpu import _native
from hardpoint_cpu.decoder import DTYPE_CODES, NO_BLOCKS, InvalidOperand

if TYPE_CHECKING:
    from torch import Tensor

_TILE = 16
# Codes of hp::Epilogue for products that are stored.
_STORE = 0
_ACTIVATED = {Activation.GELU: 9, Activation.GELU_TANH: 10, Activation.SILU: 11}

BLOCK_FORMATS = frozenset(
    {
        *(BlockFormat.Q4_0, BlockFormat.Q4_1, BlockFormat.Q5_0, BlockFormat.Q5_1, BlockFormat.Q8_0),
        *(BlockFormat.Q4_K, BlockFormat.Q5_K, BlockFormat.Q6_K),
        *(BlockFormat.INT4, BlockFormat.INT4_128, BlockFormat.INT8, BlockFormat.INT8_128),
    }
)
"""What native/block_weight.hpp knows."""


class _NativeLinear(LinearProgram, partial=True):
    """What layers over dense weights and over blocks have in common: the product, and the activation in its epilogue."""

    def __init__(self, request: LinearRequest) -> None:
        super().__init__(request)
        self._dtype = request.dtype.to_torch()
        self._code = DTYPE_CODES[self._dtype]
        self._format = NO_BLOCKS if request.blocks is None else request.blocks.type_id

    def run(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return `x @ weight.T + bias`; raises InvalidOperand for tensors that are not as the request said."""
        return self._run(x, weight, bias, _STORE)

    def run_activated(self, x: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation) -> Tensor | None:
        """Return `act(x @ weight.T + bias)`; raises InvalidOperand as `run` does."""
        epilogue = _ACTIVATED.get(activation)
        return None if epilogue is None else self._run(x, weight, bias, epilogue)

    def _run(self, x: Tensor, weight: Tensor, bias: Tensor | None, epilogue: int) -> Tensor:
        asked = self._request
        if x.shape[-1] != asked.columns or x.dtype is not self._dtype or tuple(weight.shape) != self.weight_shape():
            raise InvalidOperand(
                f"x is [..., {asked.columns}] of {self._dtype}, the packed weight {list(self.weight_shape())}",
                found=f"x {list(x.shape)} of {x.dtype}, weight {list(weight.shape)}",
            )
        rows = x.reshape(-1, asked.columns)
        rows = rows if rows.stride(-1) == 1 else rows.contiguous()
        offsets = None if bias is None else bias.to(torch.float32).contiguous()
        out = torch.empty((*x.shape[:-1], asked.rows), dtype=x.dtype)
        size = _native.linear_workspace_bytes(len(rows), asked.columns, self._code, asked.blocks is not None)
        workspace = torch.empty(size, dtype=torch.uint8)
        _native.linear(
            self._native_weight(weight),
            rows.data_ptr(),
            rows.stride(0),
            len(rows),
            0 if offsets is None else offsets.data_ptr(),
            epilogue,
            0.0,
            out.data_ptr(),
            asked.rows,
            self._code,
            asked.rows,
            0,
            workspace.data_ptr(),
            size,
        )
        return out

    def _native_weight(self, weight: Tensor) -> tuple[int, int, int, int, int]:
        return weight.data_ptr(), self._request.rows, self._request.columns, self._code, self._format


class CpuLinear(_NativeLinear):
    """A native linear layer. A row's result is the same, bit for bit, whatever the batch and the number of threads."""

    def weight_shape(self) -> tuple[int, ...]:
        """Return the shape of the packed weight: whole tiles of 16 rows."""
        return packed_shape(self._request.rows, self._request.columns, self._request.dtype)

    def write(self, stored: Tensor, row: int, values: Tensor) -> None:
        """Pack rows from `row` on."""
        source = values.to(device="cpu", dtype=self._dtype).contiguous()
        rows, columns = source.shape
        _native.pack_weight(source.data_ptr(), columns, rows, columns, self._code, row, 0, 1, stored.data_ptr())


class CpuBlockLinear(_NativeLinear):
    """A native linear layer over a weight in blocks. A row's result is the same, bit for bit, whatever the batch and the number of threads.

    Activations are quantised in blocks of 32 as they come; native/block_weight.hpp says how.
    """

    def __init__(self, request: LinearRequest) -> None:
        super().__init__(request)
        assert request.blocks is not None
        self._blocks = request.blocks

    def weight_shape(self) -> tuple[int, ...]:
        """Return the shape of the packed weight: tiles of 16 rows."""
        tiles = -(-self._request.rows // _TILE)
        size = _native.packed_block_bytes(self._request.rows, self._request.columns, self._blocks.type_id)
        return tiles, size // tiles

    def write(self, stored: Tensor, row: int, values: Tensor) -> None:
        """Pack rows of blocks from `row` on."""
        asked = self._request
        source = values.to("cpu").contiguous()
        if source.dtype is not torch.uint8 or source.shape[1:] != (self._blocks.row_bytes(asked.columns),):
            raise InvalidOperand(
                f"rows of {asked.columns} in blocks of {self._blocks} are uint8[n, {self._blocks.row_bytes(asked.columns)}]",
                found=f"{list(source.shape)} of {source.dtype}",
            )
        _native.pack_blocks(
            source.data_ptr(), len(source), asked.columns, self._blocks.type_id, row, 0, 1, stored.data_ptr()
        )

    def gather(self, weight: Tensor, rows: Tensor) -> Tensor:
        """Return rows of the weight, expanded."""
        asked = self._request
        ids = rows.to(torch.int64).contiguous()
        out = torch.empty((len(ids), asked.columns), dtype=torch.float32)
        _native.gather_rows(self._native_weight(weight), ids.data_ptr(), len(ids), 1.0, out.data_ptr(), asked.columns)
        return out.to(self._dtype)


def packed_shape(rows: int, columns: int, dtype: DType) -> tuple[int, int]:
    """Return the shape of memory for a packed weight [rows, columns]; see native/gemm.hpp."""
    return -(-rows // _TILE) * _TILE, columns + columns % 2 if dtype is DType.BFLOAT16 else columns
