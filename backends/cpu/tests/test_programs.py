"""What layers run on the host by: packed linear layers and experts, written in parts, and refusals of what they do not take."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from hardpoint.interfaces import (
    Activation,
    Device,
    DType,
    ExpertsProgram,
    ExpertsRequest,
    LinearProgram,
    LinearRequest,
    Refusal,
)
from hardpoint_cpu import _native
from hardpoint_cpu.decoder import InvalidOperand
from hardpoint_cpu.kernels import CpuKernels

DEVICE = Device(backend="cpu", index=0, name="test", torch_device="cpu", total_memory=1 << 30)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def linear(rows: int, columns: int, dtype: torch.dtype) -> LinearProgram:
    program = CpuKernels(DEVICE).plan_linear(LinearRequest(rows, columns, DType.of(dtype)))
    assert isinstance(program, LinearProgram)
    return program


def stored_nan(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return memory in which nothing was written that a result could take from."""
    return torch.full(shape, float("nan"), dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (33, 17), (64, 96)])
@pytest.mark.parametrize("biased", [False, True])
def test_a_linear_layer_written_in_parts_is_the_product(
    rows: int, columns: int, biased: bool, dtype: torch.dtype
) -> None:
    weight, x = random(rows, columns, dtype=dtype), random(2, 5, columns, dtype=dtype, seed=1)
    bias = random(rows, dtype=dtype, seed=2) if biased else None
    program = linear(rows, columns, dtype)
    stored = stored_nan(program.weight_shape(), dtype)
    for first in range(0, rows, 7):
        program.write(stored, first, weight[first : first + 7].float())
    exact = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    found = program.run(x, stored, bias)
    assert found.dtype is dtype
    rounding = {torch.float32: 2.0**-22, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[dtype]
    assert (found.double() - exact).abs().max() <= rounding * (columns + exact.abs().max())


@pytest.mark.parametrize("isa", _native.available_isas())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", [Activation.GELU, Activation.GELU_TANH, Activation.SILU])
def test_a_linear_layer_with_an_activation_rounds_once(isa: str, dtype: torch.dtype, activation: Activation) -> None:
    rows, columns, functional = 77, 48, torch.nn.functional
    # A bias that leads from one tail of the activation to the other.
    weight, x = random(rows, columns, dtype=dtype) / 16, random(2, 5, columns, dtype=dtype, seed=1)
    bias = torch.linspace(-12, 12, rows).to(dtype)
    program, used = linear(rows, columns, dtype), _native.isa()
    stored = stored_nan(program.weight_shape(), dtype)
    program.write(stored, 0, weight)
    _native.set_isa(isa)
    try:
        found = program.run_activated(x, stored, bias, activation)
        part = program.run_activated(x[1:, 3:], stored, bias, activation)
    finally:
        _native.set_isa(used)
    product = functional.linear(x.double(), weight.double(), bias.double())
    exact = {
        Activation.GELU: functional.gelu,
        Activation.GELU_TANH: partial(functional.gelu, approximate="tanh"),
        Activation.SILU: functional.silu,
    }[activation](product)
    assert found is not None
    assert part is not None
    assert found.dtype is dtype
    assert torch.equal(part, found[1:, 3:])
    # One rounding of the result; that of the sums is the second term's.
    rounding = {torch.float32: 2.0**-22, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[dtype]
    assert ((found.double() - exact).abs() <= rounding * exact.abs() + 2.0**-18).all()


def test_a_linear_layer_leaves_the_activation_of_gates_to_others() -> None:
    program = linear(16, 8, torch.float32)
    stored = torch.zeros(program.weight_shape())
    assert program.run_activated(random(2, 8), stored, None, Activation.CLAMPED_SWIGLU) is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_of_a_linear_layer_has_the_same_bits_in_every_batch(dtype: torch.dtype) -> None:
    program = linear(50, 40, dtype)
    stored = stored_nan(program.weight_shape(), dtype)
    program.write(stored, 0, random(50, 40))
    x = random(90, 40, dtype=dtype, seed=1)
    whole = program.run(x, stored)
    for part in (slice(0, 1), slice(7, 20), slice(89, 90)):
        assert torch.equal(program.run(x[part], stored), whole[part])
    assert torch.equal(program.run(x.T.contiguous().T, stored), whole)
    assert program.run(x[:0], stored).shape == (0, 50)


def experts(**changes: Any) -> ExpertsProgram:
    settings: dict[str, Any] = {
        "num_experts": 5,
        "top_k": 2,
        "hidden_size": 33,
        "intermediate_size": 19,
        "activation": Activation.SILU,
        "dtype": DType.FLOAT32,
        "renormalise": True,
    }
    program = CpuKernels(DEVICE).plan_experts(ExpertsRequest(**(settings | changes)))
    assert isinstance(program, ExpertsProgram)
    return program


def written(program: ExpertsProgram, gate_up: Tensor, down: Tensor, step: int, dtype: torch.dtype) -> list[Tensor]:
    """Return stored weights, written `step` rows at a time, across the borders of halves and experts."""
    found = []
    for shape, plain, write in zip(
        program.weight_shapes(), (gate_up, down), (program.write_gate_up, program.write_down), strict=True
    ):
        stored, rows = stored_nan(shape, dtype), plain.flatten(0, 1)
        for first in range(0, len(rows), step):
            write(stored, first, rows[first : first + step])
        found.append(stored)
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("step", [1, 10, 1000])
def test_experts_written_in_parts_are_the_sum_over_each_tokens_experts(step: int, dtype: torch.dtype) -> None:
    program = experts(dtype=DType.of(dtype))
    gate_up, down = random(5, 38, 33, dtype=dtype) / 5, random(5, 33, 19, dtype=dtype, seed=1) / 5
    x, logits = random(9, 33, dtype=dtype, seed=2), torch.stack([torch.randperm(5) for _ in range(9)]).to(dtype)
    found = program.run(x, logits, *written(program, gate_up, down, step, dtype))
    shares, chosen = torch.softmax(logits.double(), -1).topk(2, -1)
    shares /= shares.sum(-1, keepdim=True)
    for token in range(9):
        exact = torch.zeros(33, dtype=torch.float64)
        for share, expert in zip(shares[token], chosen[token].tolist(), strict=True):
            gate, up = (gate_up[expert].double() @ x[token].double()).chunk(2)
            exact += share * (down[expert].double() @ (torch.nn.functional.silu(gate) * up))
        tolerance = {torch.float32: 1e-5, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}[dtype]
        torch.testing.assert_close(found[token].double(), exact, rtol=tolerance, atol=tolerance)


def test_a_token_of_experts_has_the_same_bits_in_every_batch() -> None:
    program = experts(dtype=DType.BFLOAT16)
    stored = written(program, random(5, 38, 33), random(5, 33, 19, seed=1), 100, torch.bfloat16)
    x, logits = random(60, 33, dtype=torch.bfloat16, seed=2), random(60, 5, dtype=torch.bfloat16, seed=3)
    whole = program.run(x, logits, *stored)
    for part in (slice(0, 1), slice(7, 20), slice(59, 60), slice(0, 0)):
        assert torch.equal(program.run(x[part], logits[part], *stored), whole[part])


def test_operands_that_are_not_as_asked_for_are_refused() -> None:
    layer, program = linear(20, 12, torch.float32), experts()
    stored = torch.zeros(layer.weight_shape())
    gate_up, down = (torch.zeros(shape) for shape in program.weight_shapes())
    x, logits = torch.zeros(3, 33), torch.zeros(3, 5)
    calls = [
        lambda: layer.run(torch.zeros(3, 13), stored),
        lambda: layer.run(torch.zeros(3, 12).half(), stored),
        lambda: layer.run(torch.zeros(3, 12), torch.zeros(20, 12)),
        lambda: program.run(x[:, :32], logits, gate_up, down),
        lambda: program.run(x, logits[:2], gate_up, down),
        lambda: program.run(x, logits.half(), gate_up, down),
        lambda: program.run(x, logits, torch.zeros(5, 38, 33), down),
        lambda: program.run(x, logits, gate_up, down, torch.zeros(5, 37), torch.zeros(5, 33)),
    ]
    for call in calls:
        with pytest.raises(InvalidOperand):
            call()


def test_a_dtype_that_the_kernels_lack_is_refused_with_the_reason() -> None:
    for refused in (
        CpuKernels(DEVICE).plan_linear(LinearRequest(8, 8, DType.FLOAT8_E4M3)),
        CpuKernels(DEVICE).plan_experts(
            ExpertsRequest(4, 2, 8, 8, Activation.SILU, DType.FLOAT8_E4M3, renormalise=True)
        ),
    ):
        assert isinstance(refused, Refusal)
        assert "float8" in refused.reasons[0]


def test_a_packed_weight_is_no_larger_than_the_plain_one() -> None:
    assert linear(64, 96, torch.bfloat16).weight_shape() == (64, 96)
    shapes = experts(hidden_size=64, intermediate_size=48).weight_shapes()
    assert shapes == ((5, 96, 64), (5, 64, 48))
    assert _native.packed_bytes(96, 64, 0) == 96 * 64 * 4


def test_experts_take_logits_in_float32_whatever_the_weights_are() -> None:
    """A router's shares are not rounded to the weights' dtype on their way."""
    torch.manual_seed(0)
    request = ExpertsRequest(4, 2, 32, 16, Activation.SILU, DType.BFLOAT16, True)
    program = CpuKernels(DEVICE).plan_experts(request)
    assert isinstance(program, ExpertsProgram)
    values = torch.randn(4 * 32, 32).bfloat16(), torch.randn(4 * 32, 16).bfloat16()
    gate_up, down = (torch.zeros(shape, dtype=torch.bfloat16) for shape in program.weight_shapes())
    program.write_gate_up(gate_up, 0, values[0])
    program.write_down(down, 0, values[1])
    x = torch.randn(1, 32).bfloat16()
    # In bfloat16 both would be 4, and the shares equal.
    exact = program.run(x, torch.tensor([[4.0, 4.01, -9.0, -9.0]]), gate_up, down)
    rounded = program.run(x, torch.tensor([[4.0, 4.0, -9.0, -9.0]]).bfloat16(), gate_up, down)
    assert not torch.equal(exact, rounded)
