"""The CPU's memory driver: opening it, and making its calls fail in tests.

The driver itself is native (`native/driver`, library `_driver.so`): anonymous huge pages with a budget. Accesses to memory that is
not mapped fault.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

from hardpoint.memory import DriverTable, driver_file
from hardpoint.memory.driver_table import CAPSULE_NAME


def driver_table(device: int = 0, options: Mapping[str, object] | None = None) -> DriverTable:
    """Open the memory driver.

    Args:
        device: 0, the only one.
        options: `budget`, bytes of the device's memory (0 or nothing: the host's); `streaming`, how large memory is copied
            (`avx512`, `avx2`, `sse2`, `portable`; else the best there is). For tests: `fail=<entry>:<nth>[:<times>]` (see
            `DriverFaults.fail`), `keep_address=0` (as on a kernel that cannot move pages and keep their address).

    Raises:
        BackendBroken: the driver was not built.
        BackendUnavailable: another device was asked for.
        DriverError: an option is unknown or malformed.
    """
    return DriverTable(driver_file("hardpoint_cpu"), device=device, options=options)


def use_small_pages(table: DriverTable, address: int, size: int) -> None:
    """Let memory at these addresses take small pages, from now on until the address is released: for what is touched here and there.

    Args:
        address: of a reservation or in one, a multiple of the driver's granularity.
        size: bytes.

    Raises ValueError for addresses that are not such ones.
    """
    call = ctypes.CDLL(str(table.module)).hp_cpu_driver_use_small_pages
    call.argtypes, call.restype = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t], ctypes.c_int32
    if call(_address_of(table), address, size):
        raise ValueError(
            f"{size} bytes at {address:#x} are not within one reservation, or do not begin at its granularity"
        )


class DriverFaults:
    """Makes calls of one opened CPU driver fail, and counts them. For tests."""

    def __init__(self, table: DriverTable):
        """Attach to a driver that `driver_table` opened."""
        library = ctypes.CDLL(str(table.module))
        self._fail = library.hp_cpu_driver_fail
        self._fail.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int64, ctypes.c_int64]
        self._fail.restype = ctypes.c_int32
        self._calls = library.hp_cpu_driver_calls
        self._calls.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
        self._calls.restype = ctypes.c_int64
        self._table = _address_of(table)

    def fail(self, entry: str, nth: int = 1, times: int = 1) -> None:
        """Make the nth call of an entry from here on (1 = the next), and `times` - 1 calls after it, fail without doing anything.

        Negative `times` means all after it, 0 none. `create` ends with OUT_OF_MEMORY, others with FAILED. Raises ValueError for
        an entry that this driver does not have.
        """
        if self._fail(self._table, entry.encode(), nth, times):
            raise ValueError(f"the CPU driver has no call {nth} of '{entry}'")

    def calls(self, entry: str) -> int:
        """Return how often an entry was called, failed calls included; raises ValueError for an unknown one."""
        calls: int = self._calls(self._table, entry.encode())
        if calls < 0:
            raise ValueError(f"the CPU driver has no entry '{entry}'")
        return calls


def _address_of(table: DriverTable) -> int | None:
    pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
    pointer_of.argtypes, pointer_of.restype = [ctypes.py_object, ctypes.c_char_p], ctypes.c_void_p
    address: int | None = pointer_of(table.capsule, CAPSULE_NAME)
    return address
