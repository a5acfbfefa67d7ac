"""What the backend claims for a device: its memory always, attention and ranks where torch, Triton and the device allow them."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from hardpoint.interfaces import (
    AttentionCapabilities,
    Capabilities,
    Determinism,
    Device,
    IntSet,
    MemoryCapabilities,
    SleepTier,
    TorchPoolScope,
)
from hardpoint.interfaces.errors import CapabilityRefused
from hardpoint.memory import torch_has_library
from hardpoint.triton import triton_attention_capabilities
from hardpoint.triton.choice import Attention, AttentionChoice, attention_choice
from hardpoint_cuda.flashinfer import flashinfer_attention_capabilities, flashinfer_obstacle, flashinfer_version

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


def choice() -> AttentionChoice:
    """Return which kernels serve attention, with reasons; raises ConfigError where the environment asks for what is not there.

    flash-attn's rule is that of its releases for these devices (`mha_fwd_kvcache` in its flash_api.cpp).
    """
    flash_attn = "is not used: it pages a cache in blocks of a multiple of 256 tokens, and these have 16 to 128"
    return attention_choice(flashinfer_obstacle(), flash_attn)


def _attention() -> AttentionCapabilities:
    """Return what holds for whichever kernels a plan may choose."""
    kernels = choice().kernels
    if kernels is Attention.FLASHINFER:
        return flashinfer_attention_capabilities()
    claims = triton_attention_capabilities()
    return claims if kernels is Attention.TRITON else replace(claims, determinism=Determinism.RUN_TO_RUN)


def _notes(collectives: tuple[str, ...]) -> tuple[str, ...]:
    chosen = choice()
    release = f"flashinfer: {flashinfer_version()}, whose source has what is called; calls tested over a reference (simulated)"
    return (
        f"attention: {chosen}",
        *(() if chosen.kernels is Attention.TRITON else (release,)),
        "graphs: decode steps, in memory that sleeps",
        *(() if collectives else ("ranks: one, since NCCL is not installed",)),
        "kernels: tested in Triton's interpreter, and compiled for sm_80 and sm_90",
        "attention, graphs, ranks: not verified on hardware",
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
