"""The device's memory: the core's engine over the driver in `native/driver.c`."""

from contextlib import AbstractContextManager

from hardpoint.interfaces import Device, Policy
from hardpoint.memory import DriverTable, VirtualAllocator, driver_file, factory_call_pool
from hardpoint_acme.capabilities import capabilities


class AcmeAllocator(VirtualAllocator):
    """Tensors in the device's memory, with sleep and wake."""

    def __init__(self, device: Device) -> None:
        """Open the device; raises BackendUnavailable, DriverError."""
        table, claims = driver_table(device.index), capabilities(device).memory
        super().__init__(table, device=device.index, torch_device=device.torch_device, capabilities=claims)

    def pool(self, tag: str, policy: Policy = Policy.PRESERVE) -> AbstractContextManager[None]:
        """Put what torch's factory calls of this thread make into this memory."""
        return factory_call_pool(self, tag, policy)


def driver_table(device: int) -> DriverTable:
    """Open the memory driver of a device; raises BackendUnavailable, BackendBroken, DriverError."""
    return DriverTable(driver_file("hardpoint_acme"), device=device)
