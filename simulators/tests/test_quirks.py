"""Behaviour that can be switched on: what some devices, releases and systems do and others do not."""

from __future__ import annotations

import ctypes

import pytest

from hardpoint_simulators import Simulator, library

from .drivers import AclLocation, AclProperties, Ascend, Driver, G, device_properties


def map_nothing(address: int, size: int) -> None:
    """Let the host's map of the range show pages of nothing, without access."""
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    private, fixed, anonymous, no_reserve = 0x2, 0x10, 0x20, 0x4000
    assert library.mmap(address, size, 0, private | fixed | anonymous | no_reserve, -1, 0) == address


@pytest.mark.parametrize("hold", [1, 2])
def test_memory_returns_with_its_address_range_where_a_runtime_holds_it(rocm: Driver, hold: int) -> None:
    rocm.simulator.set("hold_until_address_free", hold)
    address, handle = rocm.block(2)
    assert rocm.unmap(address, 2 * G) == 0
    assert rocm.release(handle) == 0
    assert (rocm.simulator.used(), rocm.memory_info()[1]) == (2 * G, rocm.simulator.capacity - 2 * G)
    assert rocm.free(address, 2 * G) == 0
    assert rocm.simulator.used() == 0


@pytest.mark.parametrize(("hold", "left"), [(1, G), (2, 2 * G)])
def test_memory_held_by_a_mapping_of_the_host_returns_when_that_is_replaced(rocm: Driver, hold: int, left: int) -> None:
    rocm.simulator.set("hold_until_address_free", hold)
    address, handle = rocm.block(1, reserved=2)
    _, second = rocm.create(G)
    assert rocm.map(address + G, G, second) == rocm.access(address + G, G) == 0
    for start, one in ((address, handle), (address + G, second)):
        assert rocm.unmap(start, G) == rocm.release(one) == 0
    map_nothing(address, G)
    assert rocm.simulator.used() == left
    _, third = rocm.create(G)
    assert rocm.map(address + G, G, third) == 0
    assert rocm.simulator.used() == left if hold == 1 else left + G
    assert rocm.unmap(address + G, G) == rocm.release(third) == rocm.free(address, 2 * G) == 0
    assert rocm.simulator.used() == 0


def test_memory_that_was_never_mapped_is_not_held(rocm: Driver) -> None:
    rocm.simulator.set("hold_until_address_free", 1)
    _, handle = rocm.create(G)
    assert rocm.release(handle) == 0
    assert rocm.simulator.used() == 0


def test_access_is_added_up_from_the_first_mapping_of_the_reservation(rocm: Driver) -> None:
    rocm.simulator.set("access_from_first", 1)
    _, address = rocm.reserve(5 * G)
    for start, chunks in ((0, 2), (2, 2), (4, 1)):
        _, handle = rocm.create(chunks * G)
        assert rocm.map(address + start * G, chunks * G, handle) == 0
    assert rocm.access(address, 2 * G) == 0
    assert rocm.access(address + 2 * G, 2 * G) == 0
    assert rocm.access(address + 4 * G, G) == rocm.codes.invalid
    assert rocm.access(address, 5 * G) == 0
    assert rocm.simulator.violations() == []


def test_unmapping_waits_for_work_on_other_memory(rocm: Driver) -> None:
    rocm.simulator.set("deferred", 1)
    (busy, _), (idle, _), (last, _) = (rocm.block() for _ in range(3))
    for waits in (0, 1):
        rocm.simulator.set("unmap_waits", waits)
        assert rocm.fill(busy, 1, G, rocm.stream()) == 0
        assert rocm.unmap((idle, last)[waits], G) == 0
        stats = rocm.simulator.stats()
        assert (stats.pending == 0, stats.unmaps_waited) == (bool(waits), waits)


def test_writes_to_a_new_mapping_are_lost_as_often_as_set(driver: Driver) -> None:
    driver.simulator.set("late_mapping", 2)
    address, _ = driver.block()
    for text, seen in ((b"one", False), (b"two", False), (b"three", True)):
        assert driver.write(address, text) == 0
        assert (driver.read(address, len(text)) == (0, text)) is seen


def test_thief_takes_the_addresses_that_are_freed(driver: Driver) -> None:
    for thief in (0, 1):
        driver.simulator.set("thief", thief)
        _, address = driver.reserve(2 * G)
        assert driver.free(address, 2 * G) == 0
        with open("/proc/self/maps") as lines:
            taken = any(
                int(start, 16) <= address and address + 2 * G <= int(end, 16)
                for start, end in (line.split()[0].split("-") for line in lines)
            )
        assert taken is bool(thief)


def test_profile_of_the_mi300x_is_what_its_users_found(mi300x: Driver) -> None:
    assert [granularity(mi300x, device_properties(), option)[1] for option in (0, 1)] == [4096, G]
    documented = {**mi300x.documented, "granularity": 4096, "recommended_granularity": G}
    found = {name: mi300x.simulator.get(name) for name in mi300x.documented}
    assert found == {name: value or 1 for name, value in documented.items()}


def test_largest_chunk_is_a_setting(driver: Driver) -> None:
    driver.simulator.set("max_chunk", 4 * G)
    assert driver.create(5 * G)[0] == driver.codes.out_of_memory
    assert driver.create(4 * G)[0] == 0
    assert driver.simulator.violations() == []


def test_refused_alignment_is_an_answer_and_no_broken_rule(rocm: Driver) -> None:
    rocm.simulator.set("refuse_alignment", 1)
    assert rocm.reserve(G, alignment=G)[0] == rocm.codes.out_of_memory
    assert rocm.reserve(G, alignment=0)[0] == 0
    assert rocm.simulator.violations() == []


@pytest.mark.parametrize(("stale", "byte"), [(0, b"\0"), (1, b"\xa5")])
def test_new_memory_holds_zeros_or_the_pattern_of_stale_pages(driver: Driver, stale: int, byte: bytes) -> None:
    driver.simulator.set("stale_pages", stale)
    ends = 16 << 10
    address, _ = driver.block()
    for start in (address, address + G - ends):
        assert driver.read(start, ends) == (0, byte * ends)


def test_free_memory_counter_lags_for_as_many_questions_as_set(driver: Driver) -> None:
    driver.simulator.set("free_counter_lag", 2)
    total = driver.simulator.capacity
    _, handle = driver.create(G)
    assert driver.memory_info() == (0, total - G, total)
    assert driver.release(handle) == 0
    assert [driver.memory_info()[1] for _ in range(3)] == [total - G, total - G, total]
    assert driver.simulator.used() == 0


def test_device_without_virtual_memory_says_so(cuda: Driver) -> None:
    value = ctypes.c_int()
    assert cuda.call("cuDeviceGetAttribute", ctypes.byref(value), 102, 0) == 0
    assert value.value == 1
    cuda.simulator.set("virtual_memory", 0)
    assert cuda.call("cuDeviceGetAttribute", ctypes.byref(value), 102, 0) == 0
    assert value.value == 0
    assert cuda.reserve(G)[0] == 801
    assert cuda.create(G)[0] == 801


def granularity(driver: Driver, properties: ctypes.Structure, option: int = 0) -> tuple[int, int]:
    code, value = driver.make(driver.granularity_call, ctypes.byref(properties), option)
    return code, value


def test_granularity_depends_on_the_properties(cuda: Driver) -> None:
    cuda.simulator.set("shareable_granularity", 2 * G)
    cuda.simulator.set("recommended_granularity", 8 * G)
    posix = device_properties(handle_types=1)
    assert granularity(cuda, device_properties()) == (0, G)
    assert granularity(cuda, device_properties(), option=1) == (0, 8 * G)
    assert granularity(cuda, posix) == (0, 2 * G)
    with cuda.breaking("not a multiple"):
        assert cuda.create(G, posix)[0] == cuda.codes.invalid
    assert cuda.create(2 * G, posix)[0] == 0


@pytest.mark.parametrize(
    ("settings", "properties", "code"),
    [
        ({"posix_handles": 1}, {"handle_types": 1}, 0),
        ({"posix_handles": 0}, {"handle_types": 1}, 801),
        ({"fabric_handles": 0}, {"handle_types": 8}, 801),
        ({"fabric_handles": 1}, {"handle_types": 8}, 0),
        ({"fabric_handles": 2}, {"handle_types": 8}, 800),
        ({"rdma": 0}, {"rdma": 1}, 801),
        ({"rdma": 1}, {"rdma": 1}, 0),
        ({}, {"handle_types": 2}, 801),
    ],
)
def test_sharing_must_be_supported(
    cuda: Driver, settings: dict[str, int], properties: dict[str, int], code: int
) -> None:
    for name, value in settings.items():
        cuda.simulator.set(name, value)  # type: ignore[arg-type]
    assert cuda.create(G, device_properties(**properties))[0] == code


def test_hip_shares_no_memory_unless_set(rocm: Driver) -> None:
    assert rocm.create(G, device_properties(handle_types=1))[0] == 801
    rocm.simulator.set("posix_handles", 1)
    assert rocm.create(G, device_properties(handle_types=1))[0] == 0


@pytest.mark.parametrize(
    ("attribute", "accepted"), [(4, True), (5, True), (13, True), (0, False), (2, False), (1, False)]
)
def test_ascend_refuses_attributes_of_other_memory(ascend: Driver, attribute: int, accepted: bool) -> None:
    properties = AclProperties(attribute=attribute, location=AclLocation(0, 1))
    code, _ = ascend.create(G, properties)
    assert code == (0 if accepted else ascend.codes.invalid)


def test_ascend_gigabyte_pages_need_gigabytes(ascend: Driver) -> None:
    properties = AclProperties(attribute=10, location=AclLocation(0, 1))
    out = ctypes.c_size_t()
    assert ascend.call("aclrtMemGetAllocationGranularity", ctypes.byref(properties), 0, ctypes.byref(out)) == 0
    assert out.value == 1 << 30
    assert ascend.create(G, properties)[0] == ascend.codes.invalid
    assert ascend.create(1 << 30, properties)[0] == 0


def test_ascend_page_types_must_match_where_set(ascend: Driver) -> None:
    ascend.simulator.set("match_page_type", 1)
    _, normal = ascend.reserve(G, flags=0)
    _, huge = ascend.reserve(G, flags=1)
    _, handle = ascend.create(G)
    with ascend.breaking("different page types"):
        assert ascend.map(normal, G, handle) == ascend.codes.invalid
    assert ascend.map(huge, G, handle) == 0


def test_ascend_reservation_holds_memory_of_one_device(ascend: Driver) -> None:
    ascend.simulator.set("devices", 2)
    ascend.simulator.set("context_rule", 0)
    _, address = ascend.reserve(2 * G)
    _, first = ascend.create(G, ascend.properties(0))
    _, second = ascend.create(G, ascend.properties(1))
    assert ascend.map(address, G, first) == 0
    with ascend.breaking("memory of another device"):
        assert ascend.map(address + G, G, second) == ascend.codes.invalid


def test_ascend_copy_takes_the_size_of_its_target_and_no_address(ascend: Driver) -> None:
    address, _ = ascend.block()
    source = ctypes.create_string_buffer(64)
    arguments = (ctypes.addressof(source), 64, 1)
    assert ascend.call("aclrtMemcpy", address, 64, *arguments) == 0
    with ascend.breaking("more bytes than fit"):
        assert ascend.call("aclrtMemcpy", address, 63, *arguments) == ascend.codes.invalid
    with ascend.breaking("beyond its reservation"):
        assert ascend.call("aclrtMemcpy", address, address + 128, *arguments) == ascend.codes.invalid


def test_ascend_copies_between_mapped_addresses_on_a_stream_only(ascend: Driver) -> None:
    (source, _), (target, _) = ascend.block(), ascend.block()
    stream = ascend.stream()
    with ascend.breaking("only aclrtMemcpyAsync"):
        assert ascend.copy(target, source, G, 3) == 207000
    assert ascend.copy(target, source, G, 3, stream) == 0


def test_ascend_without_the_optional_functions() -> None:
    full, minimal = (ctypes.CDLL(str(library("ascend", minimal=flag))) for flag in (False, True))
    for name in ("aclrtMemGetAllocationGranularity", "aclrtMemSetAccess", "aclrtMemGetAccess"):
        assert hasattr(full, name)
        assert not hasattr(minimal, name)
    driver = Ascend(Simulator("ascend", minimal=True))
    driver.start()
    driver.simulator.reset()
    _, address = driver.reserve(G)
    _, handle = driver.create(G)
    assert driver.map(address, G, handle) == 0
    assert driver.write(address, b"granted by the mapping") == 0
    driver.simulator.reset()
