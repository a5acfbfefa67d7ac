"""Weights in quantised blocks, multiplied as they are stored by a program of the kernel set."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from hardpoint.interfaces.errors import CorruptWeights, ModelError
from hardpoint.quantization.base import LinearMethod

if TYPE_CHECKING:
    from torch import Tensor, nn

    from hardpoint.interfaces.blocks import BlockFormat
    from hardpoint.interfaces.kernels import Activation, LinearProgram


class Blocks(LinearMethod):
    """One layer's weight in blocks of a format.

    Args:
        program: stores and multiplies; None where a program for the whole model does, which takes the blocks as files have them.
    """

    verbatim = False

    def __init__(self, format: BlockFormat, program: LinearProgram | None) -> None:
        self.format, self._program = format, program

    def create(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        shape = (rows, self.format.row_bytes(columns)) if self._program is None else self._program.weight_shape()
        return torch.empty(shape, dtype=torch.uint8, device="meta")

    def write(self, stored: Tensor, row: int, values: Tensor) -> None:
        """Store rows: blocks as they are, uint8, or floating values, which are rounded to the nearest in blocks of the format."""
        blocks = values if values.dtype is torch.uint8 else encoded(values, self.format)
        if self._program is None:
            # By this thread alone: torch would share the copy with a team of threads, and each of those that load weights has its own.
            np.copyto(stored[row : row + len(blocks)].numpy(), blocks.numpy())
        else:
            self._program.write(stored, row, blocks)

    def multiply(self, layer: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
        return self._running().run(x, cast("Tensor", layer.weight), bias)

    def multiply_activated(
        self, layer: nn.Module, x: Tensor, bias: Tensor | None, activation: Activation
    ) -> Tensor | None:
        return self._running().run_activated(x, cast("Tensor", layer.weight), bias, activation)

    def gather(self, weight: Tensor, rows: Tensor) -> Tensor:
        """Return rows of the weight in the activations' dtype."""
        return self._running().gather(weight, rows)

    def _running(self) -> LinearProgram:
        assert self._program is not None
        return self._program


def encoded(values: Tensor, format: BlockFormat) -> Tensor:
    """Return rows in blocks of a format, uint8, each number rounded to the nearest: of ggml's formats as ggml does it.

    Raises:
        CorruptWeights: values are not finite, or so large that scales are not.
        ModelError: the format has no rounding here.
    """
    from hardpoint import _native
    from hardpoint.interfaces.blocks import BlockFormat

    plain = values.detach().to(device="cpu", dtype=torch.float32).contiguous()
    if not bool(plain.isfinite().all()):
        raise CorruptWeights(
            "weights that are to be quantised have values that are not finite", found="NaN or infinity"
        )
    if format in (BlockFormat.INT4, BlockFormat.INT4_128, BlockFormat.INT8, BlockFormat.INT8_128):
        return _integers(plain.view(len(plain), -1, format.elements), 4 if format.startswith("INT4") else 8)
    blocks = torch.empty((*plain.shape[:-1], format.row_bytes(plain.shape[-1])), dtype=torch.uint8)
    known = _native.gguf_block(format.type_id) is not None
    if not known or not _native.round_to_gguf(format.type_id, plain.numpy(), blocks.numpy()):
        raise ModelError(
            f"floating weights cannot be written into weights in blocks of {format}",
            found="the format has no rounding here",
            hint="Load the model with quantization='none' to change its weights",
        )
    if not _native.gguf_is_finite(format.type_id, blocks.numpy()):
        raise CorruptWeights(
            f"weights that are to be quantised are too large for scales of {format} in binary16",
            found=f"values up to {float(plain.abs().max()):.3g}",
            hint="Run them with quantization='none'",
        )
    return blocks


def _integers(groups: Tensor, bits: int) -> Tensor:
    """Return groups [n, count, size] in blocks of scale and zero point, uint8[n, count * bytes of a block]; see `BlockFormat`.

    Numbers of 4 bits span a group's values from the least, or zero, to the greatest, or zero, so that zero stays zero. Those of 8 bits span
    the greatest magnitude to both sides.
    """
    if bits == 4:
        low, high = groups.amin(-1, keepdim=True).clamp(max=0), groups.amax(-1, keepdim=True).clamp(min=0)
        # Halves, since the whole of the span may be beyond float32.
        scales = (high / 2 - low / 2) / 7.5
        zeros = torch.where(scales > 0, (-low / scales).round(), 0.0)
    else:
        scales = groups.abs().amax(-1, keepdim=True) / 127
        zeros = torch.full_like(scales, 128)
    numbers = (
        torch.where(scales > 0, groups / scales, 0.0).round_().add_(zeros).clamp_(0, (1 << bits) - 1).to(torch.uint8)
    )
    if bits == 4:
        numbers = numbers.view(*numbers.shape[:2], -1, 2, 16)
        numbers = (numbers[..., 0, :] | numbers[..., 1, :] << 4).flatten(-2)
    heads = (scales.view(torch.uint8), zeros.to(torch.int16).view(torch.uint8))
    return torch.cat((*heads, numbers), dim=-1).flatten(1)
