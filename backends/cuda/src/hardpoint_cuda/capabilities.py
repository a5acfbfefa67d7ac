"""What the backend claims for a device: its memory always, attention and ranks where torch, Triton and the device allow them."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from pathlib import Path

from hardpoint.interfaces import Capabilities, Device
from hardpoint.memory import torch_has_library
from hardpoint.triton.platform import TorchPlatform

LEAST_COMPUTE_CAPABILITY = (8, 0)
"""What Triton's compiler supports; bfloat16 begins there too."""

PLATFORM = TorchPlatform(
    "cuda", "CUDA", partial(torch_has_library, "libtorch_cuda.so"), "nccl", targets="sm_80 and sm_90"
)


def capabilities(device: Device) -> Capabilities:
    """Return the claims; where something is missing, every request for attention is refused, and the notes say why."""
    return PLATFORM.capabilities(reasons(device), has_collectives=has_nccl())


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
    return PLATFORM.requirements()


def has_nccl() -> bool:
    """Return whether NCCL is where torch's builds look for it: in torch's folder, or in NVIDIA's package."""
    package = find_spec("nvidia")
    folders = (package and package.submodule_search_locations) or ()
    return torch_has_library("libnccl.so.2") or any(
        (Path(folder) / "nccl" / "lib" / "libnccl.so.2").exists() for folder in folders
    )
