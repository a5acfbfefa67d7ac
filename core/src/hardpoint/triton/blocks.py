"""Weights in blocks over the Triton kernels: the layout they are repacked to when they are stored, and the launches of a product.

Repacking is torch's, on whatever device the blocks are. Numbers of 4 bits stay so, those of 5 and 6 take a byte; scales stay exact.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from hardpoint.interfaces.blocks import BlockFormat
from hardpoint.interfaces.errors import HardpointError
from hardpoint.interfaces.kernels import LinearProgram, LinearRequest
from hardpoint.triton.dispatch import Launch
from hardpoint.triton.launch import interpreter_is_on

if TYPE_CHECKING:
    from torch import Tensor

_TILE_M = 16
_ROWS_PAD = 64
"""Stored rows are a multiple of it, so that no tile of rows needs a mask."""
_MANY_TOKENS = 64
"""From so many on a program expands for four tiles of tokens; below it, weights' bytes bound a product, and splits read them together."""
_PROGRAMS = 512
"""Programs of a product with few tokens, about: two to five on each unit of a large device."""
_MAX_SPLITS = 16
_MIN_GROUPS = 8
"""Groups of a split, at least."""
_SUM_BLOCK = 512
_ALIGNMENT = 16


class InvalidBlocks(HardpointError, ValueError):
    """A tensor is not what a weight in blocks, or its activations, must be."""


class Offset(IntEnum):
    """What is subtracted: nothing, a minimum from the scaled number, or a zero point from the number."""

    NONE = 0
    MINIMUM = 1
    ZERO_POINT = 2


@dataclass(frozen=True)
class BlockLayout:
    """How a format's numbers are stored on a device.

    Attributes:
        bits: of a number. Those of 8 bits are signed.
        scale: the dtype of a block's scale, and of its minimum.
        offset: what is subtracted.
        middle: what is taken from a number of 4 bits before all else.
        group: elements with one scale.
        in_block: groups that share a block's scale.
        factored: each group has factors of 8 bits to the block's scale, and to its minimum.
        float8: the numbers are e4m3.
    """

    bits: int
    scale: torch.dtype
    offset: Offset = Offset.NONE
    middle: int = 0
    group: int = 32
    in_block: int = 1
    factored: bool = False
    float8: bool = False

    def sections(self, rows: int, columns: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Return (dtype, shape) of the parts of a weight, in their order in memory, each from a multiple of 16 bytes on."""
        groups, padded = columns // self.group, -(-rows // _ROWS_PAD) * _ROWS_PAD
        found: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
            "numbers": (torch.uint8, (groups, padded, self.group * self.bits // 8)),
            "block_scales": (self.scale, (groups // self.in_block, padded)),
        }
        if self.offset is not Offset.NONE:
            kind = torch.int16 if self.offset is Offset.ZERO_POINT else self.scale
            found["offsets"] = (kind, (groups // self.in_block, padded))
        if self.factored:
            found["factors"] = (torch.int8, (groups, padded))
            if self.offset is not Offset.NONE:
                found["lowers"] = (torch.int8, (groups, padded))
        return found


_HALF, _SINGLE = torch.float16, torch.float32
LAYOUTS = {
    BlockFormat.Q4_0: BlockLayout(4, _HALF, middle=8),
    BlockFormat.Q4_1: BlockLayout(4, _HALF, Offset.MINIMUM),
    BlockFormat.Q5_0: BlockLayout(8, _HALF),
    BlockFormat.Q5_1: BlockLayout(8, _HALF, Offset.MINIMUM),
    BlockFormat.Q8_0: BlockLayout(8, _HALF),
    BlockFormat.Q4_K: BlockLayout(4, _HALF, Offset.MINIMUM, in_block=8, factored=True),
    BlockFormat.Q5_K: BlockLayout(8, _HALF, Offset.MINIMUM, in_block=8, factored=True),
    BlockFormat.Q6_K: BlockLayout(8, _HALF, group=16, in_block=16, factored=True),
    BlockFormat.INT4: BlockLayout(4, _SINGLE, Offset.ZERO_POINT),
    BlockFormat.INT4_128: BlockLayout(4, _SINGLE, Offset.ZERO_POINT, in_block=4),
    BlockFormat.INT8: BlockLayout(8, _SINGLE, Offset.ZERO_POINT),
    BlockFormat.INT8_128: BlockLayout(8, _SINGLE, Offset.ZERO_POINT, in_block=4),
    BlockFormat.FP8: BlockLayout(8, _SINGLE, float8=True),
}
"""The formats that are multiplied by as they are stored."""


class TritonBlockLinear(LinearProgram):
    """A linear layer over a weight in blocks: one launch for many tokens, two for few."""

    def __init__(self, request: LinearRequest) -> None:
        super().__init__(request)
        assert request.blocks is not None
        self._format, self._layout = request.blocks, LAYOUTS[request.blocks]
        self._dtype = request.dtype.to_torch()
        self._sections = self._layout.sections(request.rows, request.columns)
        self._sizes = [_aligned(dtype.itemsize * prod(shape)) for dtype, shape in self._sections.values()]
        kernels: Any = importlib.import_module("hardpoint.triton.block_kernels")
        self._product = cache(
            lambda tokens, biased: Launch(kernels.block_product, product_constants(request, tokens, biased=biased))
        )
        self._sum = cache(lambda biased: Launch(kernels.sum_splits, sum_constants(request, biased=biased)))

    def weight_shape(self) -> tuple[int, ...]:
        """Return [1, bytes of all parts]."""
        return 1, sum(self._sizes)

    def write(self, stored: Tensor, row: int, values: Tensor) -> None:
        """Repack rows of blocks from `row` on; raises InvalidBlocks."""
        width = self._format.row_bytes(self._request.columns)
        if values.dtype is not torch.uint8 or values.shape[1:] != (width,):
            raise InvalidBlocks(
                f"rows of {self._request.columns} in blocks of {self._format} are uint8[n, {width}]",
                found=f"{list(values.shape)} of {values.dtype}",
            )
        blocks = values.to(stored.device).reshape(len(values), -1, self._format.nbytes)
        parts, unpacked = self._parts(stored), _unpacked(self._format, blocks)
        for name, part in parts.items():
            # [n, groups, ...] as [groups, n, ...].
            part[:, row : row + len(values)] = unpacked[name].transpose(0, 1)

    def run(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return `x @ weight.T + bias`; raises InvalidBlocks for tensors that are not as the request said."""
        asked = self._request
        shape = x.shape
        if shape[-1] != asked.columns or x.dtype is not self._dtype or weight.shape != self.weight_shape():
            raise InvalidBlocks(
                f"x is [..., {asked.columns}] of {self._dtype}, the stored weight {list(self.weight_shape())}",
                found=f"x {list(x.shape)} of {x.dtype}, weight {list(weight.shape)}",
            )
        rows = x.reshape(-1, asked.columns)
        rows = rows if rows.stride(-1) == 1 else rows.contiguous()
        tokens = rows.shape[0]
        out = x.new_empty(tokens, asked.rows)
        if tokens:
            self._launch(rows, weight, bias, out)
        return out if len(shape) == 2 else out.view(*shape[:-1], asked.rows)

    def gather(self, weight: Tensor, rows: Tensor) -> Tensor:
        """Return rows of the weight, expanded, [n, columns]."""
        layout = self._layout
        part = {name: values[:, rows] for name, values in self._parts(weight).items()}
        bits = part["numbers"]
        if layout.float8:
            numbers = bits.view(torch.float8_e4m3fn).float()
        elif layout.bits == 4:
            numbers = torch.cat((bits & 15, bits >> 4), -1).float() - layout.middle
        else:
            numbers = bits.view(torch.int8).float()

        def of_groups(name: str, factors: str) -> Tensor:
            values = part[name].float().repeat_interleave(layout.in_block, dim=0)
            return (values * part[factors] if layout.factored else values)[..., None]

        if layout.offset is Offset.ZERO_POINT:
            numbers = numbers - of_groups("offsets", "lowers")
        numbers = numbers * of_groups("block_scales", "factors")
        if layout.offset is Offset.MINIMUM:
            numbers = numbers - of_groups("offsets", "lowers")
        return numbers.transpose(0, 1).reshape(len(rows), -1).to(self._dtype)

    def _launch(self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
        asked, tokens = self._request, x.shape[0]
        # Kernels take where a part begins and its dtype, and know its shape.
        memory = weight.split_with_sizes(self._sizes, 1)
        parts = {
            name: part.view(dtype) for part, (name, (dtype, _)) in zip(memory, self._sections.items(), strict=True)
        }
        # What is compiled in depends on whether there are many.
        product = self._product(min(tokens, _MANY_TOKENS) // _MANY_TOKENS * _MANY_TOKENS, bias is not None)
        constants = product.constants
        splits, shared = constants["SPLITS"], constants["SHARED"]
        numbers = parts["numbers"]
        sums = out
        if shared:
            sums = torch.empty((splits, tokens, asked.rows), dtype=torch.float32, device=x.device)
        tiles = -(-tokens // (_TILE_M * constants["TILES"]))
        # A part that the format has not is not read, but the kernel takes a tensor.
        factors, lowers, offsets = (parts.get(name, numbers) for name in ("factors", "lowers", "offsets"))
        added = out if bias is None else bias
        product(
            (constants["ROWS_PAD"] // constants["BLOCK_N"], splits if shared else 1, tiles),
            (x, numbers, factors, lowers, parts["block_scales"], offsets, added, out, sums),
            x.stride(0),
            tokens,
        )
        if shared:
            launch = self._sum(bias is not None)
            launch((-(-asked.rows // launch.constants["BLOCK"]), tokens, 1), (sums, added, out), tokens)

    def _parts(self, stored: Tensor) -> dict[str, Tensor]:
        memory, found, begin = stored.view(-1), {}, 0
        for size, (name, (dtype, shape)) in zip(self._sizes, self._sections.items(), strict=True):
            found[name] = memory[begin : begin + dtype.itemsize * prod(shape)].view(dtype).view(shape)
            begin += size
        return found


def split_count(rows: int, columns: int, group: int) -> int:
    """Return how many programs share the columns of a product with few tokens: by the weight alone, so that sums have one order."""
    wanted = _PROGRAMS // -(-rows // _ROWS_PAD)
    return max(1, min(_MAX_SPLITS, wanted, columns // group // _MIN_GROUPS))


def product_constants(request: LinearRequest, tokens: int, *, biased: bool) -> dict[str, int]:
    """Return the compile-time arguments of a product of `tokens` rows."""
    assert request.blocks is not None
    layout = LAYOUTS[request.blocks]
    groups = request.columns // layout.group
    splits = split_count(request.rows, request.columns, layout.group)
    many = tokens >= _MANY_TOKENS
    return {
        "ROWS": request.rows,
        "ROWS_PAD": -(-request.rows // _ROWS_PAD) * _ROWS_PAD,
        "GROUPS": groups,
        "BITS": layout.bits,
        "FLOAT8": layout.float8,
        "GROUP": layout.group,
        "IN_BLOCK": layout.in_block,
        "FACTORED": layout.factored,
        "OFFSET": int(layout.offset),
        "MIDDLE": layout.middle,
        "SPLITS": splits,
        "SPLIT_GROUPS": -(-groups // splits),
        "TILES": 4 if many else 1,
        "SHARED": splits > 1 and not many,
        "BIASED": biased,
        # Sums of four tiles of tokens take registers, and so does float32, which is multiplied without matrix units.
        "BLOCK_N": 32 if many or request.dtype.itemsize == 4 else _ROWS_PAD,
        "SINGLE": interpreter_is_on(),
        "num_warps": 4,
        "num_stages": 2 if many or request.dtype.itemsize == 4 else 4,
    }


def sum_constants(request: LinearRequest, *, biased: bool) -> dict[str, int]:
    """Return the compile-time arguments of the sum of splits."""
    constants = product_constants(request, 1, biased=biased)
    return {
        "ROWS": request.rows,
        "SPLITS": constants["SPLITS"],
        "BIASED": biased,
        "BLOCK": _SUM_BLOCK,
        "num_warps": 4,
    }


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _unpacked(format: BlockFormat, blocks: Tensor) -> dict[str, Tensor]:
    """Return the parts of blocks uint8[n, count, bytes], each [n, groups, ...] or [n, blocks]; see `BlockFormat` for where they are."""
    layout = LAYOUTS[format]

    def values(at: int, dtype: torch.dtype) -> Tensor:
        return blocks[..., at : at + dtype.itemsize].contiguous().view(dtype)[..., 0]

    if layout.scale is _SINGLE:
        found = {"block_scales": values(0, _SINGLE)}
        if layout.float8:
            return found | {"numbers": blocks[..., 4:]}
        zeros = values(4, torch.int16)
        numbers = blocks[..., 6:].reshape(len(blocks), -1, layout.group * layout.bits // 8)
        # Numbers of 8 bits become signed, and their zero points with them.
        return found | (
            {"offsets": zeros, "numbers": numbers}
            if layout.bits == 4
            else {"offsets": zeros - 128, "numbers": numbers ^ 128}
        )
    if layout.in_block == 1:
        return _blocks_of_32(format, blocks, values)
    if format is BlockFormat.Q6_K:
        return _q6_k(blocks, values)
    return _k_with_minima(format, blocks, values)


def _blocks_of_32(format: BlockFormat, blocks: Tensor, values: Any) -> dict[str, Tensor]:
    found = {"block_scales": values(0, _HALF)}
    if format is BlockFormat.Q8_0:
        return found | {"numbers": blocks[..., 2:]}
    at = 2
    if LAYOUTS[format].offset is Offset.MINIMUM:
        # ggml adds these minima, and subtracts those of the formats of 256.
        found["offsets"], at = -values(2, _HALF), 4
    if format in (BlockFormat.Q4_0, BlockFormat.Q4_1):
        return found | {"numbers": blocks[..., at:]}
    places = torch.arange(32, device=blocks.device)
    high = blocks[..., at : at + 4].repeat_interleave(8, dim=-1) >> (places % 8) & 1
    numbers = _halves(blocks[..., at + 4 :]) | high << 4
    return found | {"numbers": _signed(numbers, 16 if format is BlockFormat.Q5_0 else 0)}


def _k_with_minima(format: BlockFormat, blocks: Tensor, values: Any) -> dict[str, Tensor]:
    """Return the parts of Q4_K and Q5_K: 8 groups of 32, whose factors of 6 bits take 12 bytes."""
    packed = blocks[..., 4:16]
    first, second, third = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    factors = torch.cat((first & 63, third & 15 | first >> 6 << 4), -1)
    lowers = torch.cat((second & 63, third >> 4 | second >> 6 << 4), -1)
    found = {
        "block_scales": values(0, _HALF),
        "offsets": values(2, _HALF),
        "factors": factors.flatten(1).view(torch.int8),
        "lowers": lowers.flatten(1).view(torch.int8),
    }
    # 32 bytes have one group in their low halves, and the next in their high ones.
    chunks = blocks[..., -128:].reshape(*blocks.shape[:2], 4, 1, 32)
    numbers = torch.cat((chunks & 15, chunks >> 4), -2).reshape(*blocks.shape[:2], 8, 32)
    if format is BlockFormat.Q4_K:
        numbers = numbers[..., :16] | numbers[..., 16:] << 4
    else:
        groups = torch.arange(8, device=blocks.device)[:, None]
        numbers = numbers | (blocks[..., None, 16:48] >> groups & 1) << 4
    return found | {"numbers": numbers.to(torch.uint8).flatten(1, 2)}


def _q6_k(blocks: Tensor, values: Any) -> dict[str, Tensor]:
    """Return the parts of Q6_K: 16 groups of 16; each half of them has 64 bytes of low bits, and 32 of high bits of 4 numbers each."""
    low = blocks[..., :128].reshape(*blocks.shape[:2], 2, 1, 64)
    low = torch.cat((low & 15, low >> 4), -2).flatten(-2)
    places = torch.arange(0, 8, 2, device=blocks.device)[:, None]
    high = (blocks[..., 128:192].reshape(*blocks.shape[:2], 2, 1, 32) >> places & 3).flatten(-2)
    numbers = _signed((low | high << 4).reshape(*blocks.shape[:2], 16, 16), 32)
    factors = blocks[..., 192:208].flatten(1).view(torch.int8)
    return {"block_scales": values(208, _HALF), "factors": factors, "numbers": numbers.flatten(1, 2)}


def _halves(numbers: Tensor) -> Tensor:
    return torch.cat((numbers & 15, numbers >> 4), -1)


def _signed(numbers: Tensor, middle: int) -> Tensor:
    """Return numbers less `middle` as bytes."""
    return (numbers.to(torch.int8) - middle).view(torch.uint8)
