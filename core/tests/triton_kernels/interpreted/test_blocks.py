"""Products with weights in blocks in Triton's interpreter: what the conformance suite's one dtype and its batches leave out."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hardpoint.interfaces import BlockFormat, DType, LinearRequest
from hardpoint.triton.blocks import LAYOUTS, InvalidBlocks, TritonBlockLinear, product_constants
from hardpoint_conformance.block_weights import block_matrix
from hardpoint_simulators.triton_interpreter.products import multiply_rows_alike

ROWS, COLUMNS = 70, 512


def layer(
    format: BlockFormat, dtype: DType, columns: int = COLUMNS
) -> tuple[TritonBlockLinear, torch.Tensor, torch.Tensor]:
    """Return a program, its stored weight, and what that means in float64."""
    program = TritonBlockLinear(LinearRequest(ROWS, columns, dtype, format))
    matrix = block_matrix(format, ROWS, columns, np.random.default_rng(0))
    # What memory held before is in the rows that fill up the last tile.
    stored = torch.full(program.weight_shape(), 0xFF, dtype=torch.uint8)
    program.write(stored, 0, matrix.raw)
    return program, stored, matrix.values


@pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32])
@pytest.mark.parametrize(
    "format", [BlockFormat.Q4_K, BlockFormat.Q6_K, BlockFormat.INT4_128, BlockFormat.INT8, BlockFormat.FP8]
)
def test_activations_are_not_rounded(format: BlockFormat, dtype: DType) -> None:
    program, stored, values = layer(format, dtype)
    x = torch.randn(70, COLUMNS, generator=torch.Generator().manual_seed(0)).to(dtype.to_torch())
    found = program.run(x, stored).double()
    # Half a unit of each weight in the activations' dtype, and of the result; float32 sums 512 products.
    unit = torch.finfo(dtype.to_torch()).eps / 2
    bound = (unit + 2e-6) * (x.double().abs() @ values.abs().T) + unit * found.abs()
    assert float(((found - x.double() @ values.T).abs() / bound).max()) <= 1.01


@pytest.mark.parametrize("format", [BlockFormat.Q4_0, BlockFormat.Q8_0])
@pytest.mark.parametrize("columns", [64, COLUMNS])
def test_a_row_has_the_same_bits_among_few_and_among_many(format: BlockFormat, columns: int) -> None:
    multiply_rows_alike()
    program, stored, _ = layer(format, DType.FLOAT32, columns)
    x, bias = torch.randn(130, columns), torch.randn(ROWS)
    constants = [
        product_constants(LinearRequest(ROWS, columns, DType.FLOAT32, format), n, biased=True) for n in (7, 130)
    ]
    assert [one["TILES"] for one in constants] == [1, 4]
    assert [one["SHARED"] for one in constants] == [columns == COLUMNS, False]
    many = program.run(x, stored, bias)
    assert torch.equal(program.run(x[100:107], stored, bias), many[100:107])


def test_rows_are_written_one_by_one_and_no_tokens_are_no_launch() -> None:
    program, stored, values = layer(BlockFormat.Q5_K, DType.FLOAT32)
    matrix = block_matrix(BlockFormat.Q5_K, ROWS, COLUMNS, np.random.default_rng(0))
    again = torch.zeros_like(stored)
    for row in reversed(range(ROWS)):
        program.write(again, row, matrix.raw[row : row + 1])
    everything = torch.arange(ROWS)
    assert torch.equal(program.gather(again, everything), program.gather(stored, everything))
    assert torch.equal(program.gather(again, everything), values.float())
    assert program.run(torch.zeros(0, COLUMNS), stored).shape == (0, ROWS)
    assert program.run(torch.zeros(2, 3, COLUMNS), stored).shape == (2, 3, ROWS)


def test_wrong_tensors_are_refused() -> None:
    program, stored, _ = layer(BlockFormat.FP8, DType.BFLOAT16)
    with pytest.raises(InvalidBlocks, match=r"uint8\[n, 576\].*\n?.*\[2, 512\]"):
        program.write(stored, 0, torch.zeros(2, COLUMNS, dtype=torch.uint8))
    with pytest.raises(InvalidBlocks, match="float32"):
        program.run(torch.zeros(2, COLUMNS), stored)
    with pytest.raises(InvalidBlocks, match="511"):
        program.run(torch.zeros(2, 511, dtype=torch.bfloat16), stored)


def test_a_weight_takes_no_more_than_its_numbers_and_scales() -> None:
    bits = {}
    for format in LAYOUTS:
        _, size = TritonBlockLinear(LinearRequest(4096, 4096, DType.BFLOAT16, format)).weight_shape()
        bits[str(format)] = 8 * size / 4096**2
    assert bits["Q4_0"] == bits["Q4_1"] - 0.5 == 4.5
    assert bits["Q4_K"] == 4.625
    assert bits["INT4"] == 5.5
    assert bits["INT4_128"] == bits["INT8_128"] - 4 == 4.375
    assert bits["FP8"] == 9.0
    assert bits["Q6_K"] == 8.5625
