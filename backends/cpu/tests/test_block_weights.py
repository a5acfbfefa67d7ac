"""Weights in quantised blocks, multiplied as they are stored, in every instruction set, against float64 of the expanded weights.

The bound of a result is what native/block_weight.hpp says of its arithmetic: half a step of 8 bits for each activation, relative to the
largest of its block that is no outlier of its row, and float32 sums of the blocks.
"""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from hardpoint.interfaces import BlockFormat, DType, LinearRequest
from hardpoint_cpu import _native
from hardpoint_cpu.decoder import InvalidOperand
from hardpoint_cpu.linear import BLOCK_FORMATS, CpuBlockLinear

FORMATS = sorted(BLOCK_FORMATS)
WITH_ZERO_POINTS = (BlockFormat.INT4, BlockFormat.INT4_128, BlockFormat.INT8, BlockFormat.INT8_128)
HALVES = {BlockFormat.Q4_K: (0, 2), BlockFormat.Q5_K: (0, 2), BlockFormat.Q6_K: (208,)}
"""Where blocks have scales and minima in binary16."""
NUMBERS = {BlockFormat.Q4_1: 4, BlockFormat.Q5_1: 4, BlockFormat.Q4_K: 16, BlockFormat.Q5_K: 48}
"""Where blocks of formats with minima have their numbers; Q5_K has the fifth bits before them."""
SILU_MUL, ARG_MAX = 2, 4


pytestmark = pytest.mark.usefixtures("isa")


def ggml(format: BlockFormat, n: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return blocks of one of ggml's formats, and what they mean and are made of, float64, by the `gguf` library."""
    rng = np.random.default_rng(n + k)
    kind = gguf.GGMLQuantizationType(format.type_id)

    def values_of(blocks: np.ndarray) -> np.ndarray:
        return gguf.dequantize(blocks.reshape(n, -1), kind).astype(np.float64)

    if format not in HALVES:
        raw = gguf.quantize(rng.normal(0.3, 1.0, (n, k)).astype(np.float32), kind).reshape(n, -1, format.nbytes)
    else:
        # All numbers, and all scales of 6 or 8 bits.
        raw = rng.integers(0, 256, (n, k // 256, format.nbytes), dtype=np.uint8)
        for at in HALVES[format]:
            raw[..., at : at + 2] = rng.normal(0.0, 0.01, (n, k // 256, 1)).astype(np.float16).view(np.uint8)
    values, sizes = values_of(raw), np.abs(values_of(raw))
    if format in NUMBERS:
        plain = raw.copy()
        plain[..., NUMBERS[format] :] = 0
        if format is BlockFormat.Q5_K:
            plain[..., 16:48] = 0
        sizes = np.abs(values - values_of(plain)) + np.abs(values_of(plain))
    return torch.from_numpy(raw.reshape(n, -1)), torch.from_numpy(values), torch.from_numpy(sizes)


def integers(format: BlockFormat, n: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return blocks with zero points, and what they mean and are made of, float64; all numbers, and the least and greatest zero points."""
    rng = np.random.default_rng(n + k)
    in_half_bytes, size = format.startswith("INT4"), format.elements
    most = 15 if in_half_bytes else 255
    numbers = rng.integers(0, most + 1, (n, k // size, size))
    zeros = rng.choice([0, 1, most // 2, most, most + 1], (n, k // size, 1))
    scales = rng.normal(0.0, 0.1, (n, k // size, 1)).astype(np.float32)
    stored = numbers
    if in_half_bytes:
        parts_of_32 = numbers.reshape(n, k // size, -1, 32)
        stored = (parts_of_32[..., :16] | parts_of_32[..., 16:] << 4).reshape(n, k // size, -1)
    parts = (scales.view(np.uint8), zeros.astype(np.int16).view(np.uint8), stored.astype(np.uint8))
    raw = np.concatenate(parts, axis=-1).reshape(n, -1)
    values = torch.from_numpy((scales.astype(np.float64) * (numbers - zeros)).reshape(n, k))
    return torch.from_numpy(raw), values, values.abs()


class Layer:
    """A seeded weight [n, k] in blocks, packed into memory full of ones.

    Attributes:
        values: what the blocks mean, float64.
        sizes: the sums of the magnitudes of what each value is made of: a scaled number, and a minimum.
    """

    def __init__(self, format: BlockFormat, n: int, k: int, dtype: torch.dtype = torch.float32) -> None:
        k = -(-k // format.elements) * format.elements
        self.raw, self.values, self.sizes = (integers if format in WITH_ZERO_POINTS else ggml)(format, n, k)
        self.columns = k
        self.program = CpuBlockLinear(LinearRequest(n, k, DType.of(dtype), format))
        self.packed = torch.full(self.program.weight_shape(), 0xFF, dtype=torch.uint8)
        self.program.write(self.packed, 0, self.raw)

    def product(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return x Wᵀ in float64 and the bound of its error."""
        plain = x.double()
        outlies = plain.abs() > 4.001 * plain.square().mean(-1, keepdim=True).sqrt()
        blocks = torch.where(outlies, 0.0, plain).view(len(x), -1, 32)
        half_steps = (blocks.abs().amax(-1, keepdim=True) / 253).expand_as(blocks).reshape(plain.shape)
        rounding = 2.0**-23 * (3 * blocks.shape[1] + 40) * ((plain.abs() + half_steps) @ self.sizes.T)
        return plain @ self.values.T, half_steps @ self.values.abs().T + rounding


def random(rows: int, k: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows whose blocks are of unlike sizes, some of them zero, with outliers in one block of every second row."""
    generator = torch.Generator().manual_seed(rows)
    x = (
        torch.randn((rows, k // 32, 32), generator=generator)
        * torch.randn((rows, k // 32, 1), generator=generator).exp()
    )
    x[:, 0] *= (torch.arange(rows) % 3 > 0)[:, None]
    x[::2, -1, 5:7] *= 200
    return x.view(rows, k).to(dtype)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("n", "k"), [(1, 32), (17, 96), (70, 2400)])
def test_products_agree_with_float64_within_the_bound_of_the_arithmetic(n: int, k: int, format: BlockFormat) -> None:
    layer = Layer(format, n, k)
    bias = torch.randn(n, generator=torch.Generator().manual_seed(1))
    for rows in (1, 3, 9, 40):
        x = random(rows, layer.columns)
        exact, bound = layer.product(x)
        assert ((layer.program.run(x, layer.packed) - exact).abs() <= bound).all(), f"{rows} rows"
        assert ((layer.program.run(x, layer.packed, bias) - exact - bias).abs() <= bound + 1e-5).all()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_activations_of_16_bits_give_what_they_give_in_float32(dtype: torch.dtype, format: BlockFormat) -> None:
    layer, wide = Layer(format, 33, 96, dtype), Layer(format, 33, 96)
    x = random(7, layer.columns, dtype)
    assert torch.equal(layer.program.run(x, layer.packed), wide.program.run(x.float(), wide.packed).to(dtype))


@pytest.mark.parametrize("format", FORMATS)
def test_a_row_has_the_same_bits_in_every_batch_and_with_every_number_of_threads(format: BlockFormat) -> None:
    layer = Layer(format, 100, 320)
    x = random(150, layer.columns)
    _native.set_num_threads(1)
    whole = layer.program.run(x, layer.packed)
    for threads in (1, 2):
        _native.set_num_threads(threads)
        for rows in (1, 2, 5, 8, 13, 16, 17, 31, 48, 129, 150):
            assert torch.equal(layer.program.run(x[-rows:], layer.packed), whole[-rows:]), f"{rows} rows"


@pytest.mark.parametrize("format", FORMATS)
def test_blocks_come_back_as_they_were_stored_and_rows_are_gathered_with_the_values_that_they_mean(
    format: BlockFormat,
) -> None:
    layer = Layer(format, 50, 160)
    stored = torch.empty_like(layer.raw)
    _native.unpack_blocks(layer.packed.data_ptr(), 50, layer.columns, format.type_id, 0, 0, 1, stored.data_ptr())
    assert torch.equal(stored, layer.raw)
    pieces = torch.full_like(layer.packed, 0xFF)
    for begin, end in ((0, 5), (5, 37), (37, 50)):
        layer.program.write(pieces, begin, layer.raw[begin:end])
    x = random(3, layer.columns)
    assert torch.equal(layer.program.run(x, pieces), layer.program.run(x, layer.packed))
    ids = torch.tensor([49, 0, 17, 17])
    assert torch.equal(layer.program.gather(layer.packed, ids), layer.values[ids].float())


@pytest.mark.parametrize("rows", [1, 20])
def test_a_row_that_is_not_finite_fails_alone_and_tiny_ones_are_zero(rows: int) -> None:
    layer = Layer(BlockFormat.Q4_1, 20, 96)
    x = random(rows + 3, 96)
    good = layer.program.run(x, layer.packed)
    x[0, 5], x[1, 40] = float("nan"), float("-inf")
    x[2] = 1e-35
    out = layer.program.run(x, layer.packed)
    assert out[:2].isnan().all()
    assert (out[2] == 0).all()
    assert torch.equal(out[3:], good[3:])


@pytest.mark.parametrize("format", FORMATS)
def test_outliers_take_no_precision_from_the_activations_beside_them(format: BlockFormat) -> None:
    layer = Layer(format, 70, 512)
    x = random(9, layer.columns).fill_(0.0)
    x[:, :32] = torch.linspace(-1, 1, 32)
    x[:, 7] += torch.tensor([20.0, -1e3, 1e6, 1e-6, 0, 3, 7, -100, 1e4])
    x[:, -1] = 1e-3 * x[:, 7]
    exact, bound = layer.product(x)
    assert ((layer.program.run(x, layer.packed) - exact).abs() <= bound).all()
    # Their sum of squares is beyond float32: none is set aside, and nothing else is lost.
    x[0, 7] = 1e20
    exact, _ = layer.product(x)
    assert ((layer.program.run(x[:1], layer.packed) - exact[:1]).abs() <= 1e20 / 100 * layer.sizes.sum(1)).all()


def test_wrong_blocks_are_refused() -> None:
    layer = Layer(BlockFormat.Q8_0, 16, 64)
    with pytest.raises(InvalidOperand, match="uint8"):
        layer.program.write(layer.packed, 0, layer.raw[:, :-1])
    with pytest.raises(InvalidOperand, match="packed weight"):
        layer.program.run(random(1, 96), layer.packed)
