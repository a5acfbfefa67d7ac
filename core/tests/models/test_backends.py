"""With the CPU backend installed: its kernels, fused or one by one, give transformers' tokens for every lean family."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tiny_models import (
    FALLBACK,
    LEAN,
    MIXTURES,
    Runner,
    assert_equals_transformers,
    open_and_load,
    save_tiny,
    tiny_config,
)

from hardpoint.interfaces import Device

pytestmark = pytest.mark.skipif(find_spec("hardpoint_cpu") is None, reason="the CPU backend is not installed")


def _check(kind: str, options: dict[str, Any], folder: Path, path: str) -> None:
    from hardpoint_cpu.descriptor import hardpoint_backend

    reference = save_tiny(folder, tiny_config(kind, **options))
    descriptor = hardpoint_backend()
    device = Device(backend="cpu", index=0, name="test", torch_device="cpu", total_memory=1 << 34)
    _, model, plan, attention = open_and_load(
        folder,
        attention=descriptor.make("attention", device),
        allocator=descriptor.make("allocator", device),
        kernels=descriptor.make("kernels", device),
        block_size=8,
        use_fused_decoder=path == "fused",
    )
    assert model.path == path
    assert_equals_transformers(reference, Runner(model, plan, attention), steps=4, tolerance=3e-4)


@pytest.mark.parametrize("name", LEAN)
def test_the_cpu_backends_operators_equal_transformers(name: str, tmp_path: Path) -> None:
    _check(*LEAN[name], tmp_path, "lean")


@pytest.mark.parametrize("name", [name for name in LEAN if name not in MIXTURES])
def test_the_cpu_backends_fused_decoder_equals_transformers(name: str, tmp_path: Path) -> None:
    _check(*LEAN[name], tmp_path, "fused")


@pytest.mark.parametrize("name", ["gpt2", "olmo2", "phi", "starcoder2-window"])
def test_the_cpu_backends_attention_serves_transformers_code(name: str, tmp_path: Path) -> None:
    _check(*FALLBACK[name], tmp_path, "transformers")
