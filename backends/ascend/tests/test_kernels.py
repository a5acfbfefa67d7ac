"""The kernel set over reference operators (simulated): what the core's own operators compute, in calls that the vendor's take."""

from __future__ import annotations

import pytest
import torch

from hardpoint.interfaces import Activation
from hardpoint.layers.operators import TORCH_OPERATORS
from hardpoint_ascend.kernels import AscendKernels

from .reference_operators import DEVICE, register

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)


@pytest.fixture(scope="module")
def kernels() -> AscendKernels:
    register()
    return AscendKernels(DEVICE)


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


@DTYPES
def test_norms_are_the_cores(kernels: AscendKernels, dtype: torch.dtype) -> None:
    heads = random(5, 6, 128, dtype=dtype)[:, 2:5]
    weight = random(128, dtype=dtype)
    torch.testing.assert_close(kernels.rms_norm(heads, weight, 1e-5), TORCH_OPERATORS.rms_norm(heads, weight, 1e-5))
    branch, sums = random(5, 128, dtype=dtype), [random(5, 128, dtype=dtype) for _ in range(2)]
    found, expected = (
        operators.add_rms_norm(branch, residual, weight, 1e-5)
        for operators, residual in zip((kernels, TORCH_OPERATORS), sums, strict=True)
    )
    torch.testing.assert_close(found, expected)
    assert torch.equal(*sums)


@DTYPES
@pytest.mark.parametrize("half", [64, 16], ids=["whole heads", "parts of heads"])
def test_rotation_is_the_cores(kernels: AscendKernels, dtype: torch.dtype, half: int) -> None:
    angles = torch.arange(50)[:, None] * torch.linspace(1, 0.01, half)
    positions = torch.tensor([3, 0, 49])
    results = []
    for operators in (kernels, TORCH_OPERATORS):
        qkv = random(3, 10, 128, dtype=dtype)
        operators.rotary(qkv[:, :6], qkv[:, 6:8], positions, angles.cos(), angles.sin())
        results.append(qkv)
    torch.testing.assert_close(*results)
    assert torch.equal(results[0][:, 8:], random(3, 10, 128, dtype=dtype)[:, 8:])


@DTYPES
@pytest.mark.parametrize("activation", list(Activation))
def test_gated_activations_are_the_cores(kernels: AscendKernels, dtype: torch.dtype, activation: Activation) -> None:
    x = random(7, 96, dtype=dtype)
    torch.testing.assert_close(kernels.gated_activation(x, activation), TORCH_OPERATORS.gated_activation(x, activation))


def test_argmax_is_the_lowest_of_equal_ones(kernels: AscendKernels) -> None:
    assert kernels.argmax(torch.tensor([[0.0, 2.0, 2.0], [1.0, 1.0, 0.0]])).tolist() == [1, 0]
