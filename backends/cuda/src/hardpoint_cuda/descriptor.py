"""The backend's descriptor: found through the entry point `cuda`, imported without torch and without a driver."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pluggy

from hardpoint.interfaces import BackendDescriptor, ProbeResult
from hardpoint.memory.driver_probe import probe_devices
from hardpoint.triton.backend import triton_backend
from hardpoint_cuda import allocator, capabilities

if TYPE_CHECKING:
    from hardpoint.interfaces import AttentionBackend, Collectives

DRIVER_VARIABLE = "HARDPOINT_CUDA_DRIVER"
SONAMES = ("libcuda.so.1",)

hookimpl = pluggy.HookimplMarker("hardpoint")


def probe() -> ProbeResult:
    """Look for the CUDA driver and its devices; raises BackendBroken, DriverError."""
    return probe_devices(
        Path(__file__).with_name("driver.py"),
        DRIVER_VARIABLE,
        SONAMES,
        backend="cuda",
        torch_type="cuda",
        obstacles=capabilities.reasons,
    )


def _attention() -> type[AttentionBackend]:
    from hardpoint_cuda.attention import attention

    return attention()


def _collectives() -> type[Collectives]:
    from hardpoint_cuda.collectives import CudaCollectives

    return CudaCollectives


@hookimpl
def hardpoint_backend() -> BackendDescriptor:
    """Return the descriptor."""
    return triton_backend(
        capabilities.BUILD,
        vendor="NVIDIA",
        api=(1, 1),
        library="NVIDIA's driver (libcuda.so.1)",
        variable=DRIVER_VARIABLE,
        probe=probe,
        capabilities=capabilities.capabilities,
        allocator=allocator.allocator,
        attention=_attention,
        driver=allocator.driver,
        collectives=_collectives,
    )
