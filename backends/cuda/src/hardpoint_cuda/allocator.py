"""The device's memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from hardpoint.memory import driver_file
from hardpoint.memory.driver_table import DriverTable
from hardpoint_cuda.capabilities import refusal

if TYPE_CHECKING:
    from hardpoint.interfaces import DeviceAllocator


def allocator() -> type[DeviceAllocator]:
    """Refuse: this version has no memory allocator; raises CapabilityRefused."""
    raise refusal("memory allocator")


def driver_table(device: int, options: Mapping[str, object] | None = None) -> DriverTable:
    """Return the memory driver of a device; the vendor's library is found as the probe finds it.

    Args:
        device: index of the device.
        options: `shareable` (none, posix or fabric: the kind of handle by which other processes can be
            given the memory).

    Raises:
        BackendBroken: the driver was not built, or for another contract.
        BackendUnavailable: the vendor's library or the device is not here.
        DriverError: a vendor call failed, or an option is not one of those above.
    """
    return DriverTable(driver_file("hardpoint_cuda"), device=device, options=options)
