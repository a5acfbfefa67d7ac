"""What the backend claims: by what is installed, and by facts of the device."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hardpoint.interfaces import (
    AttentionLayer,
    AttentionRequest,
    Device,
    DeviceAllocator,
    DType,
    GraphLevel,
    IntSet,
    TorchPoolScope,
)
from hardpoint.interfaces.errors import CapabilityRefused
from hardpoint_cuda import capabilities, descriptor

DEVICE = Device("cuda", 0, "any", "any")
REQUEST = AttentionRequest((AttentionLayer(8, 8, 64, 0.125),), DType.BFLOAT16, DType.BFLOAT16, 16, 4096)


def test_memory_works_without_torchs_build_and_every_other_part_is_refused() -> None:
    backend = descriptor.hardpoint_backend()
    claims = backend.capabilities(DEVICE)
    assert claims.explain(REQUEST)
    assert claims.memory.sleep_levels == {0, 1, 2}
    assert claims.memory.torch_pool is TorchPoolScope.NONE
    assert "no attention: the installed torch is not built for CUDA" in claims.notes
    assert (claims.tensor_parallel, claims.collectives) == (IntSet(), ())
    assert issubclass(backend.allocator(), DeviceAllocator)
    for part in (backend.attention, backend.worker, backend.kernels):
        with pytest.raises(CapabilityRefused, match=r"not built for CUDA.*Install torch's build for CUDA"):
            part()


def test_everything_is_claimed_where_nothing_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = descriptor.hardpoint_backend()
    monkeypatch.setattr(capabilities, "requirements", tuple)
    claims = backend.capabilities(DEVICE)
    assert claims.explain(REQUEST) == ()
    assert claims.attention.graph_level is GraphLevel.UNIFORM_DECODE
    assert (claims.collectives, 2 in claims.tensor_parallel) == ((), False)
    monkeypatch.setattr(capabilities, "has_nccl", lambda: True)
    claims = backend.capabilities(DEVICE)
    assert (claims.collectives, 8 in claims.tensor_parallel, 9 in claims.tensor_parallel) == (("nccl",), True, False)
    assert any("not verified on hardware" in note for note in claims.notes)


@pytest.mark.parametrize(("found", "usable"), [("9.0", True), ("8.0", True), ("7.5", False), ("10.0", True)])
def test_attention_needs_what_the_compiler_supports(monkeypatch: pytest.MonkeyPatch, found: str, usable: bool) -> None:
    monkeypatch.setattr(capabilities, "requirements", tuple)
    claims = capabilities.capabilities(replace(DEVICE, properties={"compute_capability": found}))
    reason = "no attention: the device has compute capability 7.5, and Triton's kernels need 8.0"
    assert bool(claims.explain(REQUEST)) is not usable
    assert (reason in claims.notes) is not usable
