"""Every rule of virtual memory, on every vendor's driver: the right call passes, and the wrong one answers the vendor's code,
is told in words, and changes nothing."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from .drivers import DRIVERS, READ_ONLY, Driver, G, Location, device_properties


@dataclass(frozen=True)
class Rule:
    """A call made rightly and wrongly on a driver that holds `Scene`.

    Attributes:
        code: name in `Codes` of what the wrong call answers.
        text: what the log of violations says of it.
        vendors: where the rule holds.
    """

    name: str
    wrong: Callable[[Driver, Scene], int]
    right: Callable[[Driver, Scene], int]
    code: str
    text: str
    vendors: tuple[str, ...] = ("ascend", "cuda", "rocm")


@dataclass(frozen=True)
class Scene:
    """One block of two chunks at the start of a reservation of four, and a spare handle of one chunk."""

    block: int
    handle: int
    spare: int
    free: int


def make_scene(driver: Driver) -> Scene:
    block, handle = driver.block(2, reserved=4)
    _, spare = driver.create(G)
    _, free = driver.reserve(4 * G)
    return Scene(block, handle, spare, free)


def wrong_type(driver: Driver) -> int:
    properties = driver.properties()
    properties.type = 7
    return driver.create(G, properties)[0]


def unmap_release_twice(driver: Driver, scene: Scene, times: int) -> int:
    driver.unmap(scene.block, 2 * G)
    codes = [driver.release(scene.handle) for _ in range(times)]
    return codes[-1]


def two_spares(driver: Driver, scene: Scene) -> int:
    """Map two chunks next to one another in the free reservation; returns the size of both."""
    _, other = driver.create(G)
    assert driver.map(scene.free, G, scene.spare) == 0
    assert driver.map(scene.free + G, G, other) == 0
    return 2 * G


GPU = ("cuda", "rocm")

RULES = [
    Rule("reserve-size-zero", lambda d, s: d.reserve(0)[0], lambda d, s: d.reserve(G)[0], "reserve_invalid", "size 0"),
    Rule(
        "reserve-size-multiple",
        lambda d, s: d.reserve(G + 4096)[0],
        lambda d, s: d.reserve(3 * G)[0],
        "reserve_invalid",
        "size is not a multiple of the granularity",
        GPU,
    ),
    Rule(
        "reserve-alignment-power-of-two",
        lambda d, s: d.reserve(G, 3 * G)[0],
        lambda d, s: d.reserve(G, 4 * G)[0],
        "reserve_invalid",
        "alignment is not a power of two",
        GPU,
    ),
    Rule(
        "reserve-alignment-zero",
        lambda d, s: d.reserve(G, G)[0],
        lambda d, s: d.reserve(G, 0)[0],
        "reserve_invalid",
        "alignment must be 0",
        ("ascend",),
    ),
    Rule(
        "reserve-flags", lambda d, s: d.reserve(G, flags=2)[0], lambda d, s: d.reserve(G)[0], "null_argument", "flags"
    ),
    Rule(
        "reserve-limit",
        lambda d, s: d.reserve((128 << 30) + G)[0],
        lambda d, s: d.reserve(128 << 30)[0],
        "reserve_invalid",
        "larger than one reservation may be",
        ("ascend",),
    ),
    Rule(
        "reserve-expected-address",
        lambda d, s: d.reserve(G, hint=1 << 40)[0],
        lambda d, s: d.reserve(G)[0],
        "reserve_invalid",
        "expected address",
        ("ascend",),
    ),
    Rule(
        "free-not-a-reservation",
        lambda d, s: d.free(s.free + G, 4 * G),
        lambda d, s: d.free(s.free, 4 * G),
        "invalid",
        "not the start of a reservation",
    ),
    Rule(
        "free-other-size",
        lambda d, s: d.free(s.free, 2 * G),
        lambda d, s: d.free(s.free, 4 * G),
        "invalid",
        "not the size of the reservation",
        GPU,
    ),
    Rule(
        "free-while-mapped",
        lambda d, s: d.free(s.block, 4 * G),
        lambda d, s: d.unmap(s.block, 2 * G) or d.free(s.block, 4 * G),
        "invalid",
        "memory is still mapped",
    ),
    Rule("create-size-zero", lambda d, s: d.create(0)[0], lambda d, s: d.create(G)[0], "invalid", "size 0"),
    Rule(
        "create-size-multiple",
        lambda d, s: d.create(G + 4096)[0],
        lambda d, s: d.create(2 * G)[0],
        "invalid",
        "size is not a multiple of the granularity",
    ),
    Rule("create-flags", lambda d, s: d.create(G, flags=1)[0], lambda d, s: d.create(G)[0], "null_argument", "flags"),
    Rule("create-type", lambda d, s: wrong_type(d), lambda d, s: d.create(G)[0], "invalid", "pinned"),
    Rule(
        "create-device",
        lambda d, s: d.create(G, d.properties(1))[0],
        lambda d, s: d.create(G, d.properties(0))[0],
        "invalid_device",
        "no device of that number",
    ),
    Rule(
        "release-unknown",
        lambda d, s: d.release(12345),
        lambda d, s: d.release(s.spare),
        "invalid",
        "unknown handle",
    ),
    Rule(
        "release-twice",
        lambda d, s: unmap_release_twice(d, s, 2),
        lambda d, s: unmap_release_twice(d, s, 1),
        "invalid",
        "released before",
    ),
    Rule(
        "release-while-mapped",
        lambda d, s: d.release(s.handle),
        lambda d, s: d.unmap(s.block, 2 * G) or d.release(s.handle),
        "invalid",
        "still mapped",
        ("rocm",),
    ),
    Rule(
        "map-unknown-handle",
        lambda d, s: d.map(s.free, G, 12345),
        lambda d, s: d.map(s.free, G, s.spare),
        "invalid",
        "unknown handle",
    ),
    Rule(
        "map-released-handle",
        lambda d, s: d.release(s.spare) or d.map(s.free, G, s.spare),
        lambda d, s: d.map(s.free, G, s.spare),
        "invalid",
        "unknown handle",
    ),
    Rule(
        "map-outside",
        lambda d, s: d.map(64 * G, G, s.spare),
        lambda d, s: d.map(s.free + 3 * G, G, s.spare),
        "invalid",
        "not inside a reservation",
    ),
    Rule(
        "map-across-the-end",
        lambda d, s: d.map(s.free + 3 * G, 2 * G, d.create(2 * G)[1]),
        lambda d, s: d.map(s.free + 2 * G, 2 * G, d.create(2 * G)[1]),
        "invalid",
        "not inside a reservation",
    ),
    Rule(
        "map-address-multiple",
        lambda d, s: d.map(s.free + 4096, G, s.spare),
        lambda d, s: d.map(s.free + G, G, s.spare),
        "invalid",
        "address or size is not a multiple of the granularity",
    ),
    Rule(
        "map-offset",
        lambda d, s: d.map(s.free, G, s.handle, offset=G),
        lambda d, s: d.map(s.free, G, s.spare, offset=0),
        "not_whole",
        "offset must be 0",
    ),
    Rule(
        "map-flags",
        lambda d, s: d.map(s.free, G, s.spare, flags=1),
        lambda d, s: d.map(s.free, G, s.spare),
        "null_argument",
        "flags must be 0",
    ),
    Rule(
        "map-beyond-the-handle",
        lambda d, s: d.map(s.free, 2 * G, s.spare),
        lambda d, s: d.map(s.free, G, s.spare),
        "not_whole",
        "larger than the physical memory",
    ),
    Rule(
        "map-part-of-a-handle",
        lambda d, s: d.map(s.free, G, d.create(2 * G)[1]),
        lambda d, s: d.map(s.free, 2 * G, d.create(2 * G)[1]),
        "invalid",
        "size is not that of the physical memory",
        ("ascend",),
    ),
    Rule(
        "map-twice",
        lambda d, s: d.map(s.block, G, s.spare),
        lambda d, s: d.map(s.block + 2 * G, G, s.spare),
        "invalid",
        "already mapped",
    ),
    Rule(
        "map-into-the-middle-of-a-mapping",
        lambda d, s: d.map(s.block + G, G, s.spare),
        lambda d, s: d.map(s.block + 3 * G, G, s.spare),
        "invalid",
        "already mapped",
    ),
    Rule(
        "unmap-not-mapped",
        lambda d, s: d.unmap(s.free, G),
        lambda d, s: d.unmap(s.block, 2 * G),
        "invalid",
        "not the start of a mapping",
    ),
    Rule(
        "unmap-from-the-middle",
        lambda d, s: d.unmap(s.block + G, G),
        lambda d, s: d.unmap(s.block, 2 * G),
        "invalid",
        "not the start of a mapping",
    ),
    Rule(
        "unmap-part-of-a-mapping",
        lambda d, s: d.unmap(s.block, G),
        lambda d, s: d.unmap(s.block, 2 * G),
        "invalid",
        "whole mappings",
        ("cuda",),
    ),
    Rule(
        "unmap-with-another-size",
        lambda d, s: d.unmap(s.block, G),
        lambda d, s: d.unmap(s.block, 2 * G),
        "invalid",
        "not one mapping with its own size",
        ("rocm",),
    ),
    Rule(
        "unmap-two-mappings",
        lambda d, s: d.unmap(s.free, two_spares(d, s)),
        lambda d, s: two_spares(d, s) and (d.unmap(s.free, G) or d.unmap(s.free + G, G)),
        "invalid",
        "not one mapping with its own size",
        ("rocm",),
    ),
    Rule(
        "access-not-mapped",
        lambda d, s: d.access(s.free, G),
        lambda d, s: d.access(s.block, 2 * G),
        "invalid",
        "not fully mapped",
    ),
    Rule(
        "access-partly-unmapped",
        lambda d, s: d.access(s.block, 3 * G),
        lambda d, s: d.access(s.block, 2 * G),
        "invalid",
        "not fully mapped",
        GPU,
    ),
    Rule(
        "access-part-of-a-mapping",
        lambda d, s: d.access(s.block, G),
        lambda d, s: d.access(s.block, 2 * G),
        "invalid",
        "ends inside a mapping",
        GPU,
    ),
    Rule(
        "access-from-the-middle",
        lambda d, s: d.access(s.block + G, G),
        lambda d, s: d.access(s.block, 2 * G),
        "invalid",
        "does not begin with a mapping",
    ),
    Rule(
        "access-another-range",
        lambda d, s: d.access(s.block, G),
        lambda d, s: d.access(s.block, 2 * G),
        "invalid",
        "not the one that was mapped",
        ("ascend",),
    ),
    Rule(
        "access-read-only",
        lambda d, s: d.access(s.block, 2 * G, flags=READ_ONLY),
        lambda d, s: d.access(s.block, 2 * G),
        "invalid",
        "access must be read and write",
        ("ascend",),
    ),
    Rule(
        "access-unknown-flags",
        lambda d, s: d.access(s.block, 2 * G, flags=2),
        lambda d, s: d.access(s.block, 2 * G),
        "invalid",
        "unknown access flags",
        GPU,
    ),
    Rule(
        "access-device",
        lambda d, s: d.access(s.block, 2 * G, device=1),
        lambda d, s: d.access(s.block, 2 * G, device=0),
        "access_device",
        "no device of that number",
    ),
    Rule(
        "copy-not-mapped",
        lambda d, s: d.write(s.free, b"x"),
        lambda d, s: d.write(s.block, b"x"),
        "illegal_address",
        "device memory is not mapped",
    ),
    Rule(
        "copy-across-the-end",
        lambda d, s: d.write(s.block + 2 * G - 1, b"xy"),
        lambda d, s: d.write(s.block + 2 * G - 1, b"x"),
        "illegal_address",
        "device memory is not mapped",
    ),
    Rule(
        "copy-without-access",
        lambda d, s: d.map(s.free, G, s.spare) or d.write(s.free, b"x"),
        lambda d, s: d.map(s.free, G, s.spare) or d.access(s.free, G) or d.write(s.free, b"x"),
        "illegal_address",
        "no access",
        GPU,
    ),
    Rule(
        "copy-into-read-only",
        lambda d, s: d.access(s.block, 2 * G, flags=READ_ONLY) or d.write(s.block, b"x"),
        lambda d, s: d.access(s.block, 2 * G, flags=READ_ONLY) or d.read(s.block, 1)[0],
        "illegal_address",
        "no access",
        GPU,
    ),
    Rule(
        "copy-host-pointer-on-device",
        lambda d, s: d.copy(s.block, s.block + G, 1, 1),
        lambda d, s: d.write(s.block, b"x"),
        "invalid",
        "a host pointer lies in device memory",
    ),
    Rule(
        "fill-not-mapped",
        lambda d, s: d.fill(s.free, 1, 16),
        lambda d, s: d.fill(s.block, 1, 16),
        "illegal_address",
        "device memory is not mapped",
    ),
]

CASES = [pytest.param(rule, vendor, id=f"{rule.name}-{vendor}") for rule in RULES for vendor in rule.vendors]


@pytest.fixture
def subject(vendor: str, request: pytest.FixtureRequest) -> Driver:
    found: Driver = request.getfixturevalue(vendor)
    return found


@pytest.mark.parametrize(("rule", "vendor"), CASES)
def test_wrong_call_is_refused_and_told(rule: Rule, subject: Driver) -> None:
    scene = make_scene(subject)
    with subject.breaking(rule.text):
        assert rule.wrong(subject, scene) == getattr(subject.codes, rule.code)


@pytest.mark.parametrize(("rule", "vendor"), CASES)
def test_right_call_passes_without_a_word(rule: Rule, subject: Driver) -> None:
    scene = make_scene(subject)
    assert rule.right(subject, scene) == 0
    assert subject.simulator.violations() == []


def test_refused_calls_change_nothing(driver: Driver) -> None:
    scene = make_scene(driver)
    assert driver.write(scene.block, b"kept") == 0
    before = driver.simulator.stats()
    for refused in (
        driver.map(scene.block, G, scene.spare),
        driver.map(64 * G, G, scene.spare),
        driver.free(scene.block, 4 * G),
        driver.unmap(scene.free, G),
        driver.access(scene.free, G),
        driver.release(12345),
        driver.create(G + 1)[0],
        driver.reserve(0)[0],
        driver.write(scene.free, b"x"),
    ):
        assert refused != 0
    after = driver.simulator.stats()
    assert (after.reservations, after.handles, after.mappings, after.used, after.address_space) == (
        before.reservations,
        before.handles,
        before.mappings,
        before.used,
        before.address_space,
    )
    assert driver.read(scene.block, 4) == (0, b"kept")


def test_memory_holds_its_bytes_and_everything_returns(driver: Driver) -> None:
    address, handle = driver.block(2)
    data = os.urandom(2 * G)
    assert driver.write(address, data) == 0
    assert driver.read(address, 2 * G) == (0, data)
    assert driver.simulator.used() == 2 * G
    assert driver.unmap(address, 2 * G) == 0
    assert driver.release(handle) == 0
    assert driver.simulator.used() == 0
    assert driver.free(address, 2 * G) == 0
    stats = driver.simulator.stats()
    assert (stats.reservations, stats.handles, stats.mappings, stats.address_space) == (0, 0, 0, 0)
    assert driver.simulator.violations() == []


def test_new_mapping_at_an_old_address_shows_its_own_bytes(driver: Driver) -> None:
    address, handle = driver.block()
    driver.write(address, b"old")
    driver.unmap(address, G)
    code, other = driver.create(G)
    assert (code, driver.map(address, G, other), driver.access(address, G)) == (0, 0, 0)
    code, found = driver.read(address, 3)
    assert code == 0
    assert found != b"old"
    assert driver.unmap(address, G) == 0
    assert (driver.map(address, G, handle), driver.access(address, G)) == (0, 0)
    assert driver.read(address, 3) == (0, b"old")


@pytest.mark.parametrize("vendor", ["ascend", "cuda"])
def test_released_handle_keeps_its_memory_while_it_is_mapped(subject: Driver) -> None:
    address, handle = subject.block()
    assert subject.release(handle) == 0
    assert subject.write(address, b"alive") == 0
    assert subject.simulator.used() == G
    assert subject.unmap(address, G) == 0
    assert subject.simulator.used() == 0


def test_unmapping_contiguous_mappings_together_is_legal_on_cuda(cuda: Driver) -> None:
    scene = make_scene(cuda)
    assert cuda.unmap(scene.free, two_spares(cuda, scene)) == 0
    assert cuda.simulator.violations() == []


def test_access_lasts_no_longer_than_its_mapping(cuda: Driver) -> None:
    address, handle = cuda.block()
    cuda.unmap(address, G)
    assert cuda.map(address, G, handle) == 0
    with cuda.breaking("no access"):
        assert cuda.write(address, b"x") == cuda.codes.illegal_address


def test_capacity_is_kept_and_comes_back(driver: Driver) -> None:
    driver.simulator.capacity = 4 * G
    code, first = driver.create(3 * G)
    assert code == 0
    assert driver.create(2 * G)[0] == driver.codes.out_of_memory
    assert driver.memory_info() == (0, G, 4 * G)
    assert driver.release(first) == 0
    assert driver.create(2 * G)[0] == 0
    assert driver.simulator.violations() == []


@pytest.mark.parametrize("size", [(1 << 64) - G, (1 << 63), 1 << 55])
def test_huge_sizes_are_out_of_memory(driver: Driver, size: int) -> None:
    driver.simulator.set("max_reservation", 0)
    assert driver.create(size)[0] == driver.codes.out_of_memory
    assert driver.reserve(size)[0] == driver.codes.out_of_memory
    address, _ = driver.block()
    assert driver.map(address, size, 1) != 0
    assert driver.copy(address, 4096, size, 1) in (driver.codes.illegal_address, driver.codes.invalid)
    assert driver.simulator.stats().reservations == 1


def test_granularity_is_a_setting(driver: Driver) -> None:
    driver.simulator.set("granularity", 65536)
    code, address = driver.reserve(65536)
    assert (code, address % 65536) == (0, 0)
    assert driver.create(65536)[0] == 0
    assert driver.create(4096)[0] == driver.codes.invalid


def test_alignment_asked_for_is_given(cuda: Driver) -> None:
    for alignment in (G, 16 * G, 512 * G):
        code, address = cuda.reserve(G, alignment)
        assert (code, address % alignment) == (0, 0)


def test_freed_range_can_be_reserved_again_at_its_address(rocm: Driver) -> None:
    _, address = rocm.reserve(8 * G)
    assert rocm.free(address, 8 * G) == 0
    assert rocm.reserve(8 * G, hint=address) == (0, address)


def test_table_names_no_unknown_vendor() -> None:
    assert {vendor for rule in RULES for vendor in rule.vendors} == set(DRIVERS)
    assert device_properties(rdma=1).rdma == 1


def test_access_that_was_set_can_be_asked_for(cuda: Driver) -> None:
    scene = make_scene(cuda)
    location = Location(1, 0)
    assert cuda.access(scene.block, 2 * G, flags=READ_ONLY) == 0
    assert cuda.make("cuMemGetAccess", ctypes.byref(location), scene.block + G) == (0, READ_ONLY)
    with cuda.breaking("address is not mapped"):
        assert cuda.make("cuMemGetAccess", ctypes.byref(location), scene.free)[0] == cuda.codes.invalid


@pytest.mark.parametrize("vendor", GPU)
def test_access_to_nothing_is_refused(subject: Driver) -> None:
    scene = make_scene(subject)
    with subject.breaking("size 0"):
        assert subject.access(scene.block, 0) == subject.codes.invalid


def test_host_memory_that_does_not_exist_is_an_answer_and_no_crash(driver: Driver) -> None:
    scene = make_scene(driver)
    with driver.breaking("host memory cannot be read or written"):
        assert driver.copy(scene.block, 4096, 64, 1) == driver.codes.invalid


def test_allocations_of_nothing_are_refused(cuda: Driver) -> None:
    with cuda.breaking("size 0"):
        assert cuda.make("cuMemAlloc_v2", 0)[0] == cuda.codes.invalid
    with cuda.breaking("size 0"):
        assert cuda.make("cuMemHostAlloc", 0, 0)[0] == cuda.codes.invalid
