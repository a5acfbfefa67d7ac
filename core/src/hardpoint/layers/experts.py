"""The experts of a mixture in plain torch, for kernel sets that have no operator for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from hardpoint.interfaces.kernels import Activation, ExpertsProgram

if TYPE_CHECKING:
    from torch import Tensor


_TILES_AT_ONCE = 16
"""Tiles whose experts' weights are copied side by side."""


class TorchExperts(ExpertsProgram):
    """Experts wherever torch runs.

    Rows (a token and one of its experts) are sorted by expert and each expert's filled up to whole tiles. As many tiles are computed as
    there could be, so that shapes follow from the number of tokens, and the host need not know what was chosen.
    """

    def run(
        self,
        x: Tensor,
        logits: Tensor,
        gate_up: Tensor,
        down: Tensor,
        gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
    ) -> Tensor:
        asked = self._request
        tokens, rows = len(x), len(x) * asked.top_k
        if not tokens:
            return torch.empty_like(x)
        shares, chosen = choose(logits, asked.top_k, asked.renormalise)
        tile = 16 if rows <= 16 * asked.num_experts else 64
        most = (rows + min(rows, asked.num_experts) * (tile - 1)) // tile

        experts, order = chosen.flatten().sort(stable=True)
        counts = torch.zeros(asked.num_experts, dtype=torch.int64, device=x.device)
        counts.scatter_add_(0, experts, torch.ones_like(experts))
        tiles = (counts + tile - 1) // tile
        tile_ends = tiles.cumsum(0)
        first_rows, first_tiles = counts.cumsum(0) - counts, tile_ends - tiles
        place = torch.arange(rows, device=x.device) - first_rows[experts] + first_tiles[experts] * tile
        # Tiles after the last one with rows count as the last expert's, and are read by nobody.
        tile_experts = torch.bucketize(torch.arange(most, device=x.device), tile_ends, right=True)
        tile_experts = tile_experts.clamp(max=asked.num_experts - 1)

        sorted_x = x.new_zeros((most * tile, asked.hidden_size))
        sorted_x.index_copy_(0, place, x[order // asked.top_k])
        sorted_tiles, outputs = sorted_x.view(most, tile, -1), []
        for first in range(0, most, _TILES_AT_ONCE):
            some = slice(first, first + _TILES_AT_ONCE)
            numbers = tile_experts[some]
            both = torch.bmm(sorted_tiles[some], gate_up[numbers].transpose(1, 2))
            if gate_up_bias is not None:
                both += gate_up_bias[numbers, None]
            y = torch.bmm(gated(both, asked.activation), down[numbers].transpose(1, 2))
            outputs.append(y if down_bias is None else y + down_bias[numbers, None])
        of_rows = torch.cat(outputs).view(most * tile, -1)[place].float()
        unsorted = torch.empty_like(of_rows).index_copy_(0, order, of_rows)
        return (unsorted.view(tokens, asked.top_k, -1) * shares[:, :, None]).sum(dim=1).to(x.dtype)


def choose(logits: Tensor, top_k: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    """Return (weights float32, experts int64), both [T, top_k]: the greatest logits, the lower number first of equal ones."""
    experts = logits.float().sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = torch.softmax(logits.float(), dim=-1).gather(1, experts)
    return (weights / weights.sum(dim=-1, keepdim=True) if renormalise else weights), experts


def gated(x: Tensor, activation: Activation) -> Tensor:
    """Return the gated activation of x [..., 2n], gate then up."""
    gate, up = x.chunk(2, dim=-1)
    if activation is Activation.CLAMPED_SWIGLU:
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
        return (up + 1) * gate * torch.sigmoid(1.702 * gate)
    if activation is Activation.SILU:
        return functional.silu(gate) * up
    return functional.gelu(gate, approximate="none" if activation is Activation.GELU else "tanh") * up
