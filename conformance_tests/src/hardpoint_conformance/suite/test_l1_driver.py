"""Level 1: the contract of `hardpoint/driver.h`, entry by entry."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from threading import Barrier
from typing import TypeVar

import pytest

from hardpoint.interfaces.errors import BackendUnavailable, DeviceOutOfMemory, DriverError
from hardpoint.memory import DriverFlags, DriverQuirks
from hardpoint_conformance.clauses import clause
from hardpoint_conformance.device_memory import MAPPED, PREREQUISITES, DeviceMemory, in_fresh_thread
from hardpoint_conformance.interposed import InterposedDriver
from hardpoint_conformance.levels import Level
from hardpoint_conformance.memory import (
    address_of,
    assert_holds_nothing,
    content,
    differences,
    driver_of,
    on_stream,
    process_counts,
    wait_until,
)
from hardpoint_conformance.target import Target

OPTIONAL = {"quirks", "host_register", "host_unregister"}
LARGE = 256 << 20
COUNTED = 256 << 20
"""Bytes that a counter of free memory shows beside what others take and give."""
ORDERED = 16 << 20
"""Bytes whose fill takes a while."""
CYCLES = 20
MOST_CALLS = 40
"""Calls of the vendor's library of which each is made to fail once: more than any entry makes that does not poll."""
Result = TypeVar("Result")


@pytest.fixture
def device(driver: InterposedDriver) -> Iterator[DeviceMemory]:
    """Two units of the device's memory, that a test takes step by step."""
    made = DeviceMemory(driver, 2 * driver.geometry().granularity)
    yield made
    made.close()


def read(device: DeviceMemory) -> bytes:
    """Return all bytes of the device's memory."""
    device.write(bytes(device.size))
    device.do("copy_to_host", "stream_synchronize")
    return device.read()


def chunk_of(driver: InterposedDriver) -> int:
    """Return a large size that one `create` may be asked for."""
    geometry = driver.geometry()
    size = LARGE if geometry.max_chunk == 0 else min(LARGE, geometry.max_chunk)
    return max(size // geometry.granularity, 1) * geometry.granularity


def attempt(work: Callable[[], Result]) -> Result | None:
    """Return what `work` returns, or None where it fails with an error of the driver."""
    try:
        return work()
    except (DriverError, DeviceOutOfMemory):
        return None


# Geometry and facts


@clause("driver.table.complete@1", Level.MEMORY)
def test_every_entry_that_is_not_optional_is_there(driver: InterposedDriver) -> None:
    """The table has every entry that driver.h does not call optional, and pinning comes with unpinning."""
    names = {name for name, *_ in type(driver._table)._fields_} - {"struct_size", "abi", "flags", "context"}
    assert names - set(driver.entries) <= OPTIONAL
    assert ("host_register" in driver.entries) is ("host_unregister" in driver.entries)


@clause("driver.geometry.sane@1", Level.MEMORY, facts="allocator fact 30")
def test_geometry_is_sane(driver: InterposedDriver) -> None:
    """Granularity is a positive multiple of 512; what is recommended, and limits that there are, are multiples of it; at least one
    thread copies, and the kind of device is one of DLPack's."""
    geometry = driver.geometry()
    unit = geometry.granularity
    assert unit > 0
    assert unit % 512 == 0
    assert geometry.recommended >= unit
    for size in (geometry.recommended, geometry.max_chunk, geometry.max_reservation):
        assert size % unit == 0
    assert geometry.copy_threads >= 1
    assert geometry.dlpack_device > 0
    assert driver.geometry() == geometry


@clause("driver.facts.device@1", Level.MEMORY)
def test_the_driver_knows_its_device(driver: InterposedDriver, target: Target) -> None:
    """The driver counts its own device, gives it a name and its library a version, and says whether it is simulated."""
    assert driver.device_count() > target.device.index
    assert driver.device_name() != ""
    assert driver.driver_version() != ""
    assert driver.simulated is target.simulated
    free, total = driver.memory_info()
    assert 0 < free <= total


@clause("driver.facts.strings@1", Level.MEMORY)
@pytest.mark.parametrize("entry", ["device_name", "driver_version"])
def test_strings_stay_within_their_buffer(driver: InterposedDriver, entry: str) -> None:
    """Names are cut to the buffer's size, end with a zero, and leave the bytes behind the buffer alone."""
    buffer = ctypes.create_string_buffer(b"#" * 15, 16)
    driver._call(entry, buffer, 3)
    whole: str = getattr(driver, entry)()
    assert buffer.raw[3:15] == b"#" * 12
    assert b"\0" in buffer.raw[:3]
    assert whole.encode()[: len(buffer.value)] == buffer.value


@clause("driver.quirks.stable@1", Level.MEMORY, facts="allocator fact 28")
def test_quirks_are_the_same_every_time(driver: InterposedDriver) -> None:
    """Quirks are known bits, the same at every call while the driver is open, and probing takes nothing."""
    found = driver.quirks()
    assert found & ~DriverQuirks(15) == DriverQuirks(0)
    assert driver.quirks() == in_fresh_thread(driver.quirks) == found


@clause("driver.open.no-device@1", Level.MEMORY)
def test_a_device_that_does_not_exist_is_unavailable(target: Target, driver: InterposedDriver) -> None:
    """Opening the driver of a device that is not there raises BackendUnavailable."""
    assert target.descriptor.driver is not None
    for index in (driver.device_count(), 1 << 20):
        with pytest.raises(BackendUnavailable):
            target.descriptor.driver(replace(target.device, index=index))


@clause("driver.open.pairs@1", Level.MEMORY, facts="allocator fact 40")
def test_open_and_close_are_counted(target: Target, driver: InterposedDriver) -> None:
    """The device stays in use until each `open` had its `close`, and can be opened again after that."""
    other = InterposedDriver(driver_of(target))
    for _ in range(3):
        other.open()
        other.open()
        other.close()
        other.release(other.create(other.geometry().granularity), other.geometry().granularity)
        other.close()
    assert_holds_nothing(other)
    driver.memory_info()


# Addresses


@clause("driver.reserve.aligned@1", Level.MEMORY, facts="allocator fact 30")
@pytest.mark.parametrize("units", [1, 3, 64])
def test_reserved_ranges_are_aligned_and_apart(driver: InterposedDriver, units: int) -> None:
    """Reserved ranges begin at multiples of the granularity and do not overlap; they can be given back in any order."""
    size = units * driver.geometry().granularity
    addresses = [driver.reserve(size) for _ in range(5)]
    try:
        assert min(addresses) > 0
        assert [address % driver.geometry().granularity for address in addresses] == [0] * 5
        ordered = sorted(addresses)
        assert min(high - low for low, high in pairwise(ordered)) >= size
    finally:
        for address in (*addresses[1:], addresses[0]):
            driver.release_address(address, size)


@clause("driver.reserve.hint@1", Level.MEMORY)
def test_a_hint_never_gives_what_is_taken(driver: InterposedDriver) -> None:
    """A hint that names a taken range, or an impossible address, gives another range or an error, and the taken one is unharmed."""
    size = driver.geometry().granularity
    taken = driver.reserve(size)
    for hint in (taken, size, 1 << 62):
        found = attempt(lambda hint=hint: driver.reserve(size, hint))  # type: ignore[misc]
        if found is not None:
            assert abs(found - taken) >= size
            driver.release_address(found, size)
    driver.release_address(taken, size)


@clause("driver.reserve.no-memory@1", Level.MEMORY)
def test_addresses_take_no_memory(driver: InterposedDriver) -> None:
    """Addresses for more memory than the device has can be reserved, within the limit that the geometry states."""
    geometry = driver.geometry()
    size = 2 * driver.memory_info()[1] // geometry.granularity * geometry.granularity
    if geometry.max_reservation:
        size = min(size, geometry.max_reservation)
    addresses = [driver.reserve(size) for _ in range(2)]
    for address in addresses:
        driver.release_address(address, size)


# Memory


@clause("driver.copy.exact@1", Level.MEMORY, facts="allocator fact 2, allocator fact 29")
@pytest.mark.parametrize("size", ["1", "513", "unit-1", "unit", "unit+1", "all"])
def test_copies_move_exactly_their_bytes(device: DeviceMemory, size: str) -> None:
    """Bytes copied to the device are read back; a copy of any size to any byte changes no byte before or behind it."""
    unit = device.size // 2
    count = {"unit-1": unit - 1, "unit": unit, "unit+1": unit + 1, "all": device.size}.get(size) or int(size)
    device.do(*MAPPED, "stream_create", "fill")
    expected = bytearray(b"\x5a" * device.size)
    for at in {0, (device.size - count) // 2 + 1 if count < device.size else 0, device.size - count}:
        data = bytearray(content(count, at))
        device.driver.copy_to_device(device.address + at, address_of(data), count, device.stream)
        device.do("stream_synchronize")
        expected[at : at + count] = data
        back = bytearray(count)
        device.driver.copy_to_host(address_of(back), device.address + at, count, device.stream)
        device.do("stream_synchronize")
        assert back == data
    assert read(device) == expected


@clause("driver.fill.exact@1", Level.MEMORY)
@pytest.mark.parametrize("value", [0, 1, 0x80, 0xFF])
def test_fill_sets_its_bytes_and_no_other(device: DeviceMemory, value: int) -> None:
    """`fill` sets every byte of its range to the value, and no byte before or behind it."""
    device.do(*MAPPED, "stream_create", "fill")
    start, size = 1, device.size // 2 + 5
    device.driver.fill(device.address + start, value, size, device.stream)
    device.do("stream_synchronize")
    expected = bytearray(b"\x5a" * device.size)
    expected[start : start + size] = bytes([value]) * size
    assert read(device) == expected


@clause("driver.unmap.keeps-bytes@1", Level.MEMORY)
def test_a_handle_keeps_its_bytes_while_unmapped(device: DeviceMemory) -> None:
    """A handle that is unmapped and mapped again at the same address has its bytes."""
    data = content(device.size)
    device.do(*MAPPED, "stream_create")
    device.write(data)
    device.do("copy_to_device", "stream_synchronize", "device_synchronize")
    for _ in range(3):
        device.do("unmap", "map")
    assert read(device) == data


@clause("driver.map.own-memory@1", Level.MEMORY)
def test_handles_are_memory_of_their_own(driver: InterposedDriver) -> None:
    """Several handles mapped side by side in one reservation hold bytes of their own, and each is unmapped without the others."""
    unit = driver.geometry().granularity
    address = driver.reserve(3 * unit)
    handles = [driver.create(unit) for _ in range(3)]
    assert len(set(handles)) == 3
    with on_stream(driver) as stream:
        for index, handle in enumerate(handles):
            driver.map(address + index * unit, unit, handle)
            driver.fill(address + index * unit, index + 1, unit, stream)
        driver.device_synchronize()
        driver.unmap(address + unit, unit)
        back = bytearray(unit)
        for index in (0, 2):
            driver.copy_to_host(address_of(back), address + index * unit, unit, stream)
            driver.stream_synchronize(stream)
            assert back == bytes([index + 1]) * unit
        driver.map(address + unit, unit, handles[1])
        driver.copy_to_host(address_of(back), address + unit, unit, stream)
        driver.stream_synchronize(stream)
        assert back == b"\x02" * unit
        driver.device_synchronize()
    for index, handle in enumerate(handles):
        driver.unmap(address + index * unit, unit)
        driver.release(handle, unit)
    driver.release_address(address, 3 * unit)


@clause("driver.map.any-order@1", Level.MEMORY)
def test_handles_are_mapped_in_any_order(driver: InterposedDriver) -> None:
    """Handles are mapped in any order, whatever the order in which they were created: each address shows the bytes of the handle that was
    mapped there, also when all of them were unmapped and are mapped again in yet another order."""
    unit, count = driver.geometry().granularity, 4
    address = driver.reserve(count * unit)
    handles = [driver.create(unit) for _ in range(count)]
    places = {handle: address + index * unit for handle, index in zip(handles, (2, 0, 3, 1), strict=True)}

    def shown(stream: int) -> list[int]:
        """Return the first byte at each handle's place, once the device has nothing left to do."""
        back = bytearray(count * unit)
        driver.copy_to_host(address_of(back), address, count * unit, stream)
        driver.device_synchronize()
        return [back[place - address] for place in places.values()]

    with on_stream(driver) as stream:
        for order in ((3, 1, 0, 2), (1, 2, 3, 0), (0, 3, 2, 1)):
            first = order[0] == 3
            for handle in (handles[index] for index in order):
                driver.map(places[handle], unit, handle)
                if first:
                    driver.fill(places[handle], handles.index(handle) + 1, unit, stream)
            found = shown(stream)
            assert found == [1, 2, 3, 4], (
                f"handles mapped in the order {order}: what was written by handles 1 to 4 is found at their addresses as {found}"
            )
            for index in reversed(order):
                driver.unmap(places[handles[index]], unit)
    for handle in handles:
        driver.release(handle, unit)
    driver.release_address(address, count * unit)


@clause("driver.map.several-units@1", Level.MEMORY)
def test_a_handle_of_several_units_is_mapped_whole(driver: InterposedDriver) -> None:
    """A handle of several units is mapped whole: its first and last bytes are there, in the middle of a larger reservation too."""
    geometry = driver.geometry()
    unit = geometry.granularity
    size = min(3 * unit, geometry.max_chunk or 3 * unit)  # a unit alone, where a handle is never larger
    address, handle = driver.reserve(5 * unit), driver.create(size)
    driver.map(address + unit, size, handle)
    data = bytearray(content(size))
    with on_stream(driver) as stream:
        driver.copy_to_device(address + unit, address_of(data), size, stream)
        driver.stream_synchronize(stream)
        back = bytearray(size)
        driver.copy_to_host(address_of(back), address + unit, size, stream)
        driver.stream_synchronize(stream)
    assert back == data
    driver.device_synchronize()
    driver.unmap(address + unit, size)
    driver.release(handle, size)
    driver.release_address(address, 5 * unit)


@clause("driver.create.fresh@1", Level.MEMORY, facts="allocator fact 4")
def test_new_memory_is_what_the_flags_say(driver: InterposedDriver) -> None:
    """New memory reads as zero where the driver has the flag for it and no quirk against it, whatever others left on the device."""
    unit = driver.geometry().granularity
    clean = DriverFlags.FRESH_ZERO in driver.flags and DriverQuirks.STALE_PAGES not in driver.quirks()
    for _ in range(4):
        device = DeviceMemory(driver, 2 * unit).do(*MAPPED, "stream_create")
        if clean:
            assert read(device) == bytes(2 * unit)
        device.do("fill", "stream_synchronize")
        assert read(device) == b"\x5a" * (2 * unit)
        device.close()


@clause("driver.flags.host-accessible@1", Level.MEMORY)
def test_flags_about_copies_are_true(device: DeviceMemory) -> None:
    """Where the flags say so, mapped addresses are memory of this process, and copies and fills are complete when they return."""
    flags = device.driver.flags
    device.do(*MAPPED, "stream_create", "fill")
    if DriverFlags.COPIES_BLOCK in flags:
        device.do("copy_to_host")
        assert device.read() == b"\x5a" * device.size
    device.do("stream_synchronize")
    if DriverFlags.HOST_ACCESSIBLE in flags:
        assert ctypes.string_at(device.address, device.size) == b"\x5a" * device.size
    assert read(device) == b"\x5a" * device.size


@clause("driver.memory.counted@1", Level.MEMORY, facts="allocator fact 23")
def test_free_memory_is_counted(driver: InterposedDriver) -> None:
    """Free memory falls when memory is taken and used, and rises when it is unmapped and released; the total stays."""
    size = chunk_of(driver)
    count = max(2, COUNTED // size)
    total = driver.memory_info()[1]
    readings: set[int] = set()

    def free() -> int:
        reading = driver.memory_info()[0]
        readings.add(reading)
        return reading

    def changes(sign: int, since: int) -> bool:
        return wait_until(lambda: sign * (free() - since) >= count * size // 2, 0.4)

    fallen = risen = False
    # Others take and give memory of a device too, a host's for seconds on end: one clear observation of each is enough.
    for turn in range(25):
        before = free()
        devices = [DeviceMemory(driver, size).do(*MAPPED, "stream_create", "fill") for _ in range(count)]
        devices[0].do("device_synchronize")
        fallen = changes(-1, before) or fallen
        during = free()
        for device in devices:
            device.do("unmap", "release")
            if DriverQuirks.ADDRESS_HOLDS_MEMORY in driver.quirks():
                device.do("release_address")
        risen = changes(1, during) or risen
        for device in devices:
            device.close()
        assert driver.memory_info()[1] == total
        # What others do does not leave a number as it is to the byte.
        if (fallen and risen) or (turn == 3 and len(readings) == 1):
            break
    taken = f"{count} times {size} bytes"
    assert fallen, f"free memory never fell by half of what was taken and written, {taken}"
    assert risen, f"free memory never rose by half of what was unmapped and released, {taken}"


@clause("driver.memory.out-of-memory@1", Level.MEMORY, facts="allocator fact 21, allocator fact 22")
def test_an_exhausted_device_is_out_of_memory(driver: InterposedDriver) -> None:
    """Taking more memory than the device has ends with OUT_OF_MEMORY: it names the vendor's call, takes nothing, is not kept for
    a later call, and memory given back can be taken again."""
    size = chunk_of(driver)
    most = driver.memory_info()[1] // size + 1
    handles: list[int] = []
    try:
        with pytest.raises(DeviceOutOfMemory) as caught:
            handles += (driver.create(size) for _ in range(most))
        assert caught.value.found, "the error has no text of the vendor's"
        held = driver.held()["bytes"]
        with pytest.raises(DeviceOutOfMemory):
            driver.create(size)
        assert driver.held()["bytes"] == held == len(handles) * size
        driver.release(handles.pop(), size)
        handles.append(driver.create(size))
    finally:
        for handle, taken in list(driver.ledger.handles.items()):
            driver.release(handle, taken)


@clause("driver.memory.returns@1", Level.MEMORY, facts="allocator fact 25")
def test_released_memory_can_be_taken_again_without_end(driver: InterposedDriver) -> None:
    """Memory that is taken, mapped, unmapped and released over and over is never used up."""
    size = chunk_of(driver)
    address = driver.reserve(size)
    renewed = DriverQuirks.ADDRESS_HOLDS_MEMORY in driver.quirks()
    for _ in range(driver.memory_info()[1] // size + 5):
        handle = driver.create(size)
        driver.map(address, size, handle)
        driver.unmap(address, size)
        driver.release(handle, size)
        if renewed:
            driver.release_address(address, size)
            address = driver.reserve(size)
    driver.release_address(address, size)


@clause("driver.memory.descriptors@1", Level.MEMORY)
def test_no_file_stays_open(driver: InterposedDriver) -> None:
    """Memory that is taken, mapped, used and given back, and a device that is opened and closed, over and over leave no more files
    open in the process than before."""

    def cycles(count: int) -> None:
        for _ in range(count):
            driver.open()
            device = DeviceMemory(driver, 2 * driver.geometry().granularity).do(*MAPPED, "stream_create", "fill")
            attempt(device.host_register)
            device.do("copy_to_host", "stream_synchronize")
            device.close()
            driver.close()

    cycles(3)  # what a driver keeps from its first use on is not counted
    before = process_counts()
    cycles(CYCLES)
    grown = differences(before, process_counts()).get("files", 0)
    assert grown < CYCLES // 2, f"{grown} more open files after {CYCLES} cycles: one of the entries keeps a descriptor"


# Threads, streams, host memory


@clause("driver.threads.fresh@1", Level.MEMORY, facts="allocator fact 32")
@pytest.mark.parametrize("entry", PREREQUISITES)
def test_every_entry_works_on_a_fresh_thread(device: DeviceMemory, entry: str) -> None:
    """Every entry may be called from a thread that has never used the device, and from another than those before it."""
    steps = (*PREREQUISITES[entry], entry)
    here = DeviceMemory(device.driver, device.size).do(*steps)
    here.close()
    for step in steps:
        in_fresh_thread(lambda step=step: device.do(step))  # type: ignore[misc]
    if entry == "copy_to_host":
        device.do("stream_synchronize")


@clause("driver.threads.concurrent@1", Level.MEMORY, facts="allocator fact 33")
def test_threads_use_the_device_at_a_time(driver: InterposedDriver) -> None:
    """Several threads take, write, read and give back memory at a time, and each finds its own bytes."""
    unit, threads, rounds = driver.geometry().granularity, 4, 6
    barrier = Barrier(threads)

    def work(number: int) -> bool:
        barrier.wait(30)
        right = True
        for index in range(rounds):
            device = DeviceMemory(driver, unit).do(*MAPPED, "stream_create")
            data = content(unit, number * rounds + index)
            device.write(data)
            device.do("copy_to_device", "stream_synchronize")
            right = right and read(device) == data
            device.close()
        return right

    with ThreadPoolExecutor(threads) as executor:
        assert list(executor.map(work, range(threads))) == [True] * threads, "a thread found other bytes than its own"


@clause("driver.streams.order@1", Level.MEMORY, facts="allocator fact 34")
def test_work_of_a_stream_runs_in_order(driver: InterposedDriver) -> None:
    """Work of one stream runs in the order in which it was given, and is complete once the stream is synchronised."""
    unit, part = driver.geometry().granularity, 512
    # A copy of the last bytes would overtake a fill of all of them, where it could.
    device = DeviceMemory(driver, min(chunk_of(driver), max(ORDERED // unit, 1) * unit)).do(*MAPPED, "stream_create")
    last = device.address + device.size - part
    tails = [bytearray(part) for _ in range(8)]
    for value, tail in enumerate(tails):
        driver.fill(device.address, value + 1, device.size, device.stream)
        driver.copy_to_host(address_of(tail), last, part, device.stream)
    device.do("stream_synchronize")
    assert tails == [bytes([value + 1]) * part for value in range(8)]
    device.do("copy_to_host")
    driver.fill(last, 0, part, device.stream)
    device.do("stream_synchronize")
    assert device.read() == b"\x08" * device.size
    device.close()


@clause("driver.streams.device@1", Level.MEMORY, facts="allocator fact 34")
def test_device_synchronize_waits_for_all_streams(device: DeviceMemory) -> None:
    """`device_synchronize` waits for the work of all streams."""
    driver, part = device.driver, device.size // 4
    device.do(*MAPPED)
    streams = [driver.stream_create() for _ in range(4)]
    assert len(set(streams)) == 4
    hosts = [bytearray(part) for _ in streams]
    for index, stream in enumerate(streams):
        driver.fill(device.address + index * part, index + 1, part, stream)
        driver.copy_to_host(address_of(hosts[index]), device.address + index * part, part, stream)
    driver.device_synchronize()
    assert [bytes(host) for host in hosts] == [bytes([index + 1]) * part for index in range(4)]
    for stream in reversed(streams):
        driver.stream_destroy(stream)


@clause("driver.host.pinned@1", Level.MEMORY)
def test_pinned_host_memory_is_copied_alike(device: DeviceMemory) -> None:
    """Host memory may be pinned where the driver can, is copied alike while it is, keeps its bytes, and may be pinned again."""
    device.do(*MAPPED, "stream_create")
    for seed in range(2):
        data = content(device.size, seed)
        device.write(data)
        pinned = attempt(device.host_register) is None and device.registered
        assert device.read() == data
        device.do("copy_to_device", "stream_synchronize")
        assert read(device) == data
        if pinned:
            device.do("host_unregister")
        assert device.read() == data


@clause("driver.errors.nothing-changed@1", Level.MEMORY, facts="allocator fact 18, allocator fact 21")
@pytest.mark.parametrize("entry", ["create", "reserve"])
def test_an_impossible_size_is_an_error_that_says_so(driver: InterposedDriver, entry: str) -> None:
    """A size that no device has is an error with the vendor's call and a text; nothing is taken, no result is set, and the next call
    works."""
    geometry = driver.geometry()
    size = (1 << 62) // geometry.granularity * geometry.granularity
    result = ctypes.c_uint64(12345)
    arguments = (size, 0) if entry == "reserve" else (size,)
    with pytest.raises((DriverError, DeviceOutOfMemory)) as caught:
        driver._call(entry, *arguments, ctypes.byref(result))
    assert caught.value.found, "the error has no text of the vendor's"
    assert result.value == 12345
    device = DeviceMemory(driver, geometry.granularity).do(*MAPPED, "stream_create", "fill")
    assert read(device) == b"\x5a" * geometry.granularity
    device.close()


@clause("driver.errors.own-failure@1", Level.MEMORY, facts="allocator fact 18")
@pytest.mark.parametrize("entry", PREREQUISITES)
def test_a_failure_within_the_driver_changes_nothing(driver: InterposedDriver, entry: str) -> None:
    """An entry that fails within the driver, because the device never has so much or because a call of the vendor's library fails
    (`hp_driver_fail_call`), changes nothing: it works when it is called again, and failures to create use up no memory."""
    can_be_asked = driver.fail_call(0)
    geometry = driver.geometry()
    if entry == "create":
        size = chunk_of(driver)
        sizes = [(1 << 62) // geometry.granularity * geometry.granularity] * 3
        # Were each failure counted as memory in use, there would be none left.
        sizes += [size] * (driver.memory_info()[1] // size + 1 if can_be_asked else 0)
        for asked in sizes:
            driver.fail_call(int(asked == size))
            handle = attempt(lambda asked=asked: driver.create(asked))  # type: ignore[misc]
            driver.fail_call(0)
            if handle is not None:  # it calls nothing that can fail
                driver.release(handle, asked)
        driver.release(driver.create(size), size)
    if not can_be_asked:
        if entry != "create":
            pytest.skip("not testable here: the driver does not export hp_driver_fail_call")
        return
    device = DeviceMemory(driver, 2 * geometry.granularity).do(*PREREQUISITES[entry])
    failures: list[DriverError | DeviceOutOfMemory] = []
    for nth in range(1, MOST_CALLS):
        driver.fail_call(nth)
        try:
            device.do(entry)
            break  # it makes fewer calls
        except (DriverError, DeviceOutOfMemory) as error:
            failures.append(error)
        finally:
            driver.fail_call(0)
    else:
        driver.fail_call(1 << 30)  # a call that no entry comes to, however often it polls
        try:
            device.do(entry)
        finally:
            driver.fail_call(0)
    assert [error for error in failures if not error.found] == [], "errors without the text of the vendor's call"
    assert failures or entry != "map", "hp_driver_fail_call is exported, and no call that `map` makes failed by it"
    device.close()
    after = DeviceMemory(driver, geometry.granularity).do(*MAPPED, "stream_create", "fill")
    assert read(after) == b"\x5a" * geometry.granularity
    after.close()


@clause("driver.output.none@1", Level.MEMORY)
def test_nothing_is_printed(target: Target, driver: InterposedDriver, capfd: pytest.CaptureFixture[str]) -> None:
    """Neither opening and closing nor any entry, failing ones included, writes to the process's standard output or error."""
    assert target.descriptor.driver is not None
    capfd.readouterr()
    another = InterposedDriver(target.descriptor.driver(target.device))
    another.open()
    geometry = another.geometry()
    can_fail = another.fail_call(0)
    for entry in filter(PREREQUISITES.__contains__, another.entries):
        device = DeviceMemory(another, geometry.granularity).do(*PREREQUISITES[entry])
        if can_fail:
            another.fail_call(1)
            failed = attempt(lambda entry=entry, device=device: device.do(entry)) is None  # type: ignore[misc]
            another.fail_call(0)
        if not can_fail or failed:
            device.do(entry)
        device.close()
    attempt(lambda: another.create((1 << 62) // geometry.granularity * geometry.granularity))
    another.close()
    with suppress(BackendUnavailable):
        target.descriptor.driver(replace(target.device, index=driver.device_count()))
    ctypes.CDLL(None).fflush(None)  # what C's own streams still hold
    assert capfd.readouterr() == ("", "")


@clause("driver.devices.apart@1", Level.MEMORY, facts="allocator fact 31")
def test_devices_do_not_mix(target: Target, driver: InterposedDriver) -> None:
    """Memory of two devices is apart: each driver takes from its own, and bytes written through one are not those of the other. Where
    there is one device, that holds for two drivers of it."""
    assert target.descriptor.driver is not None
    index = (target.device.index + 1) % driver.device_count()
    other = InterposedDriver(target.descriptor.driver(replace(target.device, index=index)))
    other.open()
    devices = [DeviceMemory(one, 2 * one.geometry().granularity) for one in (driver, other)]
    data = [content(device.size, seed) for seed, device in enumerate(devices)]
    for device, expected in zip(devices, data, strict=True):
        device.do(*MAPPED, "stream_create")
        device.write(expected)
        device.do("copy_to_device", "stream_synchronize")
    assert [read(device) for device in devices] == data
    for device in devices:
        device.close()
    other.close()
    assert_holds_nothing(other)
