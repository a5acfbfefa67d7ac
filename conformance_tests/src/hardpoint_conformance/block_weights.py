"""Seeded weights in quantised blocks, and what they mean by the formats' definitions, in float64."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hardpoint.interfaces import BlockFormat

HALVES = {
    BlockFormat.Q4_0: (0,),
    BlockFormat.Q4_1: (0, 2),
    BlockFormat.Q5_0: (0,),
    BlockFormat.Q5_1: (0, 2),
    BlockFormat.Q8_0: (0,),
    BlockFormat.Q2_K: (80, 82),
    BlockFormat.Q3_K: (108,),
    BlockFormat.Q4_K: (0, 2),
    BlockFormat.Q5_K: (0, 2),
    BlockFormat.Q6_K: (208,),
}
"""Where blocks of ggml's formats have a scale in binary16, and a minimum."""
ZERO_POINTS = (BlockFormat.INT4, BlockFormat.INT4_128, BlockFormat.INT8, BlockFormat.INT8_128)


@dataclass(frozen=True)
class BlockMatrix:
    """A matrix in blocks.

    Attributes:
        raw: uint8[rows, bytes of a row], as `BlockFormat` says.
        values: what it means, float64[rows, columns].
    """

    raw: Tensor
    values: Tensor


def block_matrix(format: BlockFormat, rows: int, columns: int, rng: np.random.Generator) -> BlockMatrix:
    """Return a matrix of random numbers whose blocks have unlike scales, minima and zero points."""
    shape = (rows, columns // format.elements)
    raw = rng.integers(0, 256, (*shape, format.nbytes), dtype=np.uint8)
    if format is BlockFormat.FP8:
        values = _of_float8(raw, rng)
    elif format in ZERO_POINTS:
        values = _with_zero_points(format, raw, rng)
    else:
        for place, at in enumerate(HALVES[format]):
            # Minima as large as scales would lie outside of the numbers' range.
            sizes = rng.uniform(0.01, 0.03, shape) * (1 if place == 0 else 4)
            raw[..., at : at + 2] = sizes.astype(np.float16)[..., None].view(np.uint8)
        values = _by_ggml(format, raw)
    return BlockMatrix(torch.from_numpy(raw.reshape(rows, -1)), torch.from_numpy(values.reshape(rows, columns)))


def _by_ggml(format: BlockFormat, raw: np.ndarray) -> np.ndarray:
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    found: np.ndarray = dequantize(raw.reshape(len(raw), -1), GGMLQuantizationType(format.type_id))
    return found.astype(np.float64)


def _with_zero_points(format: BlockFormat, raw: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Write scales and zero points into blocks, and return what they mean."""
    bits = 4 if format in (BlockFormat.INT4, BlockFormat.INT4_128) else 8
    most = (1 << bits) - 1
    scales = rng.uniform(0.01, 0.03, raw.shape[:2]).astype(np.float32)[..., None]
    zeros = rng.integers(0, most + 2, raw.shape[:2]).astype(np.int16)[..., None]
    raw[..., :4], raw[..., 4:6] = scales.view(np.uint8), zeros.view(np.uint8)
    numbers = raw[..., 6:]
    if bits == 4:
        pairs = numbers.reshape(*raw.shape[:2], -1, 16)
        numbers = np.concatenate([pairs & 15, pairs >> 4], axis=-1).reshape(*raw.shape[:2], -1)
    return scales.astype(np.float64) * (numbers.astype(np.float64) - zeros)


def _of_float8(raw: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Write scales into blocks, and numbers in the place of NaN, and return what they mean."""
    numbers = raw[..., 4:]
    numbers[(numbers & 127) == 127] ^= 1
    scales = rng.uniform(0.0003, 0.001, raw.shape[:2]).astype(np.float32)[..., None]
    raw[..., :4] = scales.view(np.uint8)
    # 1 sign bit, 4 of the exponent, whose bias is 7, and 3 of the mantissa; the exponent 0 is of subnormal numbers.
    exponents, mantissas = (numbers >> 3 & 15).astype(np.int32), (numbers & 7).astype(np.float64)
    sizes = np.where(exponents == 0, mantissas / 8 * 2.0**-6, (1 + mantissas / 8) * 2.0 ** (exponents - 7))
    values: np.ndarray = scales.astype(np.float64) * np.where(numbers & 128, -sizes, sizes)
    return values
