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
from hardpoint_rocm import capabilities, descriptor

DEVICE = Device("rocm", 0, "any", "any")
REQUEST = AttentionRequest((AttentionLayer(8, 8, 64, 0.125),), DType.BFLOAT16, DType.BFLOAT16, 16, 4096)


def test_memory_works_without_torchs_build_and_every_other_part_is_refused() -> None:
    backend = descriptor.hardpoint_backend()
    claims = backend.capabilities(DEVICE)
    assert claims.explain(REQUEST)
    assert claims.memory.sleep_levels == {0, 1, 2}
    assert claims.memory.torch_pool is TorchPoolScope.NONE
    assert "no attention: the installed torch is not built for ROCm" in claims.notes
    assert (claims.tensor_parallel, claims.collectives) == (IntSet(), ())
    assert issubclass(backend.allocator(), DeviceAllocator)
    for part in (backend.attention, backend.worker, backend.kernels):
        with pytest.raises(CapabilityRefused, match=r"not built for ROCm.*Install torch's build for ROCm"):
            part()


def test_everything_is_claimed_where_nothing_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = descriptor.hardpoint_backend()
    monkeypatch.setattr(capabilities, "requirements", tuple)
    claims = backend.capabilities(DEVICE)
    assert claims.explain(REQUEST) == ()
    assert claims.attention.graph_level is GraphLevel.UNIFORM_DECODE
    assert (claims.collectives, 2 in claims.tensor_parallel) == ((), False)
    monkeypatch.setattr(capabilities, "has_rccl", lambda: True)
    claims = backend.capabilities(DEVICE)
    assert (claims.collectives, 8 in claims.tensor_parallel, 9 in claims.tensor_parallel) == (("rccl",), True, False)
    assert any("not verified on hardware" in note for note in claims.notes)


@pytest.mark.parametrize(("lanes", "usable"), [("64", True), ("32", False)])
def test_attention_needs_the_wavefront_of_its_tiles(monkeypatch: pytest.MonkeyPatch, lanes: str, usable: bool) -> None:
    monkeypatch.setattr(capabilities, "requirements", tuple)
    claims = capabilities.capabilities(replace(DEVICE, properties={"wavefront": lanes}))
    reason = "no attention: the device has wavefronts of 32 lanes, and the kernels' tiles are made for 64"
    assert bool(claims.explain(REQUEST)) is not usable
    assert (reason in claims.notes) is not usable
