"""Control of a simulated driver from Python: settings, injected faults, counts, broken rules, leaks."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from hardpoint_simulators.libraries import Vendor, library

Setting = Literal[
    "capacity",
    "devices",
    "granularity",
    "recommended_granularity",
    "shareable_granularity",
    "strict_host",
    "deferred",
    "max_chunk",
    "max_reservation",
    "context_rule",
    "release_needs_unmap",
    "hold_until_address_free",
    "access_from_first",
    "unmap_waits",
    "late_mapping",
    "thief",
    "refuse_alignment",
    "stale_pages",
    "free_counter_lag",
    "match_page_type",
    "virtual_memory",
    "posix_handles",
    "fabric_handles",
    "rdma",
    "unified_memory",
    "graphs_keep_memory",
    "old_kernel",
    "version",
]
"""Names of `native/core/settings.hpp`, which says what each means. HARDPOINT_SIM_<NAME> sets it before the library is loaded."""

HIP_AS_DOCUMENTED: dict[Setting, int] = {
    "granularity": 2 << 20,
    "recommended_granularity": 0,
    "access_from_first": 0,
    "hold_until_address_free": 0,
    "unmap_waits": 0,
    "stale_pages": 0,
}
"""Settings that make of the simulated HIP runtime, an MI300X under ROCm 7.2 with all that was found of it, what the documents describe."""

ANY_CALL = "*"
"""Stands for the calls of all functions in `Simulator.fail`."""


class SimulatorError(RuntimeError):
    """The simulated driver refused a control call, as it does all in a forked child."""


@dataclass(frozen=True, slots=True)
class SimulatorStats:
    """What exists in the simulated driver, and what happened since the last reset.

    Attributes:
        reservations: address ranges reserved.
        address_space: bytes of address space reserved, plain allocations included.
        handles: physical memory handles that hold memory.
        mappings: ranges mapped.
        mapped_bytes: bytes mapped, plain allocations included.
        allocations: allocations of the vendor's plain call (such as cuMemAlloc).
        streams: streams that were created and not destroyed.
        events: events that were created and not destroyed.
        pending: asynchronous operations that were not synchronised.
        host_ranges: pinned host ranges, allocated or registered.
        host_bytes: bytes of those.
        context_references: references to device contexts that were not released.
        used: bytes of device memory in use, all devices together.
        calls: vendor calls since the last reset.
        violations: broken rules since the last reset.
        pageable_copies: copies since the last reset of host memory that is not pinned, for which the host may wait.
        unmaps_waited: unmaps since the last reset that had to wait for other work of the device.
    """

    reservations: int
    address_space: int
    handles: int
    mappings: int
    mapped_bytes: int
    allocations: int
    streams: int
    events: int
    pending: int
    host_ranges: int
    host_bytes: int
    context_references: int
    used: int
    calls: int
    violations: int
    pageable_copies: int
    unmaps_waited: int


class _Statistics(ctypes.Structure):
    """`hp_sim_statistics` of native/core/control.h."""

    _fields_ = (("struct_size", ctypes.c_uint64), *((field.name, ctypes.c_uint64) for field in fields(SimulatorStats)))


class Simulator:
    """The control face of one simulated library, which is loaded once per process and shared by all who open it.

    Args:
        vendor: which library; "cuda" and "cudart" control the same machine.
        minimal: see `library`.

    Attributes:
        path: the library.
    """

    def __init__(self, vendor: Vendor, *, minimal: bool = False) -> None:
        self.path: Path = library(vendor, minimal=minimal)
        self._library = ctypes.CDLL(str(self.path))

    def stats(self) -> SimulatorStats:
        """Return the counts."""
        statistics = _Statistics(struct_size=ctypes.sizeof(_Statistics))
        self._call("hp_sim_stats", ctypes.byref(statistics))
        return SimulatorStats(**{field.name: getattr(statistics, field.name) for field in fields(SimulatorStats)})

    def used(self, device: int = 0) -> int:
        """Return the bytes of memory in use on a device."""
        return self._call("hp_sim_used", ctypes.c_int(device), restype=ctypes.c_int64)

    def get(self, name: Setting) -> int:
        """Return a setting; raises SimulatorError for an unknown name."""
        value = ctypes.c_uint64()
        self._call("hp_sim_get", name.encode(), ctypes.byref(value))
        return value.value

    def set(self, name: Setting, value: int) -> None:
        """Change a setting from now on; raises SimulatorError for an unknown name or a value that makes no sense."""
        self._call("hp_sim_set", name.encode(), ctypes.c_uint64(int(value)))

    @property
    def capacity(self) -> int:
        """Bytes of device memory, per device."""
        return self.get("capacity")

    @capacity.setter
    def capacity(self, value: int) -> None:
        self.set("capacity", value)

    def fail(self, call: str, nth: int = 1, code: int = 1, times: int = 1) -> None:
        """Let calls of a vendor function fail before they have any effect.

        Args:
            call: name of the function, with or without the suffix of its version; `ANY_CALL` counts the calls of all.
            nth: the first that fails, counted from now; 1 is the next.
            code: the vendor's code that it returns.
            times: how many in a row fail; negative for all that follow.

        Raises:
            SimulatorError: the library has no such function, or a number is 0.
        """
        self._call("hp_sim_fail", call.encode(), ctypes.c_uint64(nth), ctypes.c_int(code), ctypes.c_int64(times))

    def clear_faults(self) -> None:
        """Let no more calls fail."""
        self._call("hp_sim_clear_faults")

    def delay(self, call: str, seconds: float) -> None:
        """Let every call of a function take that much longer; raises SimulatorError for an unknown function."""
        self._call("hp_sim_delay", call.encode(), ctypes.c_uint32(round(seconds * 1e6)))

    def call_count(self, call: str) -> int:
        """Return the calls of a function since the last reset; raises SimulatorError for an unknown function."""
        return self._call("hp_sim_call_count", call.encode(), restype=ctypes.c_int64)

    def calls(self) -> dict[str, int]:
        """Return the calls since the last reset, by function; functions that were not called are left out."""
        lines = (line.split() for line in self._text("hp_sim_calls").splitlines())
        return {name: int(count) for name, count in lines}

    def violations(self) -> list[str]:
        """Return the broken rules since the last reset, oldest first (at most 1000), as "function: rule"."""
        return self._text("hp_sim_violations").splitlines()

    def leaks(self) -> list[str]:
        """Return what is left, one line per kind; empty when nothing is."""
        return self._text("hp_sim_leaks").splitlines()

    def reset(self) -> None:
        """Free everything, forget counts, faults and violations, and take the settings of the environment again.

        What the vendor's initialisation established stays: the driver is initialised as before, contexts stay retained.
        """
        self._call("hp_sim_reset")

    def _call(
        self, name: str, *arguments: object, restype: type[ctypes.c_int] | type[ctypes.c_int64] = ctypes.c_int
    ) -> int:
        function: Callable[..., int] = self._library[name]
        function.restype = restype  # type: ignore[attr-defined]
        result = function(*arguments)
        if result < 0:
            raise SimulatorError(f"{name}{arguments!r} was refused by {self.path.name}")
        return result

    def _text(self, name: str) -> str:
        size = 4096
        while True:
            buffer = ctypes.create_string_buffer(size)
            length = self._call(name, buffer, ctypes.c_size_t(size), restype=ctypes.c_int64)
            if length < size:
                return buffer.value.decode()
            size = length + 1
