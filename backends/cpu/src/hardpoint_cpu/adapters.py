"""What LoRA adapters add to the products of linear layers on the host, natively."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hardpoint.interfaces import AdapterRows, AdapterWeights
from hardpoint_cpu import _native
from hardpoint_cpu.decoder import DTYPE_CODES, InvalidOperand, native_adapters

if TYPE_CHECKING:
    from torch import Tensor


def add_adapters(out: Tensor, x: Tensor, weights: AdapterWeights, rows: AdapterRows) -> None:
    """Do what `KernelSet.add_adapters` says; a row's result is the same, bit for bit, whatever the batch and the number of threads."""
    down, up = weights.down, weights.up
    parts, (_, max_rank, outputs) = len(weights.spans), up.shape
    same = all(one.dtype is x.dtype and one.stride(-1) == 1 for one in (out, x, down, up)) and x.dtype in DTYPE_CODES
    shapes = out.shape == (len(x), outputs) and down.shape[1:] == (parts * max_rank, x.shape[-1])
    packed = down.stride(1) == down.shape[2] and up.stride(1) == outputs
    if not (same and shapes and packed):
        raise InvalidOperand(
            f"out is [{len(x)}, {outputs}], x [T, {down.shape[-1]}], and the adapters are packed, all of one dtype",
            found=f"{list(out.shape)} of {out.dtype}, {list(x.shape)} of {x.dtype}, {list(down.shape)} of {down.dtype}",
        )
    _native.add_adapters(
        native_adapters(weights),
        x.data_ptr(),
        x.stride(0),
        out.data_ptr(),
        out.stride(0),
        rows.tokens.data_ptr(),
        rows.slots.data_ptr(),
        rows.starts.data_ptr(),
        len(rows.groups),
    )
