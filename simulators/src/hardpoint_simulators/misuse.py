"""What a CUDA driver answers to misuse: a probe that records the codes of a real one, for the simulation to be held against.

Run it as `python misuse.py [--library PATH]`, on its own: it needs the standard library only. It prints a JSON object: `driver`
says what was asked, `misuse` maps the name of each misuse to `{"call": function, "code": its answer, "name": the driver's name of
it}`. A misuse that ends the process has the code null and the signal's name. Calls and values are those of cuda.h.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

DEFAULT_LIBRARY = "libcuda.so.1"
HOST_BYTES = 64


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


def _properties(device: int = 0, kind: int = 1, location: int = 1, handle_types: int = 0) -> _Properties:
    return _Properties(type=kind, handle_types=handle_types, location=_Location(location, device))


class Driver:
    """The driver's calls, each of which returns its code, or (code, value) where it makes something."""

    def __init__(self, path: str) -> None:
        self._library = ctypes.CDLL(path)
        self.context = 0
        self.granularity = 0

    def call(self, name: str, *arguments: Any) -> int:
        """Call a function; integers are passed 64 bits wide."""
        wide = (ctypes.c_uint64(value & (1 << 64) - 1) if isinstance(value, int) else value for value in arguments)
        return int(self._library[name](*wide))

    def make(self, name: str, *arguments: Any) -> tuple[int, int]:
        """Call a function whose first parameter is where the result goes."""
        out = ctypes.c_uint64()
        code = self.call(name, ctypes.byref(out), *arguments)
        return code, out.value

    def start(self) -> None:
        """Initialise, and make the primary context of device 0 current; raises RuntimeError with the code that prevents it."""
        code = self.call("cuInit", 0)
        if not code:
            code, self.context = self.make("cuDevicePrimaryCtxRetain", 0)
        code = code or self.call("cuCtxSetCurrent", self.context)
        if not code:
            code, self.granularity = self.make("cuMemGetAllocationGranularity", ctypes.byref(_properties()), 0)
        if code:
            raise RuntimeError(f"the driver cannot be started: {self.error_name(code)} ({code})")

    def error_name(self, code: int) -> str:
        """Return the driver's name of a code."""
        name = ctypes.c_char_p()
        self.call("cuGetErrorName", code, ctypes.byref(name))
        return name.value.decode() if name.value else "unknown"

    def create(self, size: int, properties: _Properties | None = None, flags: int = 0) -> tuple[int, int]:
        return self.make("cuMemCreate", size, ctypes.byref(properties or _properties()), flags)

    def map(self, address: int, size: int, handle: int, offset: int = 0, flags: int = 0) -> int:
        return self.call("cuMemMap", address, size, offset, handle, flags)

    def access(self, address: int, size: int, device: int = 0, flags: int = 3) -> int:
        return self.call("cuMemSetAccess", address, size, ctypes.byref(_Access(_Location(1, device), flags)), 1)

    def healthy(self) -> bool:
        """Whether the context still works: some errors end its life."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        return not (
            self.call("cuCtxSetCurrent", self.context)
            or self.call("cuCtxSynchronize")
            or self.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        )


@dataclass
class Scene:
    """What each misuse finds: a reservation of four granules whose first two hold a block with access, a reservation of four
    granules without anything in it, and a handle of one granule that is not mapped."""

    driver: Driver
    block: int = 0
    handle: int = 0
    free: int = 0
    spare: int = 0
    released: set[int] = field(default_factory=set)
    host: ctypes.Array[ctypes.c_char] = field(default_factory=lambda: ctypes.create_string_buffer(HOST_BYTES))

    @property
    def unit(self) -> int:
        """The granularity, bytes."""
        return self.driver.granularity

    def build(self) -> None:
        """Make everything; raises RuntimeError when the driver cannot."""
        driver, unit = self.driver, self.unit
        codes = []
        for name in ("block", "free"):
            code, address = driver.make("cuMemAddressReserve", 4 * unit, 0, 0, 0)
            setattr(self, name, address)
            codes.append(code)
        for name, size in (("handle", 2 * unit), ("spare", unit)):
            code, handle = driver.create(size)
            setattr(self, name, handle)
            codes.append(code)
        codes += [driver.map(self.block, 2 * unit, self.handle), driver.access(self.block, 2 * unit)]
        if any(codes):
            raise RuntimeError(f"the scene of the misuse cannot be built: {codes}")

    def release(self, handle: int) -> int:
        """Release a handle, which `clear` then leaves alone: releasing it again is undefined."""
        self.released.add(handle)
        return self.driver.call("cuMemRelease", handle)

    def clear(self) -> None:
        """Undo what is left, whatever the misuse did."""
        driver, unit = self.driver, self.unit
        for base in (self.block, self.free):
            for index in range(4):
                for size in (unit, 2 * unit):
                    driver.call("cuMemUnmap", base + index * unit, size)
            driver.call("cuMemAddressFree", base, 4 * unit)
        for handle in {self.handle, self.spare} - self.released:
            self.release(handle)

    def without_context(self, call: Callable[[], int]) -> int:
        """Make a call while no context is current."""
        self.driver.call("cuCtxSetCurrent", 0)
        code = call()
        self.driver.call("cuCtxSetCurrent", self.driver.context)
        return code

    def copy_in(self, address: int, size: int = HOST_BYTES) -> int:
        """Copy host bytes to an address."""
        return self.driver.call("cuMemcpyHtoD_v2", address, self.host, size)


class Misuse(NamedTuple):
    """One misuse.

    Attributes:
        call: the function that is misused.
        make: does it on a fresh scene and returns the answer.
    """

    call: str
    make: Callable[[Scene], int]


def _map_spare(scene: Scene) -> Scene:
    scene.driver.map(scene.free, scene.unit, scene.spare)
    return scene


def _two_mappings(scene: Scene) -> int:
    _, other = scene.driver.create(scene.unit)
    _map_spare(scene).driver.map(scene.free + scene.unit, scene.unit, other)
    code = scene.driver.call("cuMemUnmap", scene.free, 2 * scene.unit)
    scene.release(other)
    return code


def _released_twice(scene: Scene) -> int:
    scene.release(scene.spare)
    return scene.release(scene.spare)


def _map_released(scene: Scene) -> int:
    scene.release(scene.spare)
    return scene.driver.map(scene.free, scene.unit, scene.spare)


def _freed_twice(scene: Scene) -> int:
    scene.driver.call("cuMemAddressFree", scene.free, 4 * scene.unit)
    return scene.driver.call("cuMemAddressFree", scene.free, 4 * scene.unit)


def _copy_after_unmap(scene: Scene) -> int:
    scene.driver.call("cuMemUnmap", scene.block, 2 * scene.unit)
    return scene.copy_in(scene.block)


def _copy_into_read_only(scene: Scene) -> int:
    scene.driver.access(scene.block, 2 * scene.unit, flags=1)
    return scene.copy_in(scene.block)


def _beyond_capacity(scene: Scene) -> int:
    total = ctypes.c_size_t()
    scene.driver.call("cuDeviceTotalMem_v2", ctypes.byref(total), 0)
    return scene.driver.create((total.value // scene.unit + 1) * scene.unit)[0]


def _registered_twice(scene: Scene) -> int:
    address = ctypes.addressof(scene.host)
    scene.driver.call("cuMemHostRegister_v2", address, HOST_BYTES, 0)
    code = scene.driver.call("cuMemHostRegister_v2", address, HOST_BYTES, 0)
    scene.driver.call("cuMemHostUnregister", address)
    return code


def _register_unmapped(scene: Scene) -> int:
    hole = mmap.mmap(-1, mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(hole))
    libc = ctypes.CDLL(None)
    libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(mmap.PAGESIZE))
    code = scene.driver.call("cuMemHostRegister_v2", address, mmap.PAGESIZE, 0)
    libc.mmap.restype = ctypes.c_void_p
    fixed = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x10  # MAP_FIXED: the object above will unmap it again
    libc.mmap(ctypes.c_void_p(address), ctypes.c_size_t(mmap.PAGESIZE), mmap.PROT_READ, fixed, -1, ctypes.c_long(0))
    return code


def _destroyed_stream(scene: Scene) -> int:
    _, stream = scene.driver.make("cuStreamCreate", 1)
    scene.driver.call("cuStreamDestroy_v2", stream)
    return scene.driver.call("cuStreamSynchronize", stream)


def _memory_info(scene: Scene) -> int:
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    return scene.driver.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))


def _granularity(scene: Scene, properties: _Properties | None, option: int) -> int:
    return scene.driver.make("cuMemGetAllocationGranularity", ctypes.byref(properties) if properties else 0, option)[0]


def _reserve(scene: Scene, size: int, alignment: int = 0, flags: int = 0) -> int:
    code, address = scene.driver.make("cuMemAddressReserve", size, alignment, 0, flags)
    if not code:
        scene.driver.call("cuMemAddressFree", address, size)
    return code


def _create(scene: Scene, size: int, properties: _Properties | None = None, flags: int = 0) -> int:
    code, handle = scene.driver.create(size, properties, flags)
    if not code:
        scene.driver.call("cuMemRelease", handle)
    return code


MISUSES: dict[str, Misuse] = {
    "reserve-size-zero": Misuse("cuMemAddressReserve", lambda s: _reserve(s, 0)),
    "reserve-size-half-granularity": Misuse("cuMemAddressReserve", lambda s: _reserve(s, s.unit // 2)),
    "reserve-size-odd": Misuse("cuMemAddressReserve", lambda s: _reserve(s, s.unit + 1)),
    "reserve-size-huge": Misuse("cuMemAddressReserve", lambda s: _reserve(s, 1 << 60)),
    "reserve-alignment-three": Misuse("cuMemAddressReserve", lambda s: _reserve(s, s.unit, 3 * s.unit)),
    "reserve-flags": Misuse("cuMemAddressReserve", lambda s: _reserve(s, s.unit, flags=1)),
    "reserve-no-result": Misuse(
        "cuMemAddressReserve", lambda s: s.driver.call("cuMemAddressReserve", 0, s.unit, 0, 0, 0)
    ),
    "reserve-without-context": Misuse("cuMemAddressReserve", lambda s: s.without_context(lambda: _reserve(s, s.unit))),
    "granularity-option": Misuse("cuMemGetAllocationGranularity", lambda s: _granularity(s, _properties(), 7)),
    "granularity-no-properties": Misuse("cuMemGetAllocationGranularity", lambda s: _granularity(s, None, 0)),
    "granularity-device": Misuse("cuMemGetAllocationGranularity", lambda s: _granularity(s, _properties(99), 0)),
    "create-size-zero": Misuse("cuMemCreate", lambda s: _create(s, 0)),
    "create-size-half-granularity": Misuse("cuMemCreate", lambda s: _create(s, s.unit // 2)),
    "create-flags": Misuse("cuMemCreate", lambda s: _create(s, s.unit, flags=1)),
    "create-no-properties": Misuse("cuMemCreate", lambda s: s.driver.make("cuMemCreate", s.unit, 0, 0)[0]),
    "create-type": Misuse("cuMemCreate", lambda s: _create(s, s.unit, _properties(kind=7))),
    "create-location": Misuse("cuMemCreate", lambda s: _create(s, s.unit, _properties(location=0))),
    "create-device": Misuse("cuMemCreate", lambda s: _create(s, s.unit, _properties(99))),
    "create-handle-type": Misuse("cuMemCreate", lambda s: _create(s, s.unit, _properties(handle_types=64))),
    "create-beyond-capacity": Misuse("cuMemCreate", _beyond_capacity),
    "create-without-context": Misuse("cuMemCreate", lambda s: s.without_context(lambda: _create(s, s.unit))),
    "release-unknown": Misuse("cuMemRelease", lambda s: s.driver.call("cuMemRelease", 12345)),
    "release-twice": Misuse("cuMemRelease", _released_twice),
    "release-while-mapped": Misuse("cuMemRelease", lambda s: s.release(s.handle)),
    "map-unreserved": Misuse("cuMemMap", lambda s: s.driver.map(64 * s.unit, s.unit, s.spare)),
    "map-address-half-granularity": Misuse("cuMemMap", lambda s: s.driver.map(s.free + s.unit // 2, s.unit, s.spare)),
    "map-size-half-granularity": Misuse("cuMemMap", lambda s: s.driver.map(s.free, s.unit // 2, s.spare)),
    "map-offset": Misuse("cuMemMap", lambda s: s.driver.map(s.free, s.unit, s.handle, offset=s.unit)),
    "map-flags": Misuse("cuMemMap", lambda s: s.driver.map(s.free, s.unit, s.spare, flags=1)),
    "map-beyond-handle": Misuse("cuMemMap", lambda s: s.driver.map(s.free, 2 * s.unit, s.spare)),
    "map-part-of-handle": Misuse("cuMemMap", lambda s: s.driver.map(s.free, s.unit, s.handle)),
    "map-beyond-reservation": Misuse("cuMemMap", lambda s: s.driver.map(s.free + 3 * s.unit, 2 * s.unit, s.handle)),
    "map-twice": Misuse("cuMemMap", lambda s: s.driver.map(s.block, s.unit, s.spare)),
    "map-into-a-mapping": Misuse("cuMemMap", lambda s: s.driver.map(s.block + s.unit, s.unit, s.spare)),
    "map-unknown-handle": Misuse("cuMemMap", lambda s: s.driver.map(s.free, s.unit, 12345)),
    "map-released-handle": Misuse("cuMemMap", _map_released),
    "map-without-context": Misuse(
        "cuMemMap", lambda s: s.without_context(lambda: s.driver.map(s.free, s.unit, s.spare))
    ),
    "access-unmapped": Misuse("cuMemSetAccess", lambda s: s.driver.access(s.free, s.unit)),
    "access-partly-unmapped": Misuse("cuMemSetAccess", lambda s: s.driver.access(s.block, 3 * s.unit)),
    "access-part-of-mapping": Misuse("cuMemSetAccess", lambda s: s.driver.access(s.block, s.unit)),
    "access-no-descriptors": Misuse(
        "cuMemSetAccess", lambda s: s.driver.call("cuMemSetAccess", s.block, 2 * s.unit, 0, 1)
    ),
    "access-device": Misuse("cuMemSetAccess", lambda s: s.driver.access(s.block, 2 * s.unit, device=99)),
    "access-flags": Misuse("cuMemSetAccess", lambda s: s.driver.access(s.block, 2 * s.unit, flags=2)),
    "access-without-context": Misuse(
        "cuMemSetAccess", lambda s: s.without_context(lambda: s.driver.access(s.block, 2 * s.unit))
    ),
    "unmap-unmapped": Misuse("cuMemUnmap", lambda s: s.driver.call("cuMemUnmap", s.free, s.unit)),
    "unmap-part-of-mapping": Misuse("cuMemUnmap", lambda s: s.driver.call("cuMemUnmap", s.block, s.unit)),
    "unmap-from-the-middle": Misuse("cuMemUnmap", lambda s: s.driver.call("cuMemUnmap", s.block + s.unit, s.unit)),
    "unmap-beyond-mapping": Misuse("cuMemUnmap", lambda s: s.driver.call("cuMemUnmap", s.block, 3 * s.unit)),
    "unmap-two-mappings": Misuse("cuMemUnmap", _two_mappings),
    "unmap-without-context": Misuse(
        "cuMemUnmap", lambda s: s.without_context(lambda: s.driver.call("cuMemUnmap", s.block, 2 * s.unit))
    ),
    "free-mapped": Misuse("cuMemAddressFree", lambda s: s.driver.call("cuMemAddressFree", s.block, 4 * s.unit)),
    "free-other-size": Misuse("cuMemAddressFree", lambda s: s.driver.call("cuMemAddressFree", s.free, 2 * s.unit)),
    "free-from-the-middle": Misuse(
        "cuMemAddressFree", lambda s: s.driver.call("cuMemAddressFree", s.free + s.unit, 3 * s.unit)
    ),
    "free-twice": Misuse("cuMemAddressFree", _freed_twice),
    "copy-reserved-only": Misuse("cuMemcpyHtoD", lambda s: s.copy_in(s.free)),
    "copy-without-access": Misuse("cuMemcpyHtoD", lambda s: _map_spare(s).copy_in(s.free)),
    "copy-after-unmap": Misuse("cuMemcpyHtoD", _copy_after_unmap),
    "copy-across-the-end": Misuse("cuMemcpyHtoD", lambda s: s.copy_in(s.block + 2 * s.unit - 8)),
    "copy-into-read-only": Misuse("cuMemcpyHtoD", _copy_into_read_only),
    "copy-without-context": Misuse("cuMemcpyHtoD", lambda s: s.without_context(lambda: s.copy_in(s.block))),
    "memory-info-without-context": Misuse("cuMemGetInfo", lambda s: s.without_context(lambda: _memory_info(s))),
    "host-register-twice": Misuse("cuMemHostRegister", _registered_twice),
    "host-register-unmapped": Misuse("cuMemHostRegister", _register_unmapped),
    "host-unregister-unknown": Misuse(
        "cuMemHostUnregister", lambda s: s.driver.call("cuMemHostUnregister", ctypes.addressof(s.host))
    ),
    "free-host-unknown": Misuse("cuMemFreeHost", lambda s: s.driver.call("cuMemFreeHost", ctypes.addressof(s.host))),
    "stream-destroyed": Misuse("cuStreamSynchronize", _destroyed_stream),
    "device-out-of-range": Misuse("cuDeviceGet", lambda s: s.driver.make("cuDeviceGet", 99)[0]),
}
"""All misuses by name. A few are legal, or are where the documents are silent; the table tells which."""

Answer = dict[str, Any]
Table = dict[str, Answer]


def record(library: str = DEFAULT_LIBRARY) -> dict[str, Any]:
    """Return `{"driver": ..., "misuse": ...}` of a driver library, as the module's description says.

    The misuses are made in a child process, and in a new one after each that ends it or leaves a dead context.

    Raises:
        RuntimeError: the library cannot be loaded, or the driver not be started.
    """
    about: dict[str, Any] = {}
    table: Table = {}
    names = list(MISUSES)
    while len(table) < len(names):
        left = names[len(table) :]
        child = subprocess.run(
            [sys.executable, __file__, "--library", library, "--child", *left],
            capture_output=True,
            text=True,
            check=False,
        )
        lines = [json.loads(line) for line in child.stdout.splitlines()]
        if not lines:
            raise RuntimeError(f"{library} could not be probed: {child.stderr.strip() or child.returncode}")
        about = lines[0]
        table |= {line["misuse"]: line["answer"] for line in lines[1:]}
        if child.returncode < 0 and len(table) < len(names):
            crashed = names[len(table)]
            ending = signal.Signals(-child.returncode).name
            table[crashed] = {"call": MISUSES[crashed].call, "code": None, "name": ending}
    return {"driver": about, "misuse": table}


def differences(recorded: Table, observed: Table) -> dict[str, tuple[int | None, int | None]]:
    """Return {misuse: (recorded code, observed code)} of those that both tables have and that differ."""
    shared = recorded.keys() & observed.keys()
    return {
        name: (recorded[name]["code"], observed[name]["code"])
        for name in sorted(shared)
        if recorded[name]["code"] != observed[name]["code"]
    }


def _about(driver: Driver, library: str) -> dict[str, Any]:
    version = ctypes.c_int()
    name = ctypes.create_string_buffer(256)
    driver.call("cuDriverGetVersion", ctypes.byref(version))
    driver.call("cuDeviceGetName", name, len(name), 0)
    return {
        "library": library,
        "simulated": hasattr(ctypes.CDLL(library), "hardpoint_simulated_driver"),
        "driver_version": version.value,
        "device": name.value.decode(errors="replace"),
        "granularity": driver.granularity,
    }


def _child(library: str, names: list[str]) -> None:
    driver = Driver(library)
    driver.start()
    print(json.dumps(_about(driver, library)), flush=True)
    for name in names:
        scene = Scene(driver)
        scene.build()
        code = MISUSES[name].make(scene)
        answer = {"call": MISUSES[name].call, "code": code, "name": driver.error_name(code)}
        print(json.dumps({"misuse": name, "answer": answer}), flush=True)
        if not driver.healthy():
            return
        scene.clear()


def main() -> None:
    """Print the table of the driver named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--library", default=DEFAULT_LIBRARY, help="driver library, a path or a name to look for")
    parser.add_argument("--child", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        _child(options.library, options.child)
        return
    try:
        table = record(options.library)
    except RuntimeError as error:
        sys.exit(str(error))
    json.dump(table, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
