"""Row operators of the CPU kernel set, in every instruction set, against float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from hardpoint.interfaces import Activation
from hardpoint_cpu.descriptor import hardpoint_backend
from hardpoint_cpu.kernels import CpuKernels

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
WIDTHS = [1, 5, 16, 40, 64, 577]
ACTIVATED = {
    Activation.SILU: torch.nn.functional.silu,
    Activation.GELU: torch.nn.functional.gelu,
    Activation.GELU_TANH: partial(torch.nn.functional.gelu, approximate="tanh"),
}


pytestmark = pytest.mark.usefixtures("isa")


@pytest.fixture(scope="module")
def kernels() -> CpuKernels:
    return CpuKernels(hardpoint_backend().probe().devices[0])


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_rounded(actual: Tensor, exact: Tensor, slack: float = 2.0**-20) -> None:
    """Assert that `actual` is `exact` up to one rounding to its dtype and float32 arithmetic of relative error `slack`."""
    rounding = torch.finfo(actual.dtype).eps
    assert ((actual.double() - exact).abs() <= (rounding + slack) * exact.abs() + 1e-6).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", WIDTHS)
def test_rms_norm(kernels: CpuKernels, n: int, dtype: torch.dtype) -> None:
    x, weight = random(3, 7, n + 2, dtype=dtype)[..., :n], random(n, dtype=dtype, seed=1)
    exact = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-5) * weight.double()
    out = kernels.rms_norm(x, weight, 1e-5)
    assert out.dtype is dtype
    assert out.shape == x.shape
    assert_rounded(out, exact)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", WIDTHS)
def test_add_rms_norm_changes_the_residual_and_normalises_the_sum(
    kernels: CpuKernels, n: int, dtype: torch.dtype
) -> None:
    x, residual, weight = random(9, n, dtype=dtype), random(9, n, dtype=dtype, seed=1), random(n, seed=2)
    total = (x.float() + residual.float()).to(dtype)
    out = kernels.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(residual, total)
    exact = total.double() * torch.rsqrt(total.double().square().mean(-1, keepdim=True) + 1e-6) * weight.double()
    assert_rounded(out, exact)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_all_numbers_of_16_bits_are_read_and_sums_of_them_rounded_as_torch_does(
    kernels: CpuKernels, dtype: torch.dtype
) -> None:
    numbers = torch.arange(1 << 16).to(torch.int16).view(dtype)
    order = torch.randperm(1 << 16, generator=torch.Generator().manual_seed(0))
    for other in (torch.full_like(numbers, -0.0), numbers[order]):
        total = (numbers.float() + other.float()).to(dtype)
        residual = numbers.clone().view(1, -1)
        kernels.add_rms_norm(other.view(1, -1), residual, torch.ones(1 << 16, dtype=dtype), 1e-6)
        is_nan = total.isnan()
        assert torch.equal(residual[0].isnan(), is_nan)
        # Bit for bit: zeros of different sign are equal as numbers.
        assert torch.equal(residual[0][~is_nan].view(torch.int16), total[~is_nan].view(torch.int16))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", WIDTHS)
def test_layer_norm_of_rows_and_of_their_sums_with_a_branch(kernels: CpuKernels, n: int, dtype: torch.dtype) -> None:
    x, branch = random(3, 7, n + 2, dtype=dtype)[..., :n], random(3, 7, n, dtype=dtype, seed=1)
    weight, bias = random(n, dtype=dtype, seed=2), random(n, dtype=dtype, seed=3)
    for added, offset in ((None, None), (None, bias), (branch, None), (branch, bias)):
        # Far from zero: what a variance by the mean of squares would lose.
        shifted = (x + 100).to(dtype)
        total = shifted.double() + (0 if added is None else added.double())
        exact = torch.nn.functional.layer_norm(
            total, (n,), weight.double(), None if offset is None else offset.double(), eps=1e-5
        )
        out = kernels.layer_norm(shifted, weight, offset, 1e-5, added)
        assert out.dtype is dtype
        assert out.shape == x.shape
        # The sum's own rounding to float32, spread by the scale, beside that of the result.
        spread = torch.rsqrt(total.var(-1, keepdim=True, unbiased=False) + 1e-5) * weight.double().abs()
        rounding = torch.finfo(dtype).eps * exact.abs() + 2.0**-20 * (100 * spread + exact.abs() + 1)
        assert ((out.double() - exact).abs() <= rounding).all()


def test_a_row_of_layer_norm_has_the_same_bits_in_every_batch(kernels: CpuKernels) -> None:
    x, branch, weight = random(400, 577), random(400, 577, seed=1), random(577, seed=2)
    whole = kernels.layer_norm(x, weight, None, 1e-5, branch)
    for part in (slice(0, 1), slice(7, 120)):
        assert torch.equal(kernels.layer_norm(x[part], weight, None, 1e-5, branch[part]), whole[part])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("dim", "rotary_dim"), [(64, 64), (8, 8), (80, 20), (24, 24), (40, 6)])
def test_rotary_turns_pairs_by_their_angles_inside_a_fused_row(
    kernels: CpuKernels, dim: int, rotary_dim: int, dtype: torch.dtype
) -> None:
    tokens, heads, kv_heads = 11, 3, 1
    row = random(tokens, (heads + 2 * kv_heads) * dim, dtype=dtype)
    before = row.clone()
    q = row[:, : heads * dim].view(tokens, heads, dim)
    k = row[:, heads * dim : (heads + kv_heads) * dim].view(tokens, kv_heads, dim)
    positions = torch.randint(0, 50, (tokens,), generator=torch.Generator().manual_seed(1))
    angles = random(50, rotary_dim // 2, seed=2).double()
    cos, sin = angles.cos().float(), angles.sin().float()
    kernels.rotary(q, k, positions, cos, sin)

    both = before[:, : (heads + kv_heads) * dim].view(tokens, heads + kv_heads, dim).double()
    c, s = cos[positions].double()[:, None], sin[positions].double()[:, None]
    half = rotary_dim // 2
    first, second = slice(0, half), slice(half, rotary_dim)
    exact = both.clone()
    exact[..., first] = both[..., first] * c - both[..., second] * s
    exact[..., second] = both[..., second] * c + both[..., first] * s
    assert_rounded(row[:, : (heads + kv_heads) * dim].view_as(exact), exact)
    assert torch.equal(row[:, (heads + kv_heads) * dim :], before[:, (heads + kv_heads) * dim :])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", list(Activation))
@pytest.mark.parametrize("n", WIDTHS)
def test_gated_activation(kernels: CpuKernels, n: int, activation: Activation, dtype: torch.dtype) -> None:
    x = random(2, 5, 2 * n, dtype=dtype) * 3
    gate, up = x.double().chunk(2, -1)
    if activation is Activation.CLAMPED_SWIGLU:
        gate = gate.clamp(max=7)
        exact = (up.clamp(-7, 7) + 1) * gate * torch.sigmoid(1.702 * gate)
    else:
        exact = ACTIVATED[activation](gate) * up
    assert_rounded(kernels.gated_activation(x, activation), exact)


@pytest.mark.parametrize("activation", list(Activation))
def test_activation_of_extreme_values_is_its_limit(kernels: CpuKernels, activation: Activation) -> None:
    gate = torch.tensor([-1e30, -200.0, -90.0, -0.0, 0.0, 90.0, 200.0, 1e30])
    out = kernels.gated_activation(torch.cat((gate, torch.ones(8))), activation)
    limit = 2 * gate.clamp(0, 7) if activation is Activation.CLAMPED_SWIGLU else gate.clamp(min=0)
    # 1.702 * 7 is not yet beyond float32.
    assert torch.allclose(out, limit, atol=1e-30, rtol=1e-5)


@pytest.mark.parametrize("n", [1, 5, 16, 49, 1000])
def test_argmax_is_the_lowest_index_of_the_greatest_value(kernels: CpuKernels, n: int) -> None:
    logits = random(20, n).round()
    assert kernels.argmax(logits).tolist() == [int((row == row.max()).nonzero()[0]) for row in logits]
    assert kernels.argmax(torch.full((2, n), float("-inf"))).tolist() == [0, 0]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda k: k.rms_norm(random(4, 8).T, random(4), 1e-5), "contiguous"),
        (lambda k: k.rms_norm(random(4, 8), random(4), 1e-5), "weight"),
        (lambda k: k.rms_norm(random(4, 8).double(), random(8), 1e-5), "float64"),
        (lambda k: k.add_rms_norm(random(4, 8), random(4, 7), random(8), 1e-5), "residual"),
        (lambda k: k.add_rms_norm(random(2, 4, 8), random(2, 5, 8)[:, :4], random(8), 1e-5), "in place"),
        (lambda k: k.layer_norm(random(4, 8), random(7), None, 1e-5), "weight"),
        (lambda k: k.layer_norm(random(4, 8), random(8), random(7), 1e-5), "bias"),
        (lambda k: k.layer_norm(random(4, 8), random(8), None, 1e-5, random(3, 8)), "branch"),
        (lambda k: k.gated_activation(random(4, 7), Activation.SILU), "even"),
        (lambda k: k.argmax(random(4, 7).half()), "float32"),
        (
            lambda k: k.rotary(random(2, 1, 8), random(2, 1, 8), torch.tensor([0, 9]), random(9, 4), random(9, 4)),
            "positions",
        ),
        (
            lambda k: k.rotary(random(2, 1, 8), random(2, 1, 8), torch.tensor([0, 1]), random(9, 5), random(9, 5)),
            "cos",
        ),
    ],
)
def test_a_wrong_operand_is_refused_with_its_reason(
    kernels: CpuKernels, call: Callable[[CpuKernels], object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        call(kernels)
