"""What the HIP runtime says of its devices.

Run by `hardpoint.memory.driver_probe` in an interpreter of its own, hence standard library only. Calls and codes are those of
the HIP runtime API reference (initialisation and device management); the struct of `hipGetDeviceProperties`, whose layout changed
between versions, is avoided.
"""

from __future__ import annotations

from ctypes import byref, c_char_p, c_int, c_size_t, create_string_buffer
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hardpoint.memory.driver_library import DriverLibrary

NO_DEVICE = 100
WARP_SIZE, VIRTUAL_MEMORY = 87, 89
"""Values of hipDeviceAttributeWarpSize, hipDeviceAttributeVirtualMemoryManagementSupported."""


def inventory(library: DriverLibrary) -> dict[str, Any]:
    """Return devices, driver version and the reason why there are no devices."""
    version, count = c_int(), c_int()
    status = library.call("hipGetDeviceCount", byref(count), allowed=(NO_DEVICE,))
    if status:
        return {"devices": [], "reason": f"{library.path}: {describe(library, status)}"}
    library.call("hipDriverGetVersion", byref(version))
    major, rest = divmod(version.value, 10_000_000)
    return {
        "devices": [_device(library, index) for index in range(count.value)],
        "driver_version": f"{major}.{rest // 100_000}",
        "reason": "" if count.value else f"{library.path} finds no device",
    }


def describe(library: DriverLibrary, status: int) -> str:
    """Return the runtime's text for a status."""
    if library.has("hipGetErrorString"):
        text: bytes | None = library.function("hipGetErrorString", c_char_p)(c_int(status))
        if text:
            return text.decode(errors="replace")
    return {NO_DEVICE: "no device found"}.get(status, "unknown error")


def _device(library: DriverLibrary, index: int) -> dict[str, Any]:
    handle, total, wavefront, virtual_memory = c_int(), c_size_t(), c_int(), c_int()
    name, bus = create_string_buffer(256), create_string_buffer(32)
    library.call("hipDeviceGet", byref(handle), c_int(index))
    library.call("hipDeviceGetName", name, c_int(len(name)), handle)
    library.call("hipDeviceTotalMem", byref(total), handle)
    library.call("hipDeviceGetPCIBusId", bus, c_int(len(bus)), c_int(index))
    library.call("hipDeviceGetAttribute", byref(wavefront), c_int(WARP_SIZE), c_int(index))
    library.call("hipDeviceGetAttribute", byref(virtual_memory), c_int(VIRTUAL_MEMORY), c_int(index))
    return {
        "name": name.value.decode(errors="replace"),
        "total_memory": total.value,
        "properties": {
            "pci_bus": bus.value.decode(),
            "wavefront": str(wavefront.value),
            "virtual_memory": str(virtual_memory.value),
        },
    }
