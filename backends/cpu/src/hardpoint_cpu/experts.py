"""The experts of a mixture on the host: weights in the tiles that the native kernels read, packed as they are stored."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hardpoint.interfaces import ExpertsProgram, ExpertsRequest
from hardpoint_cpu import _native
from hardpoint_cpu.decoder import ACTIVATION_CODES, DTYPE_CODES, InvalidOperand
from hardpoint_cpu.linear import packed_shape

if TYPE_CHECKING:
    from torch import Tensor


class CpuExperts(ExpertsProgram):
    """Native experts. A token's output is the same, bit for bit, whatever the batch and the number of threads."""

    def __init__(self, request: ExpertsRequest) -> None:
        super().__init__(request)
        self._dtype = request.dtype.to_torch()
        self._code = DTYPE_CODES[self._dtype]

    def weight_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of the packed weights: tiles of 16 columns, those of gate and up in turn."""
        asked = self._request
        columns = _native.gated_columns(asked.intermediate_size)
        return (
            (asked.num_experts, *packed_shape(columns, asked.hidden_size, asked.dtype)),
            (asked.num_experts, *packed_shape(asked.hidden_size, asked.intermediate_size, asked.dtype)),
        )

    def stores_plainly(self) -> bool:
        """Return False: what is stored is packed."""
        return False

    def write_gate_up(self, stored: Tensor, row: int, values: Tensor) -> None:
        """Pack rows of gates and ups, counted over all experts."""
        inner = self._request.intermediate_size
        source = values.to(device="cpu", dtype=self._dtype).contiguous()
        done = 0
        while done < len(source):
            half, first = divmod(row + done, inner)
            count = min(inner - first, len(source) - done)
            self._pack(source[done : done + count], stored[half // 2], first, half % 2, 2)
            done += count

    def write_down(self, stored: Tensor, row: int, values: Tensor) -> None:
        """Pack rows, counted over all experts."""
        hidden = self._request.hidden_size
        source = values.to(device="cpu", dtype=self._dtype).contiguous()
        done = 0
        while done < len(source):
            expert, first = divmod(row + done, hidden)
            count = min(hidden - first, len(source) - done)
            self._pack(source[done : done + count], stored[expert], first, 0, 1)
            done += count

    def run(
        self,
        x: Tensor,
        logits: Tensor,
        gate_up: Tensor,
        down: Tensor,
        gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
    ) -> Tensor:
        """Return the weighted sum of each token's experts; raises InvalidOperand for tensors that are not as the request said."""
        asked, tokens = self._request, len(x)
        given = {
            "x": (x, (tokens, asked.hidden_size)),
            "logits": (logits, (tokens, asked.num_experts)),
            "gate_up": (gate_up, self.weight_shapes()[0]),
            "down": (down, self.weight_shapes()[1]),
            "gate_up_bias": (gate_up_bias, (asked.num_experts, 2 * asked.intermediate_size)),
            "down_bias": (down_bias, (asked.num_experts, asked.hidden_size)),
        }
        for name, (tensor, shape) in given.items():
            if tensor is not None:
                self._check(name, tensor, shape)
        chosen = torch.empty((tokens, asked.top_k), dtype=torch.int32)
        shares = torch.empty((tokens, asked.top_k), dtype=torch.float32)
        _native.route(
            logits.data_ptr(),
            logits.stride(0),
            tokens,
            asked.num_experts,
            DTYPE_CODES[logits.dtype],
            asked.top_k,
            asked.renormalise,
            chosen.data_ptr(),
            shares.data_ptr(),
        )
        size = _native.experts_workspace_bytes(
            tokens=tokens,
            top_k=asked.top_k,
            num_experts=asked.num_experts,
            hidden=asked.hidden_size,
            intermediate=asked.intermediate_size,
        )
        workspace = torch.empty(size, dtype=torch.uint8)
        out = torch.empty((tokens, asked.hidden_size), dtype=self._dtype)
        _native.experts(
            dtype=self._code,
            num_experts=asked.num_experts,
            hidden=asked.hidden_size,
            intermediate=asked.intermediate_size,
            activation=ACTIVATION_CODES[asked.activation],
            gate_up=gate_up.data_ptr(),
            down=down.data_ptr(),
            gate_up_bias=0 if gate_up_bias is None else gate_up_bias.data_ptr(),
            down_bias=0 if down_bias is None else down_bias.data_ptr(),
            x=x.data_ptr(),
            x_stride=x.stride(0),
            tokens=tokens,
            top_k=asked.top_k,
            experts=chosen.data_ptr(),
            weights=shares.data_ptr(),
            out=out.data_ptr(),
            out_stride=asked.hidden_size,
            workspace=workspace.data_ptr(),
            workspace_bytes=size,
        )
        return out

    def _pack(self, source: Tensor, tiles: Tensor, first_row: int, first_tile: int, step: int) -> None:
        rows, width = source.shape
        _native.pack_weight(
            source.data_ptr(), width, rows, width, self._code, first_row, first_tile, step, tiles.data_ptr()
        )

    def _check(self, name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
        inner = tensor.stride(-1) == 1 or tensor.shape[-1] == 1
        whole = tensor.is_contiguous() or name in ("x", "logits")
        is_of_dtype = tensor.dtype is self._dtype or (name == "logits" and tensor.dtype is torch.float32)
        good = tuple(tensor.shape) == shape and is_of_dtype and tensor.device.type == "cpu"
        if not (good and inner and whole):
            raise InvalidOperand(
                f"{name} of the experts is {list(shape)} of {self._dtype} on the host, contiguous",
                found=f"{list(tensor.shape)} of {tensor.dtype}, strides {tensor.stride()}, on {tensor.device}",
            )
