"""The experts of a mixture over the Triton kernels: shapes of tiles, and the launches of a layer."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from hardpoint.interfaces.kernels import ExpertsProgram, ExpertsRequest
from hardpoint.triton.dispatch import Launch
from hardpoint.triton.launch import interpreter_is_on
from hardpoint.triton.operators import ACTIVATIONS
from hardpoint.triton.tiles import padded

if TYPE_CHECKING:
    from torch import Tensor

_CHUNK = 1024
"""Rows that sorting looks at together."""
_SUM_BLOCK = 1024
_FEW_ROWS = 16
"""Rows per expert up to which the weights' bytes bound a product, and not its operations."""


@dataclass(frozen=True)
class ExpertTiles:
    """Shape of a product: rows, columns and depth of a tile, and how it is launched."""

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int

    def constants(self) -> dict[str, int]:
        """Return the compile-time arguments and launch options."""
        return {
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
            "BLOCK_K": self.block_k,
            "num_warps": self.warps,
            "num_stages": self.stages,
        }


def expert_tiles(rows: int, num_experts: int, itemsize: int) -> ExpertTiles:
    """Return the shape of tiles for `rows` rows of `itemsize` bytes an element, spread over the experts.

    Few rows read each weight once, so tiles are deep, for many bytes in flight; many rows compute, so tiles are square. Each shape fits
    into 64 KiB of shared memory. float32 is multiplied without matrix units: small tiles, for registers.
    """
    if itemsize == 4:
        return ExpertTiles(16, 32, 32, 4, 1)
    if rows <= _FEW_ROWS * num_experts:
        return ExpertTiles(16, 32, 128, 4, 2)
    return ExpertTiles(64, 64, 32, 4, 3)


def most_tiles(rows: int, num_experts: int, block_m: int) -> int:
    """Return how many tiles there are at most: every expert with a row has less than one that is not full."""
    return (rows + min(rows, num_experts) * (block_m - 1)) // block_m


def route_constants(request: ExpertsRequest) -> dict[str, int]:
    """Return the compile-time arguments of routing."""
    return {
        "N": request.num_experts,
        "N_PAD": padded(request.num_experts),
        "TOP_K": request.top_k,
        "TOP_PAD": padded(request.top_k),
        "RENORMALISE": request.renormalise,
        "num_warps": 1,
    }


def sort_constants(num_experts: int, block_m: int) -> dict[str, int]:
    """Return the compile-time arguments of sorting; a histogram has at least as many bins as lanes work together."""
    return {
        "EXPERTS": num_experts,
        "EXPERTS_PAD": max(64, padded(num_experts)),
        "BLOCK_M": block_m,
        "CHUNK": _CHUNK,
        "num_warps": 4,
    }


def gate_up_constants(request: ExpertsRequest, tiles: ExpertTiles, biased: bool) -> dict[str, int]:
    """Return the compile-time arguments of the first product."""
    return {
        "TOP_K": request.top_k,
        "HIDDEN": request.hidden_size,
        "INNER": request.intermediate_size,
        "BIASED": biased,
        "ACTIVATION": ACTIVATIONS.index(request.activation),
        "SINGLE": interpreter_is_on(),
        **tiles.constants(),
    }


def down_constants(request: ExpertsRequest, tiles: ExpertTiles, biased: bool) -> dict[str, int]:
    """Return the compile-time arguments of the second product."""
    return {
        "HIDDEN": request.hidden_size,
        "INNER": request.intermediate_size,
        "BIASED": biased,
        "SINGLE": interpreter_is_on(),
        **tiles.constants(),
    }


def sum_constants(request: ExpertsRequest) -> dict[str, int]:
    """Return the compile-time arguments of the sum."""
    block = min(_SUM_BLOCK, padded(request.hidden_size))
    return {"TOP_K": request.top_k, "N": request.hidden_size, "BLOCK": block, "num_warps": 4}


class TritonExperts(ExpertsProgram):
    """Five launches, whose number and grids follow from the number of tokens."""

    def __init__(self, request: ExpertsRequest) -> None:
        super().__init__(request)
        kernels: Any = importlib.import_module("hardpoint.triton.expert_kernels")
        self._route = Launch(kernels.route, route_constants(request))
        self._sort = cache(lambda size: Launch(kernels.sort_rows, sort_constants(request.num_experts, size)))
        self._gate_up = cache(lambda *how: Launch(kernels.expert_gate_up, gate_up_constants(request, *how)))
        self._down = cache(lambda *how: Launch(kernels.expert_down, down_constants(request, *how)))
        self._sum = Launch(kernels.sum_rows, sum_constants(request))

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
        tokens = x.shape[0]
        rows = tokens * asked.top_k
        out = x.new_empty(tokens, asked.hidden_size)
        if not tokens:
            return out
        tiles = expert_tiles(rows, asked.num_experts, x.element_size())
        count = most_tiles(rows, asked.num_experts, tiles.block_m)

        def integers(size: int) -> Tensor:
            return torch.empty(size, dtype=torch.int32, device=x.device)

        chosen, sorted_rows, tile_experts = integers(rows), integers(count * tiles.block_m), integers(count)
        shares = torch.empty(rows, dtype=torch.float32, device=x.device)
        self._route((tokens, 1, 1), (logits, chosen, shares), logits.stride(0))
        self._sort(tiles.block_m)((asked.num_experts, 1, 1), (chosen, sorted_rows, tile_experts), rows, count)
        inner = x.new_empty(rows, asked.intermediate_size)
        # Without a bias the kernels read none, but take a tensor.
        bias = gate_up if gate_up_bias is None else gate_up_bias
        self._gate_up(tiles, gate_up_bias is not None)(
            (-(-asked.intermediate_size // tiles.block_n), count, 1),
            (x, gate_up, bias, inner, sorted_rows, tile_experts),
            x.stride(0),
            rows,
        )
        parts = x.new_empty(rows, asked.hidden_size)
        bias = down if down_bias is None else down_bias
        self._down(tiles, down_bias is not None)(
            (-(-asked.hidden_size // tiles.block_n), count, 1),
            (inner, down, bias, shares, parts, sorted_rows, tile_experts),
            rows,
        )
        self._sum((tokens, -(-asked.hidden_size // self._sum.constants["BLOCK"]), 1), (parts, out))
        return out
