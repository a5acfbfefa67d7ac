"""Memory drivers whose every call can be made to fail: the CPU's own, and the vendors' over simulated libraries."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hardpoint.memory import DriverTable
from hardpoint_conformance.fault_matrix import FaultTarget, InterposedTarget
from hardpoint_simulators import Simulator
from hardpoint_simulators.control import ANY_CALL

CAPACITY = 1 << 30
GRANULARITY = 1 << 16
"""Of the simulated drivers: small, so that thousands of cases move little memory."""
CODES = {"cuda": (2, 700), "rocm": (2, 700), "ascend": (207001, 507015)}
"""By vendor: the codes of out of memory, and of a failure of another kind."""


class CpuTarget(InterposedTarget):
    """The CPU's driver.

    Args:
        chunk: its largest chunk, in granules; None for its own, of 64 MiB.
    """

    def __init__(self, chunk: int | None = None) -> None:
        from hardpoint_cpu.driver import driver_table

        def geometry(below: Callable[..., int], out: Any) -> int:
            status = below(out)
            if chunk is not None:
                out.contents.max_chunk = chunk * out.contents.granularity
            return status

        super().__init__("cpu", driver_table(options={"budget": CAPACITY}), {"geometry": geometry})

    def held(self) -> Mapping[str, int]:
        free, total = self._driver.base.memory_info()
        return {"used, by its own account": total - free, **super().held()}


class SimulatedTarget(FaultTarget):
    """A vendor's driver over its simulated library.

    Args:
        quirks: settings of the simulator besides its defaults.
    """

    # Calls by which the driver finds its bearings; a pool that is open makes them too.
    _never = ("GetErrorName", "GetErrorString", "GetRecentErrMsg")

    def __init__(self, vendor: str, quirks: Mapping[str, int] | None = None) -> None:
        self._vendor = vendor
        self._quirks = dict(quirks or {})
        self._table: DriverTable | None = None
        self._simulator = Simulator(vendor)  # type: ignore[arg-type]
        self.elastic = self._quirks.get("hold_until_address_free") != 2
        self.name = f"{vendor} (simulated{''.join(f', {quirk}' for quirk in self._quirks)})"

    @property
    def simulator(self) -> Simulator:
        """The simulated library."""
        return self._simulator

    def table(self) -> DriverTable:
        import importlib
        import os

        os.environ[f"HARDPOINT_{self._vendor.upper()}_DRIVER"] = str(self._simulator.path)
        self._simulator.reset()
        self._simulator.capacity = CAPACITY
        self._simulator.set("granularity", GRANULARITY)
        self._simulator.set("recommended_granularity", 0)
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

    def count(self) -> int:
        return self._simulator.stats().calls

    def fail(self, call: str, nth: int) -> None:
        memory = any(part in call for part in ("MemCreate", "MallocPhysical"))
        self._simulator.fail(call, nth, CODES[self._vendor][0 if memory else 1])
        self._armed = (call, self._simulator.call_count(call) + nth)

    def fail_calls(self, *numbers: int) -> None:
        for number in numbers:
            self._simulator.fail(ANY_CALL, number, CODES[self._vendor][1])
        self._armed = ANY_CALL, self.count() + max(numbers)

    def violations(self) -> list[str]:
        return self._simulator.violations()

    def disarm(self) -> bool:
        self._simulator.clear_faults()
        call, at = self._armed
        return (self.count() if call == ANY_CALL else self._simulator.call_count(call)) >= at

    def held(self) -> Mapping[str, int]:
        stats = self._simulator.stats()
        return {
            name: getattr(stats, name)
            for name in ("used", "reservations", "address_space", "handles", "mappings", "streams")
        }

    def left(self) -> Mapping[str, int]:
        return {**self.held(), "pinned ranges": self._simulator.stats().host_ranges}

    def finish(self) -> None:
        if self._table is not None:
            self._table.close()
            self._table = None


def all_targets(cpu_chunk: int | None = None) -> list[FaultTarget]:
    """Return every driver of the workspace; the CPU's with chunks of so many granules."""
    return [
        CpuTarget(cpu_chunk),
        SimulatedTarget("cuda"),
        SimulatedTarget("rocm"),
        SimulatedTarget("rocm", {"hold_until_address_free": 2}),
        SimulatedTarget("ascend"),
    ]


def driver_targets() -> Iterator[FaultTarget]:
    """Yield every driver of the workspace, one at a time, with failures between it and the core, whatever the calls of its vendor."""
    for target in all_targets():
        yield target if isinstance(target, InterposedTarget) else InterposedTarget(target.name, target.table())
