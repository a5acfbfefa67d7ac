"""With the CPU backend installed: its kernels, fused or one by one, give transformers' tokens for every native family."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import (
    FALLBACK,
    HYBRIDS,
    MIXTURES,
    NATIVE,
    Runner,
    assert_equals_transformers,
    open_and_load,
    save_tiny,
    tiny_config,
)

from hardpoint.interfaces import AttentionBackend, AttentionPlan, Device, DType
from hardpoint.models import RunnableModel

pytestmark = pytest.mark.skipif(find_spec("hardpoint_cpu") is None, reason="the CPU backend is not installed")


NOT_FUSED = ("olmo2", "granite", "deepseek-v2", "deepseek-v3", *HYBRIDS)
"""Families whose equation the CPU's native decoder does not have."""


def _load(folder: Path, path: str, **options: Any) -> tuple[RunnableModel, AttentionPlan, AttentionBackend]:
    """Return a model that runs by the CPU backend's parts."""
    from hardpoint_cpu.descriptor import hardpoint_backend

    descriptor = hardpoint_backend()
    device = Device(backend="cpu", index=0, name="test", torch_device="cpu", total_memory=1 << 34)
    _, model, plan, attention = open_and_load(
        folder,
        attention=descriptor.make("attention", device),
        allocator=descriptor.make("allocator", device),
        kernels=descriptor.make("kernels", device),
        block_size=8,
        use_fused_decoder=path == "fused",
        **options,
    )
    assert model.path == path
    return model, plan, attention


def _check(kind: str, options: dict[str, Any], folder: Path, path: str) -> None:
    reference = save_tiny(folder, tiny_config(kind, **options))
    model, plan, attention = _load(folder, path)
    assert_equals_transformers(reference, Runner(model, plan, attention), steps=4, tolerance=3e-4)


@pytest.mark.parametrize("name", NATIVE)
def test_the_cpu_backends_operators_equal_transformers(name: str, tmp_path: Path) -> None:
    _check(*NATIVE[name], tmp_path, "modules")


@pytest.mark.parametrize("name", ["qwen2-moe", "gpt-oss"])
def test_a_mixtures_sequence_has_the_same_bits_alone_and_in_a_batch(name: str, tmp_path: Path) -> None:
    kind, options = NATIVE[name]
    save_tiny(tmp_path, tiny_config(kind, **options))
    model, plan, attention = _load(tmp_path, "modules", dtype=DType.BFLOAT16)
    alone, together = Runner(model, plan, attention), Runner(model, plan, attention)
    for step in ([3, 17, 90, 4, 55], [8], [33]):
        expected = alone.step([(0, step)])
        assert torch.equal(together.step([(1, step[::-1]), (0, step), (2, [5, 99])])[1:2], expected)


@pytest.mark.parametrize("name", [name for name in NATIVE if name not in {*MIXTURES, *NOT_FUSED}])
def test_the_cpu_backends_fused_decoder_equals_transformers(name: str, tmp_path: Path) -> None:
    _check(*NATIVE[name], tmp_path, "fused")


@pytest.mark.parametrize("name", ["gpt2", "olmo", "phi", "starcoder2-window"])
def test_the_cpu_backends_attention_serves_transformers_code(name: str, tmp_path: Path) -> None:
    _check(*FALLBACK[name], tmp_path, "transformers")


@pytest.mark.parametrize("name", NOT_FUSED)
def test_what_the_native_decoder_does_not_know_runs_as_modules(name: str, tmp_path: Path) -> None:
    from hardpoint_cpu.descriptor import hardpoint_backend

    kind, options = NATIVE[name]
    save_tiny(tmp_path, tiny_config(kind, **options))
    descriptor = hardpoint_backend()
    device = Device(backend="cpu", index=0, name="test", torch_device="cpu", total_memory=1 << 34)
    parts = {part: descriptor.make(part, device) for part in ("attention", "allocator", "kernels")}
    _, model, _, _ = open_and_load(tmp_path, block_size=8, **parts)
    assert model.path == "modules"
