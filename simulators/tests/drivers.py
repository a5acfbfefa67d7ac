"""The vendors' virtual memory calls through ctypes, in one form, so that a rule can be tested on all simulators alike."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from hardpoint_simulators import Simulator
from hardpoint_simulators.control import HIP_AS_DOCUMENTED, Setting

MIB = 1 << 20
G = 2 * MIB
"""Granularity of the simulated devices unless a test sets another."""

READ_WRITE, READ_ONLY = 3, 1
HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE = 1, 2, 3
HOST_PINNED = 0x10000000
"""ACL_HOST_REG_PINNED."""


class Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class Properties(ctypes.Structure):
    """CUmemAllocationProp and hipMemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", Location),
        ("win32", ctypes.c_void_p),
        ("compression", ctypes.c_ubyte),
        ("rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class Access(ctypes.Structure):
    """CUmemAccessDesc and hipMemAccessDesc."""

    _fields_ = (("location", Location), ("flags", ctypes.c_int))


class AclLocation(ctypes.Structure):
    _fields_ = (("id", ctypes.c_uint32), ("type", ctypes.c_int))


class AclProperties(ctypes.Structure):
    """aclrtPhysicalMemProp."""

    _fields_ = (
        ("handle_type", ctypes.c_int),
        ("type", ctypes.c_int),
        ("attribute", ctypes.c_int),
        ("location", AclLocation),
        ("reserve", ctypes.c_uint64),
    )


class AclAccess(ctypes.Structure):
    """aclrtMemAccessDesc."""

    _fields_ = (("flags", ctypes.c_int), ("location", AclLocation), ("reserved", ctypes.c_uint8 * 12))


@dataclass(frozen=True)
class Codes:
    """A vendor's codes."""

    invalid: int
    reserve_invalid: int
    out_of_memory: int
    invalid_device: int
    illegal_address: int
    invalid_handle: int
    not_initialized: int
    null_argument: int
    already_registered: int
    not_registered: int
    not_whole: int
    """A handle is to be mapped in part, or more than it."""
    access_device: int


def device_properties(device: int = 0, **changes: int) -> Properties:
    """Return properties of pinned memory on a device."""
    properties = Properties(type=1, location=Location(1, device))
    for name, value in changes.items():
        setattr(properties, name, value)
    return properties


class Driver:
    """One simulated library. Calls return (code, value) where they make something, otherwise the code.

    Integers are passed as 64 bits wide, which suits narrower parameters of the x86-64 and aarch64 calling conventions too.
    """

    vendor: str
    codes: Codes
    granularity_call: str
    documented: Mapping[Setting, int] = {}

    def __init__(self, simulator: Simulator) -> None:
        self.simulator = simulator
        self.library = ctypes.CDLL(str(simulator.path))

    def call(self, name: str, *arguments: Any) -> int:
        function = self.library[name]
        wide = (ctypes.c_uint64(value & (1 << 64) - 1) if isinstance(value, int) else value for value in arguments)
        return int(function(*wide))

    def make(self, name: str, *arguments: Any) -> tuple[int, int]:
        """Call a function whose first parameter is where the result goes."""
        out = ctypes.c_uint64()
        code = self.call(name, ctypes.byref(out), *arguments)
        return code, out.value

    def start(self) -> None:
        """Initialise the driver, and make device 0 current in this thread."""
        raise NotImplementedError

    def properties(self, device: int = 0) -> Any:
        return device_properties(device)

    def reserve(self, size: int, alignment: int = 0, hint: int = 0, flags: int = 0) -> tuple[int, int]:
        raise NotImplementedError

    def free(self, address: int, size: int) -> int:
        raise NotImplementedError

    def create(self, size: int, properties: Any = None, flags: int = 0) -> tuple[int, int]:
        raise NotImplementedError

    def release(self, handle: int) -> int:
        raise NotImplementedError

    def map(self, address: int, size: int, handle: int, offset: int = 0, flags: int = 0) -> int:
        raise NotImplementedError

    def unmap(self, address: int, size: int) -> int:
        raise NotImplementedError

    def access(self, address: int, size: int, device: int = 0, flags: int = READ_WRITE) -> int:
        raise NotImplementedError

    def write(self, address: int, data: bytes, stream: int | None = None) -> int:
        """Copy host bytes to the device: on a stream, or waiting."""
        buffer = ctypes.create_string_buffer(data, len(data))
        return self.copy(address, ctypes.addressof(buffer), len(data), HOST_TO_DEVICE, stream)

    def read(self, address: int, size: int) -> tuple[int, bytes]:
        buffer = ctypes.create_string_buffer(size)
        code = self.copy(ctypes.addressof(buffer), address, size, DEVICE_TO_HOST)
        return code, buffer.raw

    def copy(self, target: int, source: int, size: int, kind: int, stream: int | None = None) -> int:
        raise NotImplementedError

    def fill(self, address: int, value: int, size: int, stream: int | None = None) -> int:
        raise NotImplementedError

    def memory_info(self) -> tuple[int, int, int]:
        """Return (code, free, total)."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        code = self.call(self.info_call, *self.info_arguments, ctypes.byref(free), ctypes.byref(total))
        return code, free.value, total.value

    info_call: str
    info_arguments: tuple[int, ...] = ()
    stream_create: tuple[str, int]
    stream_destroy: str
    stream_synchronize: str
    host_allocate: tuple[str, int]
    host_free: str
    host_unregister: str
    event_create: tuple[str, int]
    event_destroy: str
    event_record: str
    event_synchronize: str
    stream_wait_event: str

    def register(self, address: int, size: int) -> int:
        raise NotImplementedError

    def stream(self) -> int:
        code, stream = self.make(*self.stream_create)
        assert code == 0
        return stream

    def synchronize(self, stream: int) -> int:
        return self.call(self.stream_synchronize, stream)

    def event(self) -> int:
        code, event = self.make(*self.event_create)
        assert code == 0
        return event

    def pinned(self, size: int) -> int:
        name, *rest = self.host_allocate
        code, address = self.make(name, size, *rest)
        assert code == 0
        return address

    def block(self, chunks: int = 1, reserved: int | None = None) -> tuple[int, int]:
        """Return (address, handle) of memory that is mapped and accessible."""
        code, address = self.reserve((reserved or chunks) * G)
        assert code == 0
        code, handle = self.create(chunks * G)
        assert code == 0
        assert self.map(address, chunks * G, handle) == 0
        assert self.access(address, chunks * G) == 0
        return address, handle

    @contextmanager
    def breaking(self, rule: str) -> Iterator[None]:
        """Expect that exactly one rule is broken, and which."""
        before = len(self.simulator.violations())
        yield
        broken = self.simulator.violations()[before:]
        assert len(broken) == 1, broken
        assert rule in broken[0]


class Cuda(Driver):
    vendor = "cuda"
    codes = Codes(1, 1, 2, 101, 700, 400, 3, 1, 712, 713, 801, 1)
    granularity_call = "cuMemGetAllocationGranularity"
    info_call = "cuMemGetInfo_v2"
    stream_create, stream_destroy, stream_synchronize = (
        ("cuStreamCreate", 1),
        "cuStreamDestroy_v2",
        "cuStreamSynchronize",
    )
    host_allocate, host_free, host_unregister = ("cuMemHostAlloc", 0), "cuMemFreeHost", "cuMemHostUnregister"
    event_create, event_destroy, event_record = ("cuEventCreate", 2), "cuEventDestroy_v2", "cuEventRecord"
    event_synchronize, stream_wait_event = "cuEventSynchronize", "cuStreamWaitEvent"

    def start(self) -> None:
        assert self.call("cuInit", 0) == 0
        self.use(0)

    def context(self, device: int) -> int:
        """Return the primary context of a device, retained once and for all."""
        flags, active = ctypes.c_uint(), ctypes.c_int()
        self.call("cuDevicePrimaryCtxGetState", device, ctypes.byref(flags), ctypes.byref(active))
        code, context = self.make("cuDevicePrimaryCtxRetain", device)
        assert code == 0
        if active.value:
            assert self.call("cuDevicePrimaryCtxRelease_v2", device) == 0
        return context

    def use(self, device: int | None) -> None:
        """Make a device's context current; None: no context."""
        assert self.call("cuCtxSetCurrent", 0 if device is None else self.context(device)) == 0

    def reserve(self, size: int, alignment: int = 0, hint: int = 0, flags: int = 0) -> tuple[int, int]:
        return self.make("cuMemAddressReserve", size, alignment, hint, flags)

    def free(self, address: int, size: int) -> int:
        return self.call("cuMemAddressFree", address, size)

    def create(self, size: int, properties: Any = None, flags: int = 0) -> tuple[int, int]:
        return self.make("cuMemCreate", size, ctypes.byref(properties or self.properties()), flags)

    def release(self, handle: int) -> int:
        return self.call("cuMemRelease", handle)

    def map(self, address: int, size: int, handle: int, offset: int = 0, flags: int = 0) -> int:
        return self.call("cuMemMap", address, size, offset, handle, flags)

    def unmap(self, address: int, size: int) -> int:
        return self.call("cuMemUnmap", address, size)

    def access(self, address: int, size: int, device: int = 0, flags: int = READ_WRITE) -> int:
        return self.call("cuMemSetAccess", address, size, ctypes.byref(Access(Location(1, device), flags)), 1)

    def copy(self, target: int, source: int, size: int, kind: int, stream: int | None = None) -> int:
        name = {1: "cuMemcpyHtoD", 2: "cuMemcpyDtoH", 3: "cuMemcpyDtoD"}[kind]
        if stream is None:
            return self.call(f"{name}_v2", target, source, size)
        return self.call(f"{name}Async_v2", target, source, size, stream)

    def fill(self, address: int, value: int, size: int, stream: int | None = None) -> int:
        if stream is None:
            return self.call("cuMemsetD8_v2", address, value, size)
        return self.call("cuMemsetD8Async", address, value, size, stream)

    def register(self, address: int, size: int) -> int:
        return self.call("cuMemHostRegister_v2", address, size, 0)


class Rocm(Driver):
    vendor = "rocm"
    documented = HIP_AS_DOCUMENTED
    codes = Codes(1, 2, 2, 101, 700, 400, 3, 1, 712, 713, 1, 101)
    granularity_call = "hipMemGetAllocationGranularity"
    info_call = "hipMemGetInfo"
    stream_create, stream_destroy = ("hipStreamCreateWithFlags", 1), "hipStreamDestroy"
    stream_synchronize = "hipStreamSynchronize"
    host_allocate, host_free, host_unregister = ("hipHostMalloc", 0), "hipHostFree", "hipHostUnregister"
    event_create, event_destroy, event_record = ("hipEventCreateWithFlags", 2), "hipEventDestroy", "hipEventRecord"
    event_synchronize, stream_wait_event = "hipEventSynchronize", "hipStreamWaitEvent"

    def start(self) -> None:
        assert self.call("hipInit", 0) == 0
        assert self.call("hipSetDevice", 0) == 0

    def reserve(self, size: int, alignment: int = 0, hint: int = 0, flags: int = 0) -> tuple[int, int]:
        return self.make("hipMemAddressReserve", size, alignment, hint, flags)

    def free(self, address: int, size: int) -> int:
        return self.call("hipMemAddressFree", address, size)

    def create(self, size: int, properties: Any = None, flags: int = 0) -> tuple[int, int]:
        return self.make("hipMemCreate", size, ctypes.byref(properties or self.properties()), flags)

    def release(self, handle: int) -> int:
        return self.call("hipMemRelease", handle)

    def map(self, address: int, size: int, handle: int, offset: int = 0, flags: int = 0) -> int:
        return self.call("hipMemMap", address, size, offset, handle, flags)

    def unmap(self, address: int, size: int) -> int:
        return self.call("hipMemUnmap", address, size)

    def access(self, address: int, size: int, device: int = 0, flags: int = READ_WRITE) -> int:
        return self.call("hipMemSetAccess", address, size, ctypes.byref(Access(Location(1, device), flags)), 1)

    def copy(self, target: int, source: int, size: int, kind: int, stream: int | None = None) -> int:
        if stream is None:
            return self.call("hipMemcpy", target, source, size, kind)
        return self.call("hipMemcpyAsync", target, source, size, kind, stream)

    def fill(self, address: int, value: int, size: int, stream: int | None = None) -> int:
        if stream is None:
            return self.call("hipMemset", address, value, size)
        return self.call("hipMemsetAsync", address, value, size, stream)

    def register(self, address: int, size: int) -> int:
        return self.call("hipHostRegister", address, size, 0)


class Ascend(Driver):
    vendor = "ascend"
    codes = Codes(107000, 107000, 207001, 107001, 507053, 107017, 100001, 100000, 507910, 507911, 107000, 107001)
    granularity_call = "aclrtMemGetAllocationGranularity"
    info_call, info_arguments = "aclrtGetMemInfo", (1,)
    stream_create, stream_destroy = ("aclrtCreateStreamWithConfig", 0), "aclrtDestroyStream"
    stream_synchronize = "aclrtSynchronizeStream"
    host_allocate, host_free, host_unregister = ("aclrtMallocHost",), "aclrtFreeHost", "aclrtHostUnregister"  # type: ignore[assignment]
    event_create, event_destroy, event_record = ("aclrtCreateEventWithFlag", 2), "aclrtDestroyEvent", "aclrtRecordEvent"
    event_synchronize, stream_wait_event = "aclrtSynchronizeEvent", "aclrtStreamWaitEvent"

    def start(self) -> None:
        assert self.call("aclInit", None) in (0, 100002)
        assert self.call("aclrtSetDevice", 0) == 0

    def properties(self, device: int = 0) -> Any:
        return AclProperties(attribute=4, location=AclLocation(device, 1))

    def reserve(self, size: int, alignment: int = 0, hint: int = 0, flags: int = 0) -> tuple[int, int]:
        return self.make("aclrtReserveMemAddress", size, alignment, hint, flags)

    def free(self, address: int, size: int) -> int:
        return self.call("aclrtReleaseMemAddress", address)

    def create(self, size: int, properties: Any = None, flags: int = 0) -> tuple[int, int]:
        return self.make("aclrtMallocPhysical", size, ctypes.byref(properties or self.properties()), flags)

    def release(self, handle: int) -> int:
        return self.call("aclrtFreePhysical", handle)

    def map(self, address: int, size: int, handle: int, offset: int = 0, flags: int = 0) -> int:
        return self.call("aclrtMapMem", address, size, offset, handle, flags)

    def unmap(self, address: int, size: int) -> int:
        return self.call("aclrtUnmapMem", address)

    def access(self, address: int, size: int, device: int = 0, flags: int = READ_WRITE) -> int:
        descriptor = AclAccess(flags=flags, location=AclLocation(device, 1))
        return self.call("aclrtMemSetAccess", address, size, ctypes.byref(descriptor), 1)

    def copy(self, target: int, source: int, size: int, kind: int, stream: int | None = None) -> int:
        if stream is None:
            return self.call("aclrtMemcpy", target, size, source, size, kind)
        return self.call("aclrtMemcpyAsync", target, size, source, size, kind, stream)

    def fill(self, address: int, value: int, size: int, stream: int | None = None) -> int:
        if stream is None:
            return self.call("aclrtMemset", address, size, value, size)
        return self.call("aclrtMemsetAsync", address, size, value, size, stream)

    def register(self, address: int, size: int) -> int:
        return self.call("aclrtHostRegisterV2", address, size, HOST_PINNED)

    def map_host(self, address: int, size: int) -> int:
        """Register host memory for the device to reach, which does not pin it."""
        out = ctypes.c_void_p()
        return self.call("aclrtHostRegister", address, size, 0, ctypes.byref(out))


DRIVERS: dict[str, type[Driver]] = {driver.vendor: driver for driver in (Cuda, Rocm, Ascend)}


def open_driver(vendor: str) -> Driver:
    """Return a started driver without anything in it, as the vendor's documents describe it."""
    simulator = Simulator(vendor)  # type: ignore[arg-type]
    driver = DRIVERS[vendor](simulator)
    simulator.reset()
    driver.start()
    simulator.reset()
    for name, value in driver.documented.items():
        simulator.set(name, value)
    return driver
