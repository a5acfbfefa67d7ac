"""The device's memory: the core's engine over the driver in `native/driver.cpp`."""

from hardpoint.interfaces import Device
from hardpoint.memory import DriverTable, VirtualAllocator, open_driver
from hardpoint_acme.capabilities import capabilities


class AcmeAllocator(VirtualAllocator):
    """Tensors in the device's memory, with sleep and wake."""

    def __init__(self, device: Device) -> None:
        """Open the device; raises BackendUnavailable, DriverError."""
        table, claims = driver_table(device.index), capabilities(device).memory
        super().__init__(table, device=device.index, torch_device=device.torch_device, capabilities=claims)


def driver_table(device: int) -> DriverTable:
    """Open the memory driver of a device; raises BackendUnavailable, BackendBroken, DriverError."""
    return open_driver("hardpoint_acme", device)
