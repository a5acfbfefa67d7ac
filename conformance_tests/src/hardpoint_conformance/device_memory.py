"""One device's memory through its driver, entry by entry: what a test of a driver takes, and how it gives it back."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import TypeVar

from hardpoint.memory import DriverTable

Result = TypeVar("Result")


class DeviceMemory:
    """What a test takes of a device through a driver, step by step; `close` gives back what is left.

    Its memory is one handle, or several of one size where `max_chunk` does not allow one. A step that failed goes on where it stopped.
    """

    def __init__(self, driver: DriverTable, size: int) -> None:
        self.driver = driver
        self.size = size
        self.address = self.stream = self.mapped = 0
        self.handles: list[int] = []
        self.registered = False
        self._host = mmap.mmap(-1, size)
        self._view = ctypes.c_char.from_buffer(self._host)
        self.host = ctypes.addressof(self._view)

    def memory_info(self) -> None:
        self.driver.memory_info()

    def device_count(self) -> None:
        self.driver.device_count()

    def device_name(self) -> None:
        self.driver.device_name()

    def driver_version(self) -> None:
        self.driver.driver_version()

    def reserve(self) -> None:
        self.address = self.driver.reserve(self.size)

    def release_address(self) -> None:
        self.driver.release_address(self.address, self.size)
        self.address = 0

    def create(self) -> None:
        while len(self.handles) * self._chunk < self.size:
            self.handles.append(self.driver.create(self._chunk))

    def release(self) -> None:
        while self.handles:
            self.driver.release(self.handles[-1], self._chunk)
            self.handles.pop()

    def map(self) -> None:
        while self.mapped < len(self.handles):
            self.driver.map(self.address + self.mapped * self._chunk, self._chunk, self.handles[self.mapped])
            self.mapped += 1

    def unmap(self) -> None:
        while self.mapped:
            self.driver.unmap(self.address + (self.mapped - 1) * self._chunk, self._chunk)
            self.mapped -= 1

    def stream_create(self) -> None:
        self.stream = self.driver.stream_create()

    def stream_destroy(self) -> None:
        self.driver.stream_destroy(self.stream)
        self.stream = 0

    def copy_to_host(self) -> None:
        self.driver.copy_to_host(self.host, self.address, self.size, self.stream)

    def copy_to_device(self) -> None:
        self.driver.copy_to_device(self.address, self.host, self.size, self.stream)

    def fill(self) -> None:
        self.driver.fill(self.address, 0x5A, self.size, self.stream)

    def stream_synchronize(self) -> None:
        self.driver.stream_synchronize(self.stream)

    def device_synchronize(self) -> None:
        self.driver.device_synchronize()

    def host_register(self) -> None:
        self.driver.host_register(self.host, self.size)
        self.registered = True

    def host_unregister(self) -> None:
        self.driver.host_unregister(self.host, self.size)
        self.registered = False

    def do(self, *entries: str) -> DeviceMemory:
        """Call entries in turn."""
        for entry in entries:
            getattr(self, entry)()
        return self

    def write(self, content: bytes) -> None:
        """Set the bytes of the host memory."""
        ctypes.memmove(self.host, content, len(content))

    def read(self) -> bytes:
        """Return the bytes of the host memory."""
        return ctypes.string_at(self.host, self.size)

    def close(self) -> None:
        """Give everything back."""
        self.driver.device_synchronize()
        for held, entry in (
            (self.mapped, "unmap"),
            (self.handles, "release"),
            (self.address, "release_address"),
            (self.stream, "stream_destroy"),
            (self.registered, "host_unregister"),
        ):
            if held:
                self.do(entry)
        del self._view
        self._host.close()

    @property
    def handle(self) -> int:
        """The first handle."""
        return self.handles[0]

    @cached_property
    def _chunk(self) -> int:
        """Bytes of a handle: the largest that one `create` may be asked for and that divides the size."""
        geometry = self.driver.geometry()
        units, most = self.size // geometry.granularity, (geometry.max_chunk or self.size) // geometry.granularity
        return max(count for count in range(1, min(units, most) + 1) if units % count == 0) * geometry.granularity


MAPPED = ("reserve", "create", "map")

PREREQUISITES: dict[str, tuple[str, ...]] = {
    "memory_info": (),
    "device_count": (),
    "device_name": (),
    "driver_version": (),
    "reserve": (),
    "release_address": ("reserve",),
    "create": (),
    "release": ("create",),
    "map": ("reserve", "create"),
    "unmap": MAPPED,
    "stream_create": (),
    "stream_destroy": ("stream_create",),
    "copy_to_host": (*MAPPED, "stream_create"),
    "copy_to_device": (*MAPPED, "stream_create"),
    "fill": (*MAPPED, "stream_create"),
    "stream_synchronize": (*MAPPED, "stream_create", "fill"),
    "device_synchronize": (*MAPPED, "stream_create", "fill"),
    "host_register": (),
    "host_unregister": ("host_register",),
}
"""The entries that reach the vendor's library, and what each needs before it."""


def in_fresh_thread(work: Callable[[], Result]) -> Result:
    """Return the result of `work` on a thread that has never used a device."""
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(work).result()
