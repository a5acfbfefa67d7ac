"""The drivers under test."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
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
    page, free = table.geometry().recommended, table.memory_info()[0]
    table.close()
    room = max(1, min(16, free // (512 * page)))
    return DeviceTarget(backend, index, table, SIMULATION_EXPECTED, room * page, 0 if SIMULATION_EXPECTED else 64 * MIB)


FILLING = """
import importlib, sys
from hardpoint.memory import VirtualPool
backend, index, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
module = importlib.import_module("hardpoint_cpu.driver" if backend == "cpu" else f"hardpoint_{backend}.allocator")
table = module.driver_table() if backend == "cpu" else module.driver_table(index)
pool = VirtualPool(table)
granularity = table.geometry().granularity
piece = max(1, size // 8 // granularity) * granularity
addresses = [pool.allocate(piece) for _ in range(8)]
for address in addresses:
    pool.write(address, b"\\xff" * piece)
for address in addresses[2:]:
    pool.free(address)
print("filled", flush=True)
sys.stdin.read()
"""
"""Takes memory, fills it with ones, gives three quarters of it back, and keeps the rest until its standard input ends."""


@contextmanager
def filled_by_another_process(backend: str, index: int, size: int) -> Iterator[None]:
    """Let another process fill about `size` bytes of a device's free memory, and keep a quarter of them."""
    command = [sys.executable, "-c", FILLING, backend, str(index), str(size)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "filled\n"
        yield
        assert other.stdin is not None
        other.stdin.close()
        assert other.wait(240) == 0


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
