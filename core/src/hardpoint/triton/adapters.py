"""LoRA adapters over the Triton kernels: shapes of tiles, and the launches of a linear layer."""

from __future__ import annotations

import importlib
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from hardpoint.triton.dispatch import Launch
from hardpoint.triton.experts import most_tiles
from hardpoint.triton.launch import interpreter_is_on
from hardpoint.triton.tiles import padded

if TYPE_CHECKING:
    from torch import Tensor

    from hardpoint.interfaces.kernels import AdapterRows, AdapterWeights

_BLOCK_M = 16
"""Tokens of a tile: most adapters have few, whose matrices' bytes bound a product."""
_BLOCK_N = 64
_BLOCK_R = 16
_FEW_GROUPS = 64
"""As many lanes work together, so that fewer groups take no less."""


def _ranks(max_rank: int) -> int:
    return -(-max_rank // _BLOCK_R) * _BLOCK_R


def shrink_constants(columns: int, parts: int, max_rank: int, slots: int, itemsize: int) -> dict[str, int]:
    """Return the compile-time arguments of the first product."""
    return {
        "COLUMNS": columns,
        "PARTS": parts,
        "MAX_RANK": max_rank,
        "RANKS": _ranks(max_rank),
        "GROUPS_PAD": max(_FEW_GROUPS, padded(slots)),
        "BLOCK_M": _BLOCK_M,
        "BLOCK_R": _BLOCK_R,
        # float32 is multiplied without matrix units: small tiles, for registers.
        "BLOCK_K": 32 if itemsize == 4 else 128,
        "SINGLE": interpreter_is_on(),
        "num_warps": 4,
    }


def expand_constants(rows: int, parts: int, max_rank: int, slots: int) -> dict[str, int]:
    """Return the compile-time arguments of the second product."""
    return {
        "ROWS": rows,
        "PARTS": parts,
        "RANKS": _ranks(max_rank),
        "GROUPS_PAD": max(_FEW_GROUPS, padded(slots)),
        "BLOCK_M": _BLOCK_M,
        "BLOCK_N": _BLOCK_N,
        "BLOCK_R": _BLOCK_R,
        "num_warps": 4,
    }


def add_adapters(out: Tensor, x: Tensor, weights: AdapterWeights, rows: AdapterRows) -> None:
    """Do what `KernelSet.add_adapters` says, in two launches, whose grids follow from the numbers of tokens and adapters."""
    down, up, parts = weights.down, weights.up, len(weights.spans)
    slots, max_rank, outputs = up.shape
    groups, tokens = rows.slots.shape[0], rows.tokens.shape[0]
    tiles = most_tiles(tokens, groups, _BLOCK_M)
    sums = torch.empty((tokens, parts, _ranks(max_rank)), dtype=torch.float32, device=x.device)
    _shrink(down.shape[2], parts, max_rank, slots, x.element_size())(
        (tiles, parts, _ranks(max_rank) // _BLOCK_R),
        (x, down, sums, rows.tokens, rows.slots, rows.starts, weights.ranks, weights.scales),
        groups,
        x.stride(0),
        down.stride(0),
        weights.ranks.stride(0),
    )
    widest = max(end - first for first, end in weights.spans)
    spans = _spans(weights.spans, x.device)
    _expand(outputs, parts, max_rank, slots)(
        (tiles, parts, -(-widest // _BLOCK_N)),
        (sums, up, out, rows.tokens, rows.slots, rows.starts, weights.ranks, spans),
        groups,
        out.stride(0),
        up.stride(0),
        weights.ranks.stride(0),
    )


@cache
def _shrink(*shape: int) -> Launch:
    return Launch(_kernels().adapter_shrink, shrink_constants(*shape))


@cache
def _expand(*shape: int) -> Launch:
    return Launch(_kernels().adapter_expand, expand_constants(*shape))


def _kernels() -> Any:
    return importlib.import_module("hardpoint.triton.adapter_kernels")


@cache
def _spans(spans: tuple[tuple[int, int], ...], device: torch.device) -> Tensor:
    return torch.tensor(spans, dtype=torch.int32, device=device)
