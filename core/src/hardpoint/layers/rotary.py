"""Rotary position embedding (RoFormer, arXiv:2104.09864) by tables of cosines and sines."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from hardpoint.layers.context import ModelContext
    from hardpoint.layers.rope import Rope


class RotaryEmbedding(nn.Module):
    """One rotary table, shared by the layers that rotate alike. Halves of a head are rotated (`rotate_half`).

    Attributes:
        sections: how many angles turn with each axis, where positions have several (arXiv:2409.12191); empty where they have one.

    Its buffers are float32[max_context, rotary_dim / 2]; `fill` computes them once they have memory.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, rope: Rope, context: ModelContext) -> None:
        super().__init__()
        self.rope = rope
        self.sections: tuple[int, ...] = ()
        self._operators = context.operators
        for name in ("cos", "sin"):
            table = torch.empty((context.max_context, rope.rotary_dim // 2), dtype=torch.float32, device="meta")
            self.register_buffer(name, table, persistent=False)

    def fill(self) -> None:
        """Compute the table."""
        cos, sin = self.rope.table(len(self.cos))
        self.cos.copy_(cos)
        self.sin.copy_(sin)

    def forward(self, q: Tensor, k: Tensor, positions: Tensor) -> None:
        """Rotate q [T, heads, dim] and k [T, kv_heads, dim] in place for positions int64[T], or int64[axes, T] where there are sections."""
        cos, sin = self.cos, self.sin
        if positions.ndim > 1:
            cos, sin = (self._of_axes(table, positions) for table in (cos, sin))
            positions = torch.arange(len(q), device=q.device)
        self._operators.rotary(q, k, positions, cos, sin)

    def _of_axes(self, table: Tensor, positions: Tensor) -> Tensor:
        """Return the rows of a table for positions of several axes, float32[T, rotary_dim / 2]."""
        parts = torch.split(table, list(self.sections), dim=-1)
        return torch.cat([part[places] for part, places in zip(parts, positions, strict=True)], dim=-1)
