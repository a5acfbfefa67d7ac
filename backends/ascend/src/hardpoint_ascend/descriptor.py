"""The backend's descriptor: found through the entry point `ascend`, imported without torch and without a driver."""

from __future__ import annotations

from pathlib import Path

import pluggy

from hardpoint.interfaces import BackendDescriptor, ProbeResult
from hardpoint.memory.driver_probe import take_inventory
from hardpoint_ascend import allocator, attention, capabilities, worker

DRIVER_VARIABLE = "HARDPOINT_ASCEND_DRIVER"
SONAMES = ("libascendcl.so",)

hookimpl = pluggy.HookimplMarker("hardpoint")


def probe() -> ProbeResult:
    """Look for the CANN runtime and its devices, in a process of its own; raises BackendBroken, DriverError."""
    inventory = take_inventory(Path(__file__).with_name("driver.py"), DRIVER_VARIABLE, SONAMES)
    return ProbeResult(inventory.as_devices("ascend", "npu"), inventory.reason or capabilities.NOT_IMPLEMENTED)


@hookimpl
def hardpoint_backend() -> BackendDescriptor:
    """Return the descriptor."""
    return BackendDescriptor(
        name="ascend",
        vendor="Huawei",
        api=(2, 2),
        probe=probe,
        capabilities=capabilities.capabilities,
        allocator=allocator.allocator,
        attention=attention.attention,
        worker=worker.worker,
        driver=allocator.driver,
        priority=100,
        cluster_resource="NPU",
        install_hint="Install CANN and source its set_env.sh, or give the path of libascendcl.so in HARDPOINT_ASCEND_DRIVER",
    )
