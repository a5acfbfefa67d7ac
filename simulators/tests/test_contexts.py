"""Initialisation, devices and current contexts, as each vendor has them."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest

from .drivers import Access, Cuda, Driver, G, Location, device_properties

Result = TypeVar("Result")


@pytest.fixture
def two(cuda: Cuda) -> Iterator[Cuda]:
    """The CUDA driver with two devices, device 0 current."""
    cuda.simulator.set("devices", 2)
    yield cuda
    cuda.use(0)


def in_thread(work: Callable[[], Result]) -> Result:
    results: list[Result] = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    thread.join()
    return results[0]


def test_virtual_memory_needs_a_current_context(two: Cuda) -> None:
    address, _ = two.block()
    _, spare = two.create(G)
    _, free = two.reserve(G)
    two.use(None)
    for refused in (
        lambda: two.create(G)[0],
        lambda: two.map(free, G, spare),
        lambda: two.access(address, G),
        lambda: two.unmap(address, G),
        lambda: two.read(address, 1)[0],
        lambda: two.memory_info()[0],
    ):
        with two.breaking("no context is current"):
            assert refused() == 201
    # Address space and handles belong to no context.
    assert two.reserve(G)[0] == 0
    assert two.release(spare) == 0
    assert two.free(free, G) == 0


def test_virtual_memory_needs_the_context_of_its_device(two: Cuda) -> None:
    address, _ = two.block()
    _, spare = two.create(G)
    _, free = two.reserve(G)
    two.use(1)
    for refused in (
        lambda: two.create(G, two.properties(0))[0],
        lambda: two.map(free, G, spare),
        lambda: two.access(address, G),
        lambda: two.unmap(address, G),
    ):
        with two.breaking("context is of another device"):
            assert refused() == 201
    assert two.create(G, two.properties(1))[0] == 0
    assert (two.simulator.used(0), two.simulator.used(1)) == (2 * G, G)


def test_context_rule_can_be_switched_off(two: Cuda) -> None:
    two.simulator.set("context_rule", 0)
    two.use(None)
    assert two.create(G, two.properties(1))[0] == 0
    address, _ = two.block()
    assert two.unmap(address, G) == 0
    assert two.simulator.violations() == []


def test_current_context_is_a_threads_own(cuda: Cuda) -> None:
    assert cuda.create(G)[0] == 0
    assert in_thread(lambda: cuda.create(G)[0]) == 201

    def with_context() -> int:
        cuda.use(0)
        return cuda.create(G)[0]

    assert in_thread(with_context) == 0


def test_contexts_stack(two: Cuda) -> None:
    def current() -> int:
        code, device = two.make("cuCtxGetDevice")
        return device if code == 0 else -code

    assert current() == 0
    assert two.call("cuCtxPushCurrent_v2", two.context(1)) == 0
    assert current() == 1
    code, popped = two.make("cuCtxPopCurrent_v2")
    assert (code, popped) == (0, two.context(1))
    assert current() == 0
    two.use(None)
    assert current() == -201
    with two.breaking("no context is current"):
        assert two.make("cuCtxPopCurrent_v2")[0] == 201


def test_released_context_is_of_no_use(two: Cuda) -> None:
    context = two.context(1)
    two.use(1)
    assert two.call("cuDevicePrimaryCtxRelease_v2", 1) == 0
    with two.breaking("was released"):
        assert two.create(G, two.properties(1))[0] == 709
    with two.breaking("was released"):
        assert two.call("cuCtxSetCurrent", context) == 201
    with two.breaking("not retained"):
        assert two.call("cuDevicePrimaryCtxRelease_v2", 1) == 201


def test_references_to_contexts_are_counted_and_reported(two: Cuda) -> None:
    before = two.simulator.stats().context_references
    assert two.make("cuDevicePrimaryCtxRetain", 1)[0] == 0
    assert two.simulator.stats().context_references == before + 1
    assert any("references to device contexts" in line for line in two.simulator.leaks())
    flags, active = ctypes.c_uint(), ctypes.c_int()
    assert two.call("cuDevicePrimaryCtxGetState", 1, ctypes.byref(flags), ctypes.byref(active)) == 0
    assert active.value == 1
    assert two.call("cuDevicePrimaryCtxRelease_v2", 1) == 0
    assert two.simulator.stats().context_references == before


def test_last_release_takes_streams_and_plain_allocations_along(two: Cuda) -> None:
    assert two.make("cuDevicePrimaryCtxRetain", 1)[0] == 0
    two.use(1)
    assert two.make("cuMemAlloc_v2", 100)[0] == 0
    two.stream()
    stats = two.simulator.stats()
    assert (stats.allocations, stats.streams) == (1, 1)
    two.call("cuDevicePrimaryCtxReset_v2", 1)
    stats = two.simulator.stats()
    assert (stats.allocations, stats.streams) == (0, 0)


def test_plain_allocations_are_no_virtual_memory(cuda: Cuda) -> None:
    code, address = cuda.make("cuMemAlloc_v2", 100)
    assert code == 0
    assert cuda.write(address, b"plain") == 0
    assert cuda.read(address, 5) == (0, b"plain")
    with cuda.breaking("not the start of a mapping"):
        assert cuda.unmap(address, G) == 1
    with cuda.breaking("not the start of a reservation"):
        assert cuda.free(address, G) == 1
    assert cuda.call("cuMemFree_v2", address) == 0
    with cuda.breaking("not the start of an allocation"):
        assert cuda.call("cuMemFree_v2", address) == 1
    assert cuda.simulator.used() == 0


def test_peer_needs_access_of_its_own(two: Cuda) -> None:
    address, _ = two.block()
    two.write(address, b"shared")
    two.use(1)
    with two.breaking("no access"):
        assert two.read(address, 6)[0] == 700
    two.use(0)
    both = (Access * 2)(Access(Location(1, 0), 3), Access(Location(1, 1), 1))
    assert two.call("cuMemSetAccess", address, G, both, 2) == 0
    two.use(1)
    assert two.read(address, 6) == (0, b"shared")
    assert two.write(address, b"x") == 700


def test_each_device_has_its_own_capacity(two: Cuda) -> None:
    two.simulator.capacity = 2 * G
    assert two.create(2 * G)[0] == 0
    assert two.create(G)[0] == 2
    two.use(1)
    assert two.memory_info() == (0, 2 * G, 2 * G)
    assert two.create(2 * G, device_properties(1))[0] == 0


@pytest.mark.parametrize(("vendor", "call"), [("cuda", "cuDeviceGet"), ("rocm", "hipDeviceGet")])
def test_devices_beyond_the_count_are_refused(vendor: str, call: str, request: pytest.FixtureRequest) -> None:
    driver: Driver = request.getfixturevalue(vendor)
    assert driver.make(call, 0) == (0, 0)
    assert driver.make(call, 1)[0] == 101
    driver.simulator.set("devices", 2)
    assert driver.make(call, 1) == (0, 1)


def test_hip_device_is_a_threads_own(rocm: Driver) -> None:
    rocm.simulator.set("devices", 2)
    assert rocm.call("hipSetDevice", 1) == 0
    assert rocm.make("hipGetDevice") == (0, 1)
    assert in_thread(lambda: rocm.make("hipGetDevice")) == (0, 0)
    assert rocm.call("hipSetDevice", 2) == 101
    assert rocm.call("hipSetDevice", 0) == 0


def test_hip_keeps_the_last_error_of_a_thread(rocm: Driver) -> None:
    rocm.call("hipGetLastError")
    assert rocm.call("hipSetDevice", 5) == 101
    assert in_thread(lambda: rocm.call("hipGetLastError")) == 0
    assert rocm.call("hipPeekAtLastError") == 101
    assert rocm.call("hipGetLastError") == 101
    assert rocm.call("hipGetLastError") == 0


def test_ascend_manages_memory_in_the_default_context_only(ascend: Driver) -> None:
    code, default = ascend.make("aclrtGetCurrentContext")
    assert code == 0
    code, other = ascend.make("aclrtCreateContext", 0)
    assert code == 0
    with ascend.breaking("not the device's default one"):
        assert ascend.create(G)[0] == 107002
    ascend.simulator.set("context_rule", 0)
    assert ascend.create(G)[0] == 0
    assert ascend.call("aclrtSetCurrentContext", default) == 0
    assert ascend.call("aclrtDestroyContext", other) == 0
    ascend.simulator.set("context_rule", 1)
    assert ascend.create(G)[0] == 0


def test_ascend_thread_without_a_device_has_no_context(ascend: Driver) -> None:
    assert in_thread(lambda: ascend.create(G)[0]) == 107002
    assert ascend.simulator.violations() == ["aclrtMallocPhysical: no context is current"]


def test_ascend_is_initialised_once(ascend: Driver) -> None:
    assert ascend.call("aclInit", None) == 100002


def test_ascend_tells_the_latest_failure_once(ascend: Driver) -> None:
    message = ascend.library["aclGetRecentErrMsg"]
    message.restype = ctypes.c_char_p
    message()
    ascend.create(3)
    assert message() == b"simulated driver: aclrtMallocPhysical answered 107000"
    assert message() is None
