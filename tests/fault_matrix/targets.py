"""Memory drivers whose every call can be made to fail: the CPU's own, and the vendors' over simulated libraries."""

from __future__ import annotations

from collections.abc import Mapping

from hardpoint.memory import DriverTable
from hardpoint_conformance.fault_matrix import FaultTarget

CAPACITY = 1 << 30
GRANULARITY = 1 << 16
"""Of the simulated drivers: small, so that thousands of cases move little memory."""
CODES = {"cuda": (2, 700), "rocm": (2, 700), "ascend": (207001, 507015)}
"""By vendor: the codes of out of memory, and of a failure of another kind."""


class CpuTarget(FaultTarget):
    """The CPU's driver, which makes its own entries fail."""

    name = "cpu"
    _entries = (
        "reserve",
        "release_address",
        "create",
        "release",
        "map",
        "unmap",
        "copy_to_host",
        "copy_to_device",
        "fill",
        "stream_create",
        "stream_synchronize",
        "device_synchronize",
        "memory_info",
    )

    def table(self) -> DriverTable:
        from hardpoint_cpu.driver import DriverFaults, driver_table

        self._table = driver_table(options={"budget": CAPACITY})
        self._faults = DriverFaults(self._table)
        self._armed: tuple[str, int] | None = None
        return self._table

    def calls(self) -> dict[str, int]:
        return {entry: self._faults.calls(entry) for entry in self._entries}

    def fail(self, call: str, nth: int) -> None:
        self._faults.fail(call, nth)
        self._armed = (call, self._faults.calls(call) + nth)

    def disarm(self) -> bool:
        if self._armed is None:
            return False
        call, at = self._armed
        self._faults.fail(call, 1, 0)
        self._armed = None
        return self._faults.calls(call) >= at

    def held(self) -> Mapping[str, int]:
        free, total = self._table.memory_info()
        return {"used": total - free}

    def finish(self) -> None:
        self._armed = None


class SimulatedTarget(FaultTarget):
    """A vendor's driver over its simulated library.

    Args:
        quirks: settings of the simulator besides its defaults.
    """

    # Calls by which the driver finds its bearings; a pool that is open makes them too.
    _never = ("GetErrorName", "GetErrorString", "GetRecentErrMsg")

    def __init__(self, vendor: str, quirks: Mapping[str, int] | None = None) -> None:
        from hardpoint_simulators import Simulator

        self._vendor = vendor
        self._quirks = dict(quirks or {})
        self._table: DriverTable | None = None
        self._simulator = Simulator(vendor)  # type: ignore[arg-type]
        self.elastic = "hold_until_address_free" not in self._quirks
        self.name = f"{vendor} (simulated{''.join(f', {quirk}' for quirk in self._quirks)})"

    def table(self) -> DriverTable:
        import importlib
        import os

        os.environ[f"HARDPOINT_{self._vendor.upper()}_DRIVER"] = str(self._simulator.path)
        self._simulator.reset()
        self._simulator.capacity = CAPACITY
        self._simulator.set("granularity", GRANULARITY)
        for quirk, value in self._quirks.items():
            self._simulator.set(quirk, value)  # type: ignore[arg-type]
        if self._table is None:
            self._table = importlib.import_module(f"hardpoint_{self._vendor}.allocator").driver_table(0)
            self._table.open()  # a driver remembers what it found by probing as long as it is open
            self._table.quirks()
        return self._table

    def calls(self) -> dict[str, int]:
        calls = self._simulator.calls()
        return {call: count for call, count in calls.items() if not call.endswith(self._never)}

    def fail(self, call: str, nth: int) -> None:
        memory = any(part in call for part in ("MemCreate", "MallocPhysical"))
        self._simulator.fail(call, nth, CODES[self._vendor][0 if memory else 1])
        self._armed = (call, self._simulator.call_count(call) + nth)

    def violations(self) -> list[str]:
        return self._simulator.violations()

    def disarm(self) -> bool:
        self._simulator.clear_faults()
        call, at = self._armed
        return self._simulator.call_count(call) >= at

    def held(self) -> Mapping[str, int]:
        stats = self._simulator.stats()
        return {
            name: getattr(stats, name)
            for name in ("used", "reservations", "address_space", "handles", "mappings", "streams")
        }

    def finish(self) -> None:
        if self._table is not None:
            self._table.close()
            self._table = None


def all_targets() -> list[FaultTarget]:
    """Return every driver of the workspace."""
    return [
        CpuTarget(),
        SimulatedTarget("cuda"),
        SimulatedTarget("rocm"),
        SimulatedTarget("rocm", {"hold_until_address_free": 1, "stale_pages": 1}),
        SimulatedTarget("ascend"),
    ]
