"""What the CUDA driver says of its devices.

Run by `hardpoint.memory.driver_probe` in an interpreter of its own, hence standard library only. Calls and codes are those of
the CUDA Driver API reference (initialisation, version and device management).
"""

from __future__ import annotations

from ctypes import byref, c_char_p, c_int, c_size_t, c_uint, create_string_buffer
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hardpoint.memory.driver_library import DriverLibrary

STUB_LIBRARY, NO_DEVICE = 34, 100
COMPUTE_CAPABILITY_MAJOR, COMPUTE_CAPABILITY_MINOR = 75, 76


def inventory(library: DriverLibrary) -> dict[str, Any]:
    """Return devices, driver version and the reason why there are no devices."""
    status = library.call("cuInit", c_uint(0), allowed=(NO_DEVICE, STUB_LIBRARY))
    if status:
        return {"devices": [], "reason": f"{library.path}: {describe(library, status)}"}
    version, count = c_int(), c_int()
    library.call("cuDriverGetVersion", byref(version))
    library.call("cuDeviceGetCount", byref(count))
    major, minor = divmod(version.value, 1000)
    return {
        "devices": [_device(library, index) for index in range(count.value)],
        "driver_version": f"{major}.{minor // 10}",
        "reason": "" if count.value else f"{library.path} finds no device",
    }


def describe(library: DriverLibrary, status: int) -> str:
    """Return the driver's text for a status."""
    text = c_char_p()
    if (
        library.has("cuGetErrorString")
        and library.function("cuGetErrorString")(status, byref(text)) == 0
        and text.value
    ):
        return text.value.decode(errors="replace")
    return {STUB_LIBRARY: "a stub library and not a driver", NO_DEVICE: "no device found"}.get(status, "unknown error")


def _device(library: DriverLibrary, index: int) -> dict[str, Any]:
    handle, total, major, minor = c_int(), c_size_t(), c_int(), c_int()
    name, bus = create_string_buffer(256), create_string_buffer(32)
    library.call("cuDeviceGet", byref(handle), c_int(index))
    library.call("cuDeviceGetName", name, c_int(len(name)), handle)
    library.call("cuDeviceTotalMem_v2", byref(total), handle)
    library.call("cuDeviceGetPCIBusId", bus, c_int(len(bus)), handle)
    library.call("cuDeviceGetAttribute", byref(major), c_int(COMPUTE_CAPABILITY_MAJOR), handle)
    library.call("cuDeviceGetAttribute", byref(minor), c_int(COMPUTE_CAPABILITY_MINOR), handle)
    return {
        "name": name.value.decode(errors="replace"),
        "total_memory": total.value,
        "properties": {"pci_bus": bus.value.decode(), "compute_capability": f"{major.value}.{minor.value}"},
    }
