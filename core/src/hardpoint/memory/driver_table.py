"""A memory driver as Python sees it: opened from its library, called entry by entry, and passed on as a capsule.

The core's native engine calls the same table without Python; this face serves opening, `hardpoint doctor`, the conformance suite, and
tests of drivers. The layout mirrors `include/hardpoint/driver.h`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from ctypes import POINTER, byref, c_char, c_char_p, c_int32, c_int64, c_size_t, c_uint8, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass, fields
from enum import IntEnum, IntFlag
from pathlib import Path
from typing import Any

from hardpoint.interfaces.errors import BackendBroken, BackendUnavailable, DeviceOutOfMemory, DriverError

DRIVER_ABI = 1
CAPSULE_NAME = b"hardpoint.driver"


class DriverStatus(IntEnum):
    """What an entry returns."""

    OK = 0
    OUT_OF_MEMORY = 1
    INVALID = 2
    UNSUPPORTED = 3
    NO_LIBRARY = 4
    NO_DEVICE = 5
    FAILED = 6


class DriverFlags(IntFlag):
    """Facts about a driver's memory that never change."""

    HOST_ACCESSIBLE = 1
    FRESH_ZERO = 2
    SIMULATED = 4
    COPIES_BLOCK = 8
    UNMAP_WAITS = 16


class DriverQuirks(IntFlag):
    """Deviations that a driver found by probing the running system."""

    ADDRESS_HOLDS_MEMORY = 1
    STALE_PAGES = 2
    UNIFIED_MEMORY = 4
    FREE_LAGS = 8


class _Error(ctypes.Structure):
    _fields_ = [("code", c_int64), ("call", c_char * 64), ("text", c_char * 320)]


class _Geometry(ctypes.Structure):
    _fields_ = [
        ("granularity", c_size_t),
        ("recommended", c_size_t),
        ("max_chunk", c_size_t),
        ("max_reservation", c_size_t),
        ("copy_threads", c_int32),
        ("dlpack_device", c_int32),
    ]


class _OpenRequest(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("abi", c_uint32),
        ("device", c_int32),
        ("library", c_char_p),
        ("options", c_char_p),
    ]


def _entry(*arguments: Any) -> Any:
    return ctypes.CFUNCTYPE(c_int32, c_void_p, *arguments, POINTER(_Error))


class _Table(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("abi", c_uint32),
        ("flags", c_uint32),
        ("context", c_void_p),
        ("open", _entry()),
        ("close", _entry()),
        ("geometry", _entry(POINTER(_Geometry))),
        ("memory_info", _entry(POINTER(c_uint64), POINTER(c_uint64))),
        ("device_count", _entry(POINTER(c_int32))),
        ("device_name", _entry(c_char_p, c_size_t)),
        ("driver_version", _entry(c_char_p, c_size_t)),
        ("quirks", _entry(POINTER(c_uint64))),
        ("reserve", _entry(c_size_t, c_uint64, POINTER(c_uint64))),
        ("release_address", _entry(c_uint64, c_size_t)),
        ("create", _entry(c_size_t, POINTER(c_uint64))),
        ("release", _entry(c_uint64, c_size_t)),
        ("map", _entry(c_uint64, c_size_t, c_uint64)),
        ("unmap", _entry(c_uint64, c_size_t)),
        ("stream_create", _entry(POINTER(c_uint64))),
        ("stream_destroy", _entry(c_uint64)),
        ("copy_to_host", _entry(c_void_p, c_uint64, c_size_t, c_uint64)),
        ("copy_to_device", _entry(c_uint64, c_void_p, c_size_t, c_uint64)),
        ("fill", _entry(c_uint64, c_uint8, c_size_t, c_uint64)),
        ("stream_synchronize", _entry(c_uint64)),
        ("device_synchronize", _entry()),
        ("host_register", _entry(c_void_p, c_size_t)),
        ("host_unregister", _entry(c_void_p, c_size_t)),
    ]


@dataclass(frozen=True)
class Geometry:
    """How a driver's memory is cut, bytes; see `hp_geometry` in driver.h."""

    granularity: int
    recommended: int
    max_chunk: int
    max_reservation: int
    copy_threads: int
    dlpack_device: int


class DriverTable:
    """One device's memory driver. Entries raise DeviceOutOfMemory or DriverError."""

    def __init__(
        self, module: Path, *, device: int, library: str | None = None, options: Mapping[str, object] | None = None
    ):
        """Open a driver.

        Args:
            module: the driver's own library, which exports `hp_driver_open`.
            device: index of the device.
            library: path of the vendor's library; None for the usual one.
            options: the driver's own settings.

        Raises:
            BackendBroken: the driver cannot be loaded or is built for another contract.
            BackendUnavailable: the vendor's library or the device is not here.
            DriverError: a vendor call failed.
        """
        try:
            self._library = ctypes.CDLL(str(module))
            opener = self._library.hp_driver_open
        except (OSError, AttributeError) as error:
            raise BackendBroken(f"the memory driver {module.name} cannot be loaded", found=str(error)) from error
        text = ";".join(f"{key}={value}" for key, value in (options or {}).items())
        request = _OpenRequest(
            ctypes.sizeof(_OpenRequest),
            DRIVER_ABI,
            device,
            library.encode() if library else None,
            text.encode() or None,
        )
        table, report = POINTER(_Table)(), _Error()
        status = opener(byref(request), byref(table), byref(report))
        if status in (DriverStatus.NO_LIBRARY, DriverStatus.NO_DEVICE):
            raise BackendUnavailable(
                f"the memory driver of device {device} cannot be opened",
                found=_text(report),
                hint="`hardpoint doctor` shows what was found",
            )
        _check(status, report)
        self._table = table.contents
        if self._table.abi != DRIVER_ABI or self._table.struct_size < ctypes.sizeof(_Table):
            raise BackendBroken(
                f"the memory driver {module.name} is built for another contract",
                found=f"driver ABI {self._table.abi}, this core has {DRIVER_ABI}",
            )
        self.module = module
        self.flags = DriverFlags(self._table.flags)
        self.capsule = _capsule(table)

    @property
    def simulated(self) -> bool:
        """The vendor's library is a simulation."""
        return DriverFlags.SIMULATED in self.flags

    def open(self) -> None:
        """Start to use the device."""
        self._call("open")

    def close(self) -> None:
        """End what `open` began."""
        self._call("close")

    def geometry(self) -> Geometry:
        """Return how memory is cut."""
        geometry = _Geometry()
        self._call("geometry", byref(geometry))
        return Geometry(**{field.name: getattr(geometry, field.name) for field in fields(Geometry)})

    def memory_info(self) -> tuple[int, int]:
        """Return free and total bytes of the device."""
        free, total = c_uint64(), c_uint64()
        self._call("memory_info", byref(free), byref(total))
        return free.value, total.value

    def device_count(self) -> int:
        """Return the number of devices."""
        count = c_int32()
        self._call("device_count", byref(count))
        return count.value

    def device_name(self) -> str:
        """Return the device's name."""
        return self._string("device_name")

    def driver_version(self) -> str:
        """Return the version of the vendor's library."""
        return self._string("driver_version")

    def quirks(self) -> DriverQuirks:
        """Probe the running system."""
        bits = c_uint64()
        if self._table.quirks:
            self._call("quirks", byref(bits))
        return DriverQuirks(bits.value)

    def reserve(self, size: int, hint: int = 0) -> int:
        """Return the address of a reserved range."""
        address = c_uint64()
        self._call("reserve", size, hint, byref(address))
        return address.value

    def release_address(self, address: int, size: int) -> None:
        """Give a reserved range back."""
        self._call("release_address", address, size)

    def create(self, size: int) -> int:
        """Return a handle of physical memory."""
        handle = c_uint64()
        self._call("create", size, byref(handle))
        return handle.value

    def release(self, handle: int, size: int) -> None:
        """Give physical memory back."""
        self._call("release", handle, size)

    def map(self, address: int, size: int, handle: int) -> None:
        """Map a handle and grant access."""
        self._call("map", address, size, handle)

    def unmap(self, address: int, size: int) -> None:
        """Undo one mapping."""
        self._call("unmap", address, size)

    def stream_create(self) -> int:
        """Return a new stream."""
        stream = c_uint64()
        self._call("stream_create", byref(stream))
        return stream.value

    def stream_destroy(self, stream: int) -> None:
        """End a stream."""
        self._call("stream_destroy", stream)

    def copy_to_host(self, host: int, address: int, size: int, stream: int) -> None:
        """Copy to the host memory at address `host`."""
        self._call("copy_to_host", host, address, size, stream)

    def copy_to_device(self, address: int, host: int, size: int, stream: int) -> None:
        """Copy from the host memory at address `host`."""
        self._call("copy_to_device", address, host, size, stream)

    def fill(self, address: int, value: int, size: int, stream: int) -> None:
        """Set bytes."""
        self._call("fill", address, value, size, stream)

    def stream_synchronize(self, stream: int) -> None:
        """Wait for one stream."""
        self._call("stream_synchronize", stream)

    def device_synchronize(self) -> None:
        """Wait for all work on the device."""
        self._call("device_synchronize")

    def host_register(self, host: int, size: int) -> None:
        """Pin host memory, where the driver can."""
        if self._table.host_register:
            self._call("host_register", host, size)

    def host_unregister(self, host: int, size: int) -> None:
        """Unpin host memory."""
        if self._table.host_unregister:
            self._call("host_unregister", host, size)

    def _call(self, name: str, *arguments: Any) -> None:
        error = _Error()
        status = getattr(self._table, name)(self._table.context, *arguments, byref(error))
        _check(status, error)

    def _string(self, name: str) -> str:
        buffer = ctypes.create_string_buffer(256)
        self._call(name, buffer, len(buffer))
        return buffer.value.decode(errors="replace")


def _text(error: _Error) -> str:
    return bytes(error.text).decode(errors="replace")


def _check(status: int, error: _Error) -> None:
    if status == DriverStatus.OK:
        return
    call = bytes(error.call).decode(errors="replace")
    if status == DriverStatus.OUT_OF_MEMORY:
        raise DeviceOutOfMemory(f"driver call {call} found no memory", found=f"status {error.code} ({_text(error)})")
    raise DriverError(call, error.code, _text(error))


_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [c_void_p, c_char_p, c_void_p]


def _capsule(table: Any) -> object:
    """Return a capsule without a destructor: tables live to the end of the process, and so does their library."""
    return _new_capsule(ctypes.cast(table, c_void_p), CAPSULE_NAME, None)
