"""What the backend claims for a device: its memory always, attention and ranks where torch, Triton and the device allow them."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

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

LEAST_COMPUTE_CAPABILITY = (8, 0)
"""What Triton's compiler supports; bfloat16 begins there too."""

MOST_RANKS = 8
"""Devices of one machine that share a model's layers."""

INSTALL = "Install torch's build for CUDA, which brings triton and NCCL"


def capabilities(device: Device) -> Capabilities:
    """Return the claims; where something is missing, every request for attention is refused, and the notes say why."""
    missing = reasons(device)
    collectives = () if missing or not has_nccl() else ("nccl",)
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
    version = device.properties.get("compute_capability", "")
    if version and tuple(map(int, version.split("."))) < LEAST_COMPUTE_CAPABILITY:
        least = ".".join(map(str, LEAST_COMPUTE_CAPABILITY))
        found += (f"the device has compute capability {version}, and Triton's kernels need {least}",)
    return found


def requirements() -> tuple[str, ...]:
    """Return what is not installed that computing needs, one sentence each."""
    needed = {
        "the installed torch is not built for CUDA": torch_has_library("libtorch_cuda.so"),
        "triton is not installed": find_spec("triton") is not None,
    }
    return tuple(sentence for sentence, is_there in needed.items() if not is_there)


def refusal(part: str) -> CapabilityRefused:
    """Return the error for a part that cannot be made for want of what `requirements` lists."""
    return CapabilityRefused(f"the {part} of backend 'cuda' was asked for", requirements(), hint=INSTALL)


def _attention() -> AttentionCapabilities:
    return triton_attention_capabilities()


def _notes(collectives: tuple[str, ...]) -> tuple[str, ...]:
    return (
        "attention: Triton kernels",
        "graphs: decode steps, in memory that sleeps",
        *(() if collectives else ("one rank: NCCL is not installed",)),
        "ranks: not verified on hardware",
    )


def _torch_pool_scope() -> TorchPoolScope:
    """Return what `pool` catches with the torch that is installed, which is not imported."""
    return TorchPoolScope.ALL if torch_has_library("libtorch_cuda.so") else TorchPoolScope.NONE


def has_nccl() -> bool:
    """Return whether NCCL is where torch's builds look for it: in torch's folder, or in NVIDIA's package."""
    package = find_spec("nvidia")
    folders = (package and package.submodule_search_locations) or ()
    return torch_has_library("libnccl.so.2") or any(
        (Path(folder) / "nccl" / "lib" / "libnccl.so.2").exists() for folder in folders
    )
