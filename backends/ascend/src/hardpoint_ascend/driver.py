"""What the CANN runtime says of its devices.

Run by `hardpoint.memory.driver_probe` in an interpreter of its own, hence standard library only: `aclInit` may be called once
in a process. Calls and codes are those of the AscendCL reference (initialisation and device management). Memory sizes would
need a started device and stay unknown.
"""

from __future__ import annotations

from ctypes import byref, c_char_p, c_int32, c_uint32, create_string_buffer
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hardpoint.memory.driver_library import DriverLibrary

NO_DEVICE = 207004
PACKAGE_CANN = 0
VERSION_BYTES = 512
"""Of `aclCANNPackageVersion`, which begins with the whole version as text."""


def inventory(library: DriverLibrary) -> dict[str, Any]:
    """Return devices, driver version and the reason why there are no devices."""
    count = c_uint32()
    status = library.call("aclInit", None, allowed=(NO_DEVICE,))
    status = status or library.call("aclrtGetDeviceCount", byref(count), allowed=(NO_DEVICE,))
    if status:
        return {"devices": [], "reason": f"{library.path}: {describe(library, status)}"}
    major, minor, patch = c_int32(), c_int32(), c_int32()
    library.call("aclrtGetVersion", byref(major), byref(minor), byref(patch))
    chip: bytes | None = library.function("aclrtGetSocName", c_char_p)()
    name = chip.decode(errors="replace") if chip else "unknown chip"
    return {
        "devices": [{"name": name, "properties": _cann(library)} for _ in range(count.value)],
        "driver_version": f"{major.value}.{minor.value}.{patch.value}",
        "reason": "" if count.value else f"{library.path} finds no device",
    }


def _cann(library: DriverLibrary) -> dict[str, str]:
    """Return CANN's version, which is another than the runtime's; empty where it does not tell."""
    version = create_string_buffer(VERSION_BYTES)
    if not library.has("aclsysGetCANNVersion"):
        return {}
    if library.function("aclsysGetCANNVersion")(c_int32(PACKAGE_CANN), version) or not version.value:
        return {}
    return {"cann": version.value.decode(errors="replace")}


def describe(library: DriverLibrary, status: int) -> str:
    """Return the runtime's text for its latest error."""
    if library.has("aclGetRecentErrMsg"):
        text: bytes | None = library.function("aclGetRecentErrMsg", c_char_p)()
        if text:
            return " ".join(text.decode(errors="replace").split())
    return {NO_DEVICE: "no device found"}.get(status, "unknown error")
