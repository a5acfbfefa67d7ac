"""The drivers under test."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from importlib import import_module

from hardpoint.memory import DriverTable, driver_file

DEVICE = os.environ.get("HARDPOINT_DEVICE", "")
"""The device to test, `<backend>:<index>`."""

SIMULATION_EXPECTED = os.environ.get("HARDPOINT_DEVICE_SIMULATED") == "1"
"""The device's driver is known to be a simulation; on any other, one that turns out to be simulated is a failure."""

CAPACITY = 1 << 30
MIB = 1 << 20


@dataclass(frozen=True)
class DeviceTarget:
    """A device's driver.

    Attributes:
        backend: name of the backend.
        simulated: what is expected of the driver.
        unit: bytes that the tests count in; larger on a device that has room.
        slack: bytes by which the driver's count of free memory may be off for reasons of its own (contexts, page tables).
    """

    backend: str
    index: int
    table: DriverTable
    simulated: bool
    unit: int
    slack: int

    def free(self) -> int:
        """Return the device's free bytes by the driver's count."""
        return self.table.memory_info()[0]

    def has_free(self, expected: int) -> bool:
        """Whether the given number of bytes is free by the driver's count, which may lag for a while, within its slack."""
        for _ in range(200):
            if self.free() >= expected - self.slack:
                return True
            time.sleep(0.01)
        return False


def asked_for() -> DeviceTarget:
    """Return the device that HARDPOINT_DEVICE names."""
    backend, _, number = DEVICE.partition(":")
    index = int(number)
    table = import_module(f"hardpoint_{backend}.allocator").driver_table(index)
    table.open()
    granularity, free = table.geometry().granularity, table.memory_info()[0]
    table.close()
    room = max(1, min(16, free // (512 * granularity)))
    return DeviceTarget(
        backend, index, table, SIMULATION_EXPECTED, room * granularity, 0 if SIMULATION_EXPECTED else 64 * MIB
    )


def without_hardware(backend: str) -> DeviceTarget:
    """Return the CPU's driver with a budget, or a vendor's over its simulation."""
    if backend == "cpu":
        table = import_module("hardpoint_cpu.driver").driver_table(options={"budget": CAPACITY})
        return DeviceTarget(backend, 0, table, False, 2 * MIB, 0)
    from hardpoint_simulators import Simulator

    simulator = Simulator(backend)  # type: ignore[arg-type]
    simulator.reset()
    simulator.capacity = CAPACITY
    table = DriverTable(driver_file(f"hardpoint_{backend}"), device=0, library=str(simulator.path))
    return DeviceTarget(backend, 0, table, True, 2 * MIB, 0)
