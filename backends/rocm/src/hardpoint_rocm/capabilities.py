"""What the backend claims for a device: its memory always, attention and ranks where torch, Triton and the device allow them."""

from __future__ import annotations

from functools import partial

from hardpoint.interfaces import Capabilities, Device
from hardpoint.memory import torch_has_library
from hardpoint.triton.build import TorchBuild
from hardpoint_rocm.libraries import has_rccl

WAVEFRONT = 64
"""Lanes of the devices that the kernels' tiles are made for (gfx90a, gfx942)."""

BUILD = TorchBuild("rocm", "ROCm", partial(torch_has_library, "libtorch_hip.so"), "rccl", targets="gfx90a and gfx942")


def capabilities(device: Device) -> Capabilities:
    """Return the claims; where something is missing, every request for attention is refused, and the notes say why."""
    return BUILD.capabilities(reasons(device), has_collectives=has_rccl())


def reasons(device: Device) -> tuple[str, ...]:
    """Return why nothing can be computed on a device, one sentence each; empty when it can. Torch is not imported."""
    found = BUILD.requirements()
    if device.properties.get("virtual_memory") == "0":
        found += (
            "the runtime says that the device has no virtual memory management (ROCm 7.0 says so of some MI300X)",
        )
    lanes = device.properties.get("wavefront", str(WAVEFRONT))
    if lanes != str(WAVEFRONT):
        found += (f"the device has wavefronts of {lanes} lanes, and the kernels' tiles are made for {WAVEFRONT}",)
    return found
