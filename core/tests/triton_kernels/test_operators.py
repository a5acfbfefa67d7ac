"""The kernel set in Triton where triton is missing, and the shapes of its launches."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from hardpoint.interfaces import Activation, Device
from hardpoint.interfaces.errors import CapabilityRefused
from hardpoint.triton import TritonKernels
from hardpoint.triton.operators import activation_constants, norm_constants, rotary_constants


def test_without_triton_the_kernel_set_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "triton" else found(name, *more)
    )
    with pytest.raises(CapabilityRefused, match="triton is not installed"):
        TritonKernels(Device("any", 0, "the host", "cpu"))


@pytest.mark.parametrize("width", [1, 64, 100, 1024, 5000, 16384])
def test_a_program_has_a_whole_row(width: int) -> None:
    constants = norm_constants(width)
    assert constants["N_PAD"] >= constants["N"] == width
    assert 1 <= constants["num_warps"] <= 16


@pytest.mark.parametrize(("q_heads", "k_heads"), [(1, 1), (9, 3), (16, 8), (64, 8)])
def test_heads_are_rotated_in_tiles_of_16_at_most(q_heads: int, k_heads: int) -> None:
    constants = rotary_constants(q_heads, k_heads, 40)
    assert constants["HEADS"] == min(16, 1 << (q_heads - 1).bit_length())
    assert (constants["HALF"], constants["HALF_PAD"]) == (40, 64)


@pytest.mark.parametrize(("width", "block"), [(8, 8), (100, 128), (3072, 1024)])
def test_activations_are_cut_into_blocks(width: int, block: int) -> None:
    constants: dict[str, Any] = activation_constants(width, Activation.SILU)
    assert (constants["N"], constants["BLOCK"], constants["ACTIVATION"]) == (width, block, 0)
