"""The backend's descriptor: found through the entry point `rocm`, imported without torch and without a driver."""

from __future__ import annotations

from pathlib import Path

import pluggy

from hardpoint.interfaces import BackendDescriptor, ProbeResult
from hardpoint.memory.driver_probe import take_inventory
from hardpoint_rocm import allocator, attention, capabilities, worker

DRIVER_VARIABLE = "HARDPOINT_ROCM_DRIVER"
SONAMES = ("libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so")

hookimpl = pluggy.HookimplMarker("hardpoint")


def probe() -> ProbeResult:
    """Look for the HIP runtime and its devices, in a process of its own; raises BackendBroken, DriverError."""
    inventory = take_inventory(Path(__file__).with_name("driver.py"), DRIVER_VARIABLE, SONAMES)
    return ProbeResult(inventory.as_devices("rocm", "cuda"), inventory.reason or capabilities.NOT_IMPLEMENTED)


@hookimpl
def hardpoint_backend() -> BackendDescriptor:
    """Return the descriptor."""
    return BackendDescriptor(
        name="rocm",
        vendor="AMD",
        api=(2, 2),
        probe=probe,
        capabilities=capabilities.capabilities,
        allocator=allocator.allocator,
        attention=attention.attention,
        worker=worker.worker,
        driver=allocator.driver,
        priority=100,
        cluster_resource="GPU",
        install_hint="Install ROCm's HIP runtime (libamdhip64.so), or give the path of a driver library in HARDPOINT_ROCM_DRIVER",
    )
