"""What the backend claims for a device: its memory, and in this version nothing that computes."""

from __future__ import annotations

from dataclasses import replace

from hardpoint.interfaces import Capabilities, Device, MemoryCapabilities, SleepTier, TorchPoolScope
from hardpoint.interfaces.errors import CapabilityRefused
from hardpoint.memory import torch_has_library

NOT_IMPLEMENTED = "this version of hardpoint-cuda manages the memory of devices and has no attention or worker for them"


def capabilities(device: Device) -> Capabilities:
    """Return the claims for memory; every request for attention is refused with reasons."""
    return replace(
        Capabilities.none(),
        memory=MemoryCapabilities(
            sleep_levels=frozenset({0, 1, 2}), tiers=frozenset(SleepTier), elastic=True, torch_pool=_torch_pool_scope()
        ),
    )


def refusal(part: str) -> CapabilityRefused:
    """Return the error for a part that is not implemented."""
    return CapabilityRefused(f"the {part} of backend 'cuda' was asked for", [NOT_IMPLEMENTED])


def _torch_pool_scope() -> TorchPoolScope:
    """Return what `pool` catches with the torch that is installed, which is not imported."""
    return TorchPoolScope.ALL if torch_has_library("libtorch_cuda.so") else TorchPoolScope.NONE
