"""What the backend claims for a device: its memory always, attention and ranks where torch, Triton and the device allow them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from hardpoint.interfaces import AttentionCapabilities, Capabilities, Determinism, Device, GraphLevel
from hardpoint.memory import torch_has_library, torch_platform_version
from hardpoint.triton import triton_attention_capabilities
from hardpoint.triton.build import TorchBuild
from hardpoint.triton.choice import TRITON, AttentionChoice, attention_choice
from hardpoint_cuda.flashinfer import (
    FLASHINFER,
    flashinfer_attention_capabilities,
    flashinfer_obstacle,
    flashinfer_version,
)

MIN_COMPUTE_CAPABILITY = (8, 0)
"""What Triton's compiler supports; bfloat16 begins there too."""

BUILD = TorchBuild(
    "cuda",
    "CUDA",
    partial(torch_has_library, "libtorch_cuda.so"),
    "nccl",
    targets="sm_80 and sm_90",
    verified="on an H200 with a driver for CUDA 13.0 (docs/device-check.md)",
)


def capabilities(device: Device) -> Capabilities:
    """Return the claims; where something is missing, every request for attention is refused, and the notes say why."""
    return BUILD.capabilities(
        reasons(device), has_collectives=has_nccl(), attention=_attention, attention_notes=_attention_notes
    )


def reasons(device: Device) -> tuple[str, ...]:
    """Return why nothing can be computed on a device, one sentence each; empty when it can. Torch is not imported."""
    found = BUILD.requirements()
    version = device.properties.get("compute_capability", "")
    if version and tuple(map(int, version.split("."))) < MIN_COMPUTE_CAPABILITY:
        least = ".".join(map(str, MIN_COMPUTE_CAPABILITY))
        found += (f"the device has compute capability {version}, and Triton's kernels need {least}",)
    # A driver runs any toolkit of its own major version, and of earlier ones (CUDA compatibility guide, "minor version compatibility").
    toolkit, driver = torch_platform_version("cuda"), device.driver_version.partition(".")[0]
    if toolkit and driver.isdecimal() and int(driver) < toolkit[0]:
        found += (
            f"the driver supports CUDA up to {device.driver_version}, and torch is built for CUDA {'.'.join(map(str, toolkit))}:"
            f" install a driver for CUDA {toolkit[0]}, or torch's build for CUDA {driver}",
        )
    return found


def choice() -> AttentionChoice:
    """Return which kernels serve attention, with reasons; raises ConfigError where the environment asks for what is not there.

    flash-attn's rule is that of its releases for these devices (`mha_fwd_kvcache` in its flash_api.cpp).
    """
    flash_attn = "is not used: it pages a cache in blocks of a multiple of 256 tokens, and these have 16 to 128"
    return attention_choice({FLASHINFER: flashinfer_obstacle(), "flash-attn": flash_attn})


def _attention() -> AttentionCapabilities:
    """Return what holds for whichever kernels a plan may choose."""
    kernels = choice().kernels
    if kernels == FLASHINFER:
        return flashinfer_attention_capabilities()
    claims = triton_attention_capabilities()
    if kernels == TRITON:
        return claims
    return replace(claims, determinism=Determinism.RUN_TO_RUN, graph_level=GraphLevel.UNIFORM_DECODE)


def _attention_notes() -> tuple[str, ...]:
    chosen = choice()
    release = f"flashinfer: {flashinfer_version()}, whose source has what is called; calls tested over a reference (simulated)"
    return (f"attention: {chosen}", *(() if chosen.kernels == TRITON else (release,)))


def has_nccl() -> bool:
    """Return whether NCCL is where torch's builds look for it: in torch's folder, or in NVIDIA's package."""
    package = find_spec("nvidia")
    folders = (package and package.submodule_search_locations) or ()
    return torch_has_library("libnccl.so.2") or any(
        (Path(folder) / "nccl" / "lib" / "libnccl.so.2").exists() for folder in folders
    )
