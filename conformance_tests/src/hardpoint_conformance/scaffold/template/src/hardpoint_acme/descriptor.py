"""What the backend says of itself: found through the entry point `acme`, imported without torch and without a driver."""

import pluggy

from hardpoint.interfaces import AttentionBackend, BackendDescriptor, Device, ProbeResult, Worker
from hardpoint.interfaces.errors import BackendUnavailable
from hardpoint_acme.allocator import AcmeAllocator, driver_table
from hardpoint_acme.capabilities import capabilities

hookimpl = pluggy.HookimplMarker("hardpoint")


def probe() -> ProbeResult:
    """Ask the driver for its devices, without starting one."""
    try:
        table = driver_table(0)
    except BackendUnavailable as error:
        return ProbeResult(reason=str(error))
    name, version = table.device_name(), table.driver_version()
    return ProbeResult((Device("acme", 0, name, "cpu", driver_version=version, simulated=table.simulated),))


def attention() -> type[AttentionBackend]:
    """Return the class of paged attention, which imports torch."""
    from hardpoint_acme.attention import AcmeAttention

    return AcmeAttention


def worker() -> type[Worker]:
    """Return the core's class of a rank, which imports torch. What differs on a device is a `Platform` in the descriptor."""
    from hardpoint.worker import StandardWorker

    return StandardWorker


@hookimpl
def hardpoint_backend() -> BackendDescriptor:
    """Return the descriptor."""
    return BackendDescriptor(
        name="acme", vendor="Acme", api=(1, 1), priority=50, probe=probe, capabilities=capabilities,
        allocator=lambda: AcmeAllocator, attention=attention, worker=worker, driver=lambda device: driver_table(device.index),
    )  # fmt: skip
