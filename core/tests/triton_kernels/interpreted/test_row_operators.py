"""Operators of rows in Triton's interpreter, against torch in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from hardpoint.interfaces import Activation, Device
from hardpoint.triton import TritonKernels
from hardpoint_conformance.target import Target
from hardpoint_conformance.tiny_model import Shape, tiny_model
from hardpoint_conformance.worker_bench import running

DEVICE = Device("any", 0, "the host", "cpu")
# The interpreter cuts bfloat16 off where devices round it, hence a whole unit in the last place.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2**-6}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def kernels() -> TritonKernels:
    return TritonKernels(DEVICE)


def close(found: torch.Tensor, expected: torch.Tensor, scale: float = 1.0) -> None:
    tolerance = TOLERANCES[found.dtype] * scale
    torch.testing.assert_close(found.double(), expected.double(), rtol=tolerance, atol=tolerance)


def normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.double()
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.double()


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("width", [1, 24, 128, 1000])
def test_norm_of_rows(dtype: torch.dtype, width: int) -> None:
    x, weight = torch.randn(5, width).to(dtype), torch.randn(width).to(dtype)
    close(kernels().rms_norm(x, weight, 1e-5), normed(x, weight, 1e-5))


def test_norm_of_heads_that_are_slices_of_a_fused_row() -> None:
    fused, weight = torch.randn(4, 9, 16), torch.randn(16)
    for heads in fused.split([6, 2, 1], dim=1):
        found = kernels().rms_norm(heads, weight, 1e-6)
        assert found.is_contiguous()
        close(found, normed(heads, weight, 1e-6))


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_sum_is_kept_and_normed_as_it_was_rounded(dtype: torch.dtype) -> None:
    x, residual, weight = (torch.randn(*shape).to(dtype) for shape in ((3, 48), (3, 48), (48,)))
    wide = torch.zeros(3, 60, dtype=dtype)
    wide[:, :48] = residual
    place = wide[:, :48]
    found = kernels().add_rms_norm(x, place, weight, 1e-5)
    close(place, x.double() + residual.double())
    close(found, normed(place, weight, 1e-5))
    assert not wide[:, 48:].any()


@pytest.mark.parametrize(("q_heads", "k_heads", "dim", "rotated"), [(6, 2, 16, 16), (20, 17, 24, 20), (1, 1, 64, 32)])
def test_rotation_is_in_place_and_leaves_the_rest(q_heads: int, k_heads: int, dim: int, rotated: int) -> None:
    half = rotated // 2
    fused = torch.randn(4, q_heads + 2 * k_heads, dim)
    q, k, v = fused.split([q_heads, k_heads, k_heads], dim=1)
    angles = torch.rand(50, half) * 6
    positions = torch.tensor([3, 49, 0, 7])
    before = fused.clone()
    kernels().rotary(q, k, positions, angles.cos(), angles.sin())
    cos, sin = angles.cos()[positions][:, None], angles.sin()[positions][:, None]
    for now, old in zip((q, k), before.split([q_heads, k_heads, k_heads], dim=1), strict=False):
        first, second = old[..., :half], old[..., half:rotated]
        expected = torch.cat((first * cos - second * sin, second * cos + first * sin, old[..., rotated:]), dim=-1)
        close(now, expected)
    assert torch.equal(v, before[:, q_heads + k_heads :])


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("width", [8, 130, 1500])
def test_gated_activations(dtype: torch.dtype, width: int) -> None:
    x = torch.randn(2, 2 * width).to(dtype)
    gate, up = x[:, :width].double(), x[:, width:].double()
    close(kernels().gated_activation(x, Activation.SILU), functional.silu(gate) * up, 4)
    close(kernels().gated_activation(x, Activation.GELU), functional.gelu(gate) * up, 4)
    close(kernels().gated_activation(x, Activation.GELU_TANH), functional.gelu(gate, approximate="tanh") * up, 4)
    x *= 6
    gate, up = x[:, :width].double().clamp(max=7), x[:, width:].double().clamp(-7, 7)
    close(kernels().gated_activation(x, Activation.CLAMPED_SWIGLU), (up + 1) * gate * torch.sigmoid(1.702 * gate), 4)


def test_a_row_does_not_depend_on_the_others() -> None:
    x, weight = torch.randn(7, 96), torch.randn(96)
    together = kernels().rms_norm(x, weight, 1e-5)
    assert torch.equal(kernels().rms_norm(x[3:4], weight, 1e-5), together[3:4])


def test_no_rows_are_no_launch() -> None:
    none, weight = torch.empty(0, 32), torch.ones(32)
    assert kernels().rms_norm(none, weight, 1e-5).shape == (0, 32)
    assert kernels().add_rms_norm(none, none, weight, 1e-5).shape == (0, 32)
    assert kernels().gated_activation(none, Activation.SILU).shape == (0, 16)
    kernels().rotary(torch.empty(0, 2, 8), torch.empty(0, 1, 8), torch.empty(0), torch.ones(4, 4), torch.ones(4, 4))


def test_argmax_is_the_lowest_of_equals() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0], [3.0, 1.0, 3.0]])
    assert kernels().argmax(logits).tolist() == [1, 0]


def test_model_gives_the_tokens_that_it_gives_without() -> None:
    def tokens(**parts: Any) -> list[list[int]]:
        target = Target.find("cpu").with_descriptor(**parts)
        with running(target, tiny_model(Shape(head_dim=16)), use_fused_decoder=False) as bench:
            return [one.generated for one in bench.generate([[3, 1, 4, 1, 5], [9, 2]], 6)]

    assert tokens(kernels=lambda: TritonKernels) == tokens(kernels=None)
