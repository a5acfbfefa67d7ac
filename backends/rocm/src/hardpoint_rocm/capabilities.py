"""What the backend claims for a device: its memory always, attention and ranks where torch, Triton and the device allow them."""

from __future__ import annotations

from importlib.util import find_spec

from hardpoint.interfaces import (
    AttentionCapabilities,
    Capabilities,
    Device,
    IntSet,
    MemoryCapabilities,
    SleepTier,
    TorchPoolScope,
)
from hardpoint.interfaces.errors import CapabilityRefused
from hardpoint.memory import torch_has_library
from hardpoint.triton import triton_attention_capabilities

WAVEFRONT = 64
"""Lanes of the devices that the kernels' tiles are made for (gfx90a, gfx942)."""

MOST_RANKS = 8
"""Devices of one machine that share a model's layers."""

INSTALL = "Install torch's build for ROCm, which brings triton and RCCL"


def capabilities(device: Device) -> Capabilities:
    """Return the claims; where something is missing, every request for attention is refused, and the notes say why."""
    missing = reasons(device)
    collectives = () if missing or not has_rccl() else ("rccl",)
    return Capabilities(
        attention=Capabilities.none().attention if missing else _attention(),
        memory=MemoryCapabilities(
            sleep_levels=frozenset({0, 1, 2}), tiers=frozenset(SleepTier), elastic=True, torch_pool=_torch_pool_scope()
        ),
        tensor_parallel=IntSet() if missing else IntSet.between(1, MOST_RANKS if collectives else 1),
        collectives=collectives,
        notes=tuple(f"no attention: {reason}" for reason in missing) or _notes(collectives),
    )


def reasons(device: Device) -> tuple[str, ...]:
    """Return why nothing can be computed on a device, one sentence each; empty when it can. Torch is not imported."""
    found = requirements()
    lanes = device.properties.get("wavefront", str(WAVEFRONT))
    if lanes != str(WAVEFRONT):
        found += (f"the device has wavefronts of {lanes} lanes, and the kernels' tiles are made for {WAVEFRONT}",)
    return found


def requirements() -> tuple[str, ...]:
    """Return what is not installed that computing needs, one sentence each."""
    needed = {
        "the installed torch is not built for ROCm": torch_has_library("libtorch_hip.so"),
        "triton is not installed": find_spec("triton") is not None,
    }
    return tuple(sentence for sentence, is_there in needed.items() if not is_there)


def refusal(part: str) -> CapabilityRefused:
    """Return the error for a part that cannot be made for want of what `requirements` lists."""
    return CapabilityRefused(f"the {part} of backend 'rocm' was asked for", requirements(), hint=INSTALL)


def _attention() -> AttentionCapabilities:
    return triton_attention_capabilities()


def _notes(collectives: tuple[str, ...]) -> tuple[str, ...]:
    return (
        "attention: Triton kernels, compiled for gfx90a and gfx942 in tests; not verified on hardware",
        "graphs: decode steps, in memory that sleeps; not verified on hardware",
        *(() if collectives else ("one rank: RCCL is not installed",)),
        "ranks: not verified on hardware",
    )


def _torch_pool_scope() -> TorchPoolScope:
    """Return what `pool` catches with the torch that is installed, which is not imported."""
    return TorchPoolScope.ALL if torch_has_library("libtorch_hip.so") else TorchPoolScope.NONE


def has_rccl() -> bool:
    """Return whether RCCL came with torch, whose builds for ROCm have it in their folder."""
    return torch_has_library("librccl.so") or torch_has_library("librccl.so.1")
