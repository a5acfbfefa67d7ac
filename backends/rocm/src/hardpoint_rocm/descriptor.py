"""The backend's descriptor: found through the entry point `rocm`, imported without torch and without a driver."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pluggy

from hardpoint.interfaces import BackendDescriptor, ProbeResult
from hardpoint.memory.driver_probe import probe_devices
from hardpoint.triton.backend import triton_backend
from hardpoint_rocm import allocator, capabilities
from hardpoint_rocm.libraries import DRIVER_VARIABLE, SONAMES, runtimes

if TYPE_CHECKING:
    from hardpoint.interfaces import AttentionBackend

hookimpl = pluggy.HookimplMarker("hardpoint")


def probe() -> ProbeResult:
    """Look for the HIP runtime and its devices; raises BackendBroken, DriverError."""
    return probe_devices(
        Path(__file__).with_name("driver.py"),
        DRIVER_VARIABLE,
        (*runtimes(), *SONAMES),
        backend="rocm",
        torch_type="cuda",
        obstacles=capabilities.reasons,
    )


def _attention() -> type[AttentionBackend]:
    from hardpoint_rocm.attention import RocmAttention

    return RocmAttention


@hookimpl
def hardpoint_backend() -> BackendDescriptor:
    """Return the descriptor."""
    return triton_backend(
        capabilities.BUILD,
        vendor="AMD",
        api=(1, 1),
        library="ROCm's HIP runtime (libamdhip64.so)",
        variable=DRIVER_VARIABLE,
        probe=probe,
        capabilities=capabilities.capabilities,
        allocator=allocator.allocator,
        attention=_attention,
        driver=allocator.driver,
    )
