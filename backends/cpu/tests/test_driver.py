"""The CPU's memory driver: addresses that stay, bytes that are kept, accesses that fault, memory that returns, refusals."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import platform
import random
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from hardpoint.interfaces.errors import BackendUnavailable, DeviceOutOfMemory, DriverError
from hardpoint.memory.driver_table import DriverFlags, DriverQuirks, DriverTable
from hardpoint_cpu import _native
from hardpoint_cpu.driver import DriverFaults, driver_table

MB = 1 << 20
PAGE = 2 * MB
BUDGET = 256 * MB
SANITIZED = any(name in os.environ.get("LD_PRELOAD", "") for name in ("libasan", "libtsan"))
STREAMINGS = [
    *(name for name in ("avx512", "avx2") if name in _native.available_isas()),
    *(["sse2"] if platform.machine() == "x86_64" else []),
    "portable",
]
"""How this build can copy large memory on this processor."""


def open_driver(**options: object) -> DriverTable:
    table = driver_table(options={"budget": BUDGET} | options)
    table.open()
    return table


@pytest.fixture(params=[1, 0], ids=["pages_moved", "pages_copied"])
def driver(request: pytest.FixtureRequest) -> DriverTable:
    return open_driver(keep_address=request.param)


def mapped(driver: DriverTable, size: int = PAGE) -> tuple[int, int]:
    """Return the address and the handle of newly mapped memory."""
    address, handle = driver.reserve(size), driver.create(size)
    driver.map(address, size, handle)
    return address, handle


def give_back(driver: DriverTable, address: int, handle: int, size: int = PAGE) -> None:
    driver.unmap(address, size)
    driver.release(handle, size)
    driver.release_address(address, size)


def write(address: int, data: bytes) -> None:
    ctypes.memmove(address, data, len(data))


def read(address: int, size: int) -> bytes:
    return ctypes.string_at(address, size)


def smaps(address: int) -> dict[str, int]:
    """Return the numbers of the memory area that begins at an address, in bytes."""
    found: dict[str, int] = {}
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        word = line.split()[0]
        if "-" in word:
            inside = int(word.split("-")[0], 16) == address
        elif inside and word.endswith(":") and line.endswith("kB"):
            found[word[:-1]] = int(line.split()[1]) * 1024
    return found


PROLOGUE = """
    import ctypes, mmap, os, resource, sys
    from hardpoint_cpu.driver import driver_table
    from hardpoint.interfaces.errors import DeviceOutOfMemory
    MB = 1 << 20
    PAGE = 2 * MB
    driver = driver_table(options={"budget": 1 << 30})
    driver.open()
    address, handle = driver.reserve(2 * PAGE), driver.create(PAGE)
    driver.map(address, PAGE, handle)
    ctypes.memset(address, 7, PAGE)
"""


def run_child(script: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(PROLOGUE) + textwrap.dedent(script)]
    # AddressSanitizer would turn a fault into a report of its own, and would keep freed memory.
    sanitizer = os.environ.get("ASAN_OPTIONS", "") + ":handle_segv=0:quarantine_size_mb=0"
    environment = os.environ | {"ASAN_OPTIONS": sanitizer}
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)


# What the driver says of itself


def test_facts(driver: DriverTable) -> None:
    geometry = driver.geometry()
    assert geometry.granularity == PAGE
    assert geometry.recommended % geometry.granularity == 0
    assert geometry.max_chunk % geometry.granularity == 0
    assert geometry.max_reservation == 0
    assert geometry.copy_threads == min(len(os.sched_getaffinity(0)), 8)
    assert geometry.dlpack_device == 1
    assert driver.flags == DriverFlags.HOST_ACCESSIBLE | DriverFlags.FRESH_ZERO | DriverFlags.COPIES_BLOCK
    assert not driver.simulated
    assert driver.quirks() == DriverQuirks(0)
    assert driver.device_count() == 1
    assert driver.device_name()
    assert driver.driver_version() == f"{os.uname().sysname} {os.uname().release}"


def test_memory_without_a_budget_is_that_of_the_host() -> None:
    table = driver_table()
    table.open()
    free, total = table.memory_info()
    assert 0 < free <= total <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_another_device_is_not_here() -> None:
    for device in (-1, 1):
        with pytest.raises(BackendUnavailable, match="one CPU device"):
            driver_table(device)


@pytest.mark.parametrize(
    "options",
    [
        {"bugdet": 1},
        {"budget": "1GiB"},
        {"budget": ""},
        {"budget": -1},
        {"budget": 1 << 64},
        {"streaming": "mmx"},
        {"fail": "create"},
        {"fail": "create:0"},
        {"fail": "cuMemCreate:1"},
        {"fail": "create:1:2:3"},
    ],
)
def test_a_wrong_option_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(DriverError, match="option"):
        driver_table(options=options)


def test_a_vendor_library_is_refused() -> None:
    with pytest.raises(DriverError, match="vendor"):
        DriverTable(driver_table().module, device=0, library="libc.so.6")


def test_close_is_called_as_often_as_open() -> None:
    table = driver_table()
    with pytest.raises(DriverError, match="is not open"):
        table.close()
    for take in (lambda: table.reserve(PAGE), lambda: table.create(PAGE), table.stream_create):
        with pytest.raises(DriverError, match="is not open"):
            take()
    table.open()
    table.open()
    table.close()
    table.reserve(PAGE)
    table.close()
    with pytest.raises(DriverError, match="is not open"):
        table.close()


# Addresses


def test_reservations_are_aligned_and_apart(driver: DriverTable) -> None:
    sizes = [PAGE, 3 * PAGE, 512 * MB, 1 << 40]
    ranges = sorted((driver.reserve(size), size) for size in sizes)
    assert all(address % PAGE == 0 for address, _ in ranges)
    assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(ranges))
    for address, size in ranges:
        driver.release_address(address, size)


def test_a_free_address_is_given_when_asked_for(driver: DriverTable) -> None:
    address = driver.reserve(4 * PAGE)
    other = driver.reserve(PAGE, address)
    assert other not in range(address, address + 4 * PAGE), "it is taken"
    driver.release_address(address, 4 * PAGE)
    assert driver.reserve(2 * PAGE, address) == address


def test_reserving_costs_no_memory(driver: DriverTable) -> None:
    before = driver.memory_info()
    driver.reserve(1 << 40)
    assert driver.memory_info() == before


@pytest.mark.parametrize("size", [0, 1, PAGE - 1, PAGE + 4096])
def test_odd_sizes_are_refused(driver: DriverTable, size: int) -> None:
    for take in (driver.reserve, driver.create):
        with pytest.raises(DriverError, match="multiple of"):
            take(size)
    with pytest.raises(DriverError, match="multiple of"):
        driver.reserve(PAGE, 4096)


def test_huge_sizes_are_out_of_memory_or_refused(driver: DriverTable) -> None:
    for size in (1 << 60, (1 << 64) - PAGE):
        with pytest.raises(DeviceOutOfMemory):
            driver.reserve(size)
        with pytest.raises(DriverError, match="larger than"):
            driver.create(size)


def test_only_an_empty_reservation_is_released_and_only_whole(driver: DriverTable) -> None:
    address, handle = mapped(driver)
    write(address, b"kept")
    with pytest.raises(DriverError, match="memory is mapped"):
        driver.release_address(address, PAGE)
    driver.unmap(address, PAGE)
    for wrong in ((address, 2 * PAGE), (address + PAGE, PAGE), (0, PAGE)):
        with pytest.raises(DriverError, match="not a reservation"):
            driver.release_address(*wrong)
    driver.map(address, PAGE, handle)
    assert read(address, 4) == b"kept"
    give_back(driver, address, handle)
    with pytest.raises(DriverError, match="not a reservation"):
        driver.release_address(address, PAGE)


# Memory and its budget


def test_new_memory_is_zero_even_where_others_were(driver: DriverTable) -> None:
    for _ in range(3):
        address, handle = mapped(driver)
        assert read(address, PAGE) == bytes(PAGE)
        ctypes.memset(address, 255, PAGE)
        give_back(driver, address, handle)


def test_the_budget_is_the_devices_memory(driver: DriverTable) -> None:
    assert driver.memory_info() == (BUDGET, BUDGET)
    chunk = 64 * MB
    handles = [driver.create(chunk) for _ in range(3)]
    assert driver.memory_info() == (BUDGET - 3 * chunk, BUDGET)
    handles.append(driver.create(chunk - PAGE))
    with pytest.raises(
        DeviceOutOfMemory, match=f"{2 * PAGE} bytes asked of {BUDGET}.*budget.*{BUDGET - PAGE} are used"
    ):
        driver.create(2 * PAGE)
    assert driver.memory_info() == (PAGE, BUDGET)
    driver.release(handles[0], chunk)
    handles[0] = driver.create(chunk)
    driver.release(handles.pop(), chunk - PAGE)
    for handle in handles:
        driver.release(handle, chunk)
    assert driver.memory_info() == (BUDGET, BUDGET)


def test_a_budget_beyond_the_host_is_not_believed() -> None:
    table = open_driver(budget=1 << 50)
    free, total = table.memory_info()
    assert total == 1 << 50
    assert free <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_two_drivers_have_a_budget_each() -> None:
    first, second = open_driver(), open_driver()
    first.create(64 * MB)
    assert second.memory_info() == (BUDGET, BUDGET)


def test_a_chunk_has_a_largest_size(driver: DriverTable) -> None:
    largest = driver.geometry().max_chunk
    driver.release(driver.create(largest), largest)
    with pytest.raises(DriverError, match="larger than"):
        driver.create(largest + PAGE)


def test_release_wants_an_unmapped_handle_and_its_size(driver: DriverTable) -> None:
    address, handle = mapped(driver)
    with pytest.raises(DriverError, match="is mapped at"):
        driver.release(handle, PAGE)
    driver.unmap(address, PAGE)
    with pytest.raises(DriverError, match="the handle has"):
        driver.release(handle, 2 * PAGE)
    with pytest.raises(DriverError, match="unknown"):
        driver.release(handle + 1000, PAGE)
    driver.release(handle, PAGE)
    with pytest.raises(DriverError, match="unknown"):
        driver.release(handle, PAGE)
    assert driver.memory_info() == (BUDGET, BUDGET)


# Mapping


def test_bytes_are_kept_while_unmapped(driver: DriverTable) -> None:
    size = 3 * PAGE
    address, handle = mapped(driver, size)
    data = random.Random(1).randbytes(size)
    write(address, data)
    for _ in range(3):
        driver.unmap(address, size)
        driver.map(address, size, handle)
        assert read(address, size) == data


def test_memory_may_be_mapped_elsewhere(driver: DriverTable) -> None:
    address, handle = mapped(driver)
    write(address, b"moved")
    driver.unmap(address, PAGE)
    elsewhere = driver.reserve(3 * PAGE)
    driver.map(elsewhere + PAGE, PAGE, handle)
    assert read(elsewhere + PAGE, 5) == b"moved"


def test_mapping_touches_no_memory(driver: DriverTable) -> None:
    address, _ = mapped(driver, 64 * MB)
    assert smaps(address)["Rss"] == 0


def test_wrong_mappings_are_refused_and_change_nothing(driver: DriverTable) -> None:
    address, handle = mapped(driver, 2 * PAGE)
    write(address + PAGE, b"kept")
    small, other = driver.create(PAGE), driver.create(2 * PAGE)
    space = driver.reserve(2 * PAGE)
    wrong: list[tuple[str, tuple[int, int, int]]] = [
        ("mapped already, at", (space, 2 * PAGE, handle)),
        ("mapped already in", (address, 2 * PAGE, other)),
        ("mapped already in", (address + PAGE, PAGE, small)),
        ("not within one reservation", (space + PAGE, 2 * PAGE, other)),
        ("not within one reservation", (1 << 46, PAGE, small)),
        ("has 2097152 bytes", (space, 2 * PAGE, small)),
        ("unknown", (space, PAGE, 1000)),
        ("multiple of", (space + 4096, PAGE, small)),
        ("multiple of", (space, 4096, small)),
        ("multiple of", (0, PAGE, small)),
    ]
    for text, arguments in wrong:
        with pytest.raises(DriverError, match=text):
            driver.map(*arguments)
    assert read(address + PAGE, 4) == b"kept"
    driver.map(space, PAGE, small)
    driver.unmap(space, PAGE)
    driver.map(space, 2 * PAGE, other)


def test_only_a_whole_mapping_is_unmapped(driver: DriverTable) -> None:
    address, handle = mapped(driver, 2 * PAGE)
    write(address + PAGE, b"kept")
    for wrong in ((address, PAGE), (address + PAGE, PAGE), (address, 4 * PAGE), (driver.reserve(PAGE), PAGE)):
        with pytest.raises(DriverError, match="not one mapping"):
            driver.unmap(*wrong)
    assert read(address + PAGE, 4) == b"kept"
    driver.unmap(address, 2 * PAGE)
    with pytest.raises(DriverError, match="not one mapping"):
        driver.unmap(address, 2 * PAGE)
    driver.release(handle, 2 * PAGE)


def test_neighbours_are_not_touched(driver: DriverTable) -> None:
    address = driver.reserve(5 * PAGE)
    handles = [driver.create(PAGE) for _ in range(5)]
    for index, handle in enumerate(handles):
        driver.map(address + index * PAGE, PAGE, handle)
        ctypes.memset(address + index * PAGE, index + 1, PAGE)
    for index in (1, 3):
        driver.unmap(address + index * PAGE, PAGE)
    assert [read(address + index * PAGE, PAGE) == bytes([index + 1]) * PAGE for index in (0, 2, 4)] == [True] * 3
    for index in (1, 3):
        driver.release(handles[index], PAGE)
    assert [read(address + index * PAGE, PAGE) == bytes([index + 1]) * PAGE for index in (0, 2, 4)] == [True] * 3


# Faults


@pytest.mark.parametrize("keep_address", [1, 0])
@pytest.mark.parametrize("access", ["ctypes.string_at({}, 1)", "ctypes.memset({}, 1, 1)"])
@pytest.mark.parametrize(
    ("state", "place"),
    [
        ("", "address + PAGE"),
        ("driver.unmap(address, PAGE)", "address"),
        ("driver.unmap(address, PAGE)", "address + PAGE - 1"),
        ("driver.unmap(address, PAGE); driver.release(handle, PAGE)", "address"),
    ],
    ids=["reserved", "unmapped", "last byte unmapped", "released"],
)
def test_every_access_to_what_is_not_mapped_faults(keep_address: int, access: str, state: str, place: str) -> None:
    script = f"""
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        driver = driver_table(options={{"budget": 1 << 30, "keep_address": {keep_address}}})
        driver.open()
        address, handle = driver.reserve(2 * PAGE), driver.create(PAGE)
        driver.map(address, PAGE, handle)
        ctypes.memset(address, 7, PAGE)
        {state}
        print("before", flush=True)
        {access.format(place)}
        print("after", flush=True)
    """
    ended = run_child(script)
    assert ended.stdout == "before\n", ended.stderr
    assert ended.returncode == -signal.SIGSEGV


def test_nobody_else_is_given_the_address_while_memory_is_unmapped(driver: DriverTable) -> None:
    size = 16 * PAGE
    address, handle = mapped(driver, size)
    stop = threading.Event()
    intruders: list[int] = []

    def take_what_is_free() -> None:
        while not stop.is_set():
            taken = [mmap.mmap(-1, size) for _ in range(4)]
            starts = [ctypes.addressof(ctypes.c_char.from_buffer(memory)) for memory in taken]
            intruders.extend(start for start in starts if address - size < start < address + size)

    thread = threading.Thread(target=take_what_is_free)
    thread.start()
    for _ in range(30):
        driver.unmap(address, size)
        driver.map(address, size, handle)
    stop.set()
    thread.join()
    assert intruders == []


# Memory returns


MEASURE = """
    def number(file, key):
        return next(int(line.split()[1]) * 1024 for line in open(file) if line.startswith(key + ":"))

    def resident():
        return number("/proc/self/status", "RssAnon")

    def state():
        return len(open("/proc/self/maps").readlines()), len(os.listdir("/proc/self/fd")), number("/proc/self/status", "VmSize")
"""


def test_memory_returns_to_the_host_with_release() -> None:
    script = """
        chunk, count = 32 * MB, 8
        base = driver.reserve(count * chunk)
        handles = [driver.create(chunk) for _ in range(count)]
        before = resident()
        for index, taken in enumerate(handles):
            driver.map(base + index * chunk, chunk, taken)
        ctypes.memset(base, 1, count * chunk)
        grown = resident() - before
        assert grown >= 0.99 * count * chunk, grown
        for index, taken in enumerate(handles):
            driver.unmap(base + index * chunk, chunk)
            driver.release(taken, chunk)
        left = resident() - before
        assert left <= 0.01 * grown, (left, grown)
    """
    ended = run_child(textwrap.dedent(MEASURE) + textwrap.dedent(script))
    assert ended.returncode == 0, ended.stderr


def test_a_thousand_cycles_grow_nothing() -> None:
    script = """
        base = driver.reserve(4 * PAGE)

        def cycle():
            handles = [driver.create(PAGE) for _ in range(4)]
            for index, taken in enumerate(handles):
                driver.map(base + index * PAGE, PAGE, taken)
            ctypes.memset(base, 1, 4096)
            for index, taken in enumerate(handles):
                driver.unmap(base + index * PAGE, PAGE)
                driver.release(taken, PAGE)

        for _ in range(10):
            cycle()
        before, resident_before = state(), resident()
        for _ in range(1000):
            cycle()
        after, resident_after = state(), resident()
        assert all(a <= b for a, b in zip(after, before)), (before, after)
        assert resident_after <= resident_before + MB, (resident_before, resident_after)
        assert driver.memory_info()[0] == (1 << 30) - PAGE
    """
    ended = run_child(textwrap.dedent(MEASURE) + textwrap.dedent(script))
    assert ended.returncode == 0, ended.stderr


def test_moves_keep_huge_pages() -> None:
    driver = open_driver()
    size = 8 * PAGE
    address, handle = mapped(driver, size)
    ctypes.memset(address, 1, size)
    huge = smaps(address)["AnonHugePages"]
    if huge < size:
        pytest.skip("the host gives no huge pages")
    for _ in range(3):
        driver.unmap(address, size)
        driver.map(address, size, handle)
    assert smaps(address)["AnonHugePages"] == huge


# Copies


@pytest.mark.parametrize("streaming", STREAMINGS)
@pytest.mark.parametrize("size", [0, 1, 63, 4096, MB - 1, MB, MB + 1, 3 * MB + 77])
def test_copies_and_fills_reach_all_their_bytes_and_no_others(streaming: str, size: int) -> None:
    driver = open_driver(streaming=streaming)
    address, _ = mapped(driver, 4 * PAGE)
    stream = driver.stream_create()
    data = random.Random(size).randbytes(size)
    for offset, host_offset in ((0, 0), (1, 3), (17, 64)):
        start = address + 128 + offset
        host = ctypes.create_string_buffer(b"\xee" * (size + 256), size + 256)
        source = ctypes.create_string_buffer(bytes(host_offset) + data, size + host_offset + 1)
        ctypes.memset(address, 0xDD, size + 512)
        driver.copy_to_device(start, ctypes.addressof(source) + host_offset, size, stream)
        driver.copy_to_host(ctypes.addressof(host) + 100, start, size, stream)
        driver.stream_synchronize(stream)
        assert read(address, size + 512) == b"\xdd" * (128 + offset) + data + b"\xdd" * (384 - offset)
        assert host.raw == b"\xee" * 100 + data + b"\xee" * 156
        driver.fill(start, 0xA5, size, stream)
        assert read(address, size + 512) == b"\xdd" * (128 + offset) + b"\xa5" * size + b"\xdd" * (384 - offset)
    driver.device_synchronize()
    driver.stream_destroy(stream)


def test_a_copy_may_cross_chunks(driver: DriverTable) -> None:
    address = driver.reserve(2 * PAGE)
    handles = [driver.create(PAGE) for _ in range(2)]
    for index, handle in enumerate(handles):
        driver.map(address + index * PAGE, PAGE, handle)
    stream = driver.stream_create()
    data = random.Random(2).randbytes(2 * MB)
    host = ctypes.create_string_buffer(data, len(data))
    driver.copy_to_device(address + PAGE - MB, ctypes.addressof(host), len(data), stream)
    assert read(address + PAGE - MB, len(data)) == data


def test_copies_of_what_is_not_mapped_are_refused(driver: DriverTable) -> None:
    address, _ = mapped(driver)
    unmapped, handle = mapped(driver)
    driver.unmap(unmapped, PAGE)
    stream = driver.stream_create()
    host = ctypes.create_string_buffer(PAGE + 1)
    for start, size in ((address + 1, PAGE), (address - 1, 2), (unmapped, 1), (0, 1), ((1 << 64) - 1, 2)):
        for use in (
            lambda start=start, size=size: driver.copy_to_host(ctypes.addressof(host), start, size, stream),
            lambda start=start, size=size: driver.copy_to_device(start, ctypes.addressof(host), size, stream),
            lambda start=start, size=size: driver.fill(start, 1, size, stream),
        ):
            with pytest.raises(DriverError, match=r"not all mapped|wrap around"):
                use()
    driver.release(handle, PAGE)


def test_an_unknown_stream_is_refused(driver: DriverTable) -> None:
    address, _ = mapped(driver)
    stream = driver.stream_create()
    other = driver.stream_create()
    assert stream != other
    driver.stream_destroy(stream)
    uses: list[Callable[[], None]] = [
        lambda: driver.fill(address, 1, 1, stream),
        lambda: driver.stream_synchronize(stream),
        lambda: driver.stream_destroy(stream),
    ]
    for use in uses:
        with pytest.raises(DriverError, match="unknown"):
            use()
    driver.fill(address, 1, 1, other)


# Threads, fork, exit, limits


def test_threads_share_a_driver(driver: DriverTable) -> None:
    failures: list[str] = []

    def work(number: int) -> None:
        stream = driver.stream_create()
        for round_ in range(30):
            address, handle = mapped(driver)
            value = (number * 31 + round_) % 256
            driver.fill(address, value, PAGE, stream)
            driver.unmap(address, PAGE)
            driver.map(address, PAGE, handle)
            if read(address, PAGE) != bytes([value]) * PAGE:
                failures.append(f"thread {number}, round {round_}")
            give_back(driver, address, handle)
        driver.stream_destroy(stream)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert driver.memory_info() == (BUDGET, BUDGET)


def test_a_forked_child_keeps_what_it_saw_and_the_parent_sleeps() -> None:
    driver = open_driver()
    address, handle = mapped(driver)
    write(address, b"parent")
    to_child, to_parent = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        write(address, b"child!")
        os.write(to_parent[1], b"x")
        os.read(to_child[0], 1)
        os._exit(0 if read(address, 6) == b"child!" else 1)
    os.read(to_parent[0], 1)
    driver.unmap(address, PAGE)
    driver.map(address, PAGE, handle)
    assert read(address, 6) == b"parent"
    give_back(driver, address, handle)
    os.write(to_child[1], b"x")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    for end in (*to_child, *to_parent):
        os.close(end)


@pytest.mark.parametrize("state", ["pass", "driver.unmap(address, PAGE)", "driver.close()"])
def test_a_process_ends_cleanly_in_any_state(state: str) -> None:
    ended = run_child(state)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


@pytest.mark.skipif(SANITIZED, reason="a sanitizer maps memory at any time, and ends the process when it cannot")
def test_a_full_table_of_memory_areas_is_out_of_memory_and_named() -> None:
    most = int(Path("/proc/sys/vm/max_map_count").read_text())
    if most > 200_000:
        pytest.skip(f"filling {most} memory areas takes too long")
    script = """
        # A neighbour with another access right cannot be merged into one area.
        filler = driver.reserve(1 << 30)
        protect = ctypes.CDLL(None).mprotect
        protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        spare = driver.create(PAGE)
        page = 0
        while protect(filler + 8192 * page, 4096, 1) == 0:
            page += 1
        refused = []
        for name, use in (
            ("create", lambda: driver.create(PAGE)),
            ("map", lambda: driver.map(address + PAGE, PAGE, spare)),
            ("unmap", lambda: driver.unmap(address, PAGE)),
        ):
            try:
                use()
            except DeviceOutOfMemory as error:
                assert "vm.max_map_count" in str(error), error
                refused.append(name)
        print(*refused)
        assert ctypes.string_at(address + PAGE - 4, 4) == b"\\x07" * 4
        for back in range(page - 20, page):
            protect(filler + 8192 * back, 4096, 0)
        driver.unmap(address, PAGE)
        driver.map(address, PAGE, handle)
        driver.map(address + PAGE, PAGE, spare)
        assert ctypes.string_at(address, PAGE) == b"\\x07" * PAGE
        assert driver.memory_info()[0] == (1 << 30) - 2 * PAGE
    """
    ended = run_child(script)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == ["create", "map", "unmap"]


@pytest.mark.skipif(SANITIZED, reason="a sanitizer maps memory at any time, and ends the process when it cannot")
def test_a_limit_on_address_space_is_out_of_memory_and_named() -> None:
    script = """
        used = int(open("/proc/self/statm").read().split()[0]) * 4096
        resource.setrlimit(resource.RLIMIT_AS, (used + 16 * MB, resource.RLIM_INFINITY))
        for use in (lambda: driver.create(64 * MB), lambda: driver.reserve(1 << 30)):
            try:
                use()
            except DeviceOutOfMemory as error:
                assert "RLIMIT_AS" in str(error), error
            else:
                raise AssertionError("no error")
        assert driver.memory_info()[0] == (1 << 30) - PAGE
    """
    ended = run_child(script)
    assert ended.returncode == 0, ended.stderr


# Injected failures


ENTRIES = [
    *("open", "close", "geometry", "memory_info", "device_count", "device_name", "driver_version"),
    *("reserve", "release_address", "create", "release", "map", "unmap"),
    *("stream_create", "stream_destroy", "copy_to_host", "copy_to_device", "fill"),
    *("stream_synchronize", "device_synchronize"),
]


def use_every_entry(driver: DriverTable) -> None:
    driver.open()
    driver.geometry()
    driver.memory_info()
    driver.device_count()
    driver.device_name()
    driver.driver_version()
    address, handle = mapped(driver)
    stream = driver.stream_create()
    host = ctypes.create_string_buffer(16)
    driver.fill(address, 1, 16, stream)
    driver.copy_to_host(ctypes.addressof(host), address, 16, stream)
    driver.copy_to_device(address, ctypes.addressof(host), 16, stream)
    driver.stream_synchronize(stream)
    driver.device_synchronize()
    driver.stream_destroy(stream)
    give_back(driver, address, handle)
    driver.close()


@pytest.mark.parametrize("entry", ENTRIES)
def test_any_entry_can_be_made_to_fail_and_does_nothing_then(entry: str) -> None:
    driver = open_driver()
    faults = DriverFaults(driver)
    use_every_entry(driver)
    before = faults.calls(entry)
    faults.fail(entry)
    with pytest.raises((DriverError, DeviceOutOfMemory), match=f"{entry}.*injected"):
        use_every_entry(driver)
    assert faults.calls(entry) == before + 1
    use_every_entry(driver)


def test_a_failed_create_is_out_of_memory_and_takes_nothing() -> None:
    driver = open_driver(fail="create:2:2")
    driver.create(PAGE)
    for _ in range(2):
        with pytest.raises(DeviceOutOfMemory, match="injected"):
            driver.create(PAGE)
    assert driver.memory_info()[0] == BUDGET - PAGE
    driver.create(PAGE)
    assert DriverFaults(driver).calls("create") == 4


def test_a_failed_map_or_unmap_keeps_bytes_and_state() -> None:
    driver = open_driver()
    faults = DriverFaults(driver)
    address, handle = mapped(driver)
    write(address, b"kept")
    faults.fail("unmap")
    with pytest.raises(DriverError, match="injected"):
        driver.unmap(address, PAGE)
    assert read(address, 4) == b"kept"
    driver.unmap(address, PAGE)
    faults.fail("map")
    with pytest.raises(DriverError, match="injected"):
        driver.map(address, PAGE, handle)
    driver.map(address, PAGE, handle)
    assert read(address, 4) == b"kept"


def test_failures_can_last_and_be_ended() -> None:
    driver = open_driver()
    faults = DriverFaults(driver)
    faults.fail("create", nth=2, times=-1)
    driver.create(PAGE)
    for _ in range(3):
        with pytest.raises(DeviceOutOfMemory):
            driver.create(PAGE)
    faults.fail("create", times=0)
    driver.create(PAGE)


def test_failures_and_counts_belong_to_one_opened_driver() -> None:
    first, second = open_driver(), open_driver()
    DriverFaults(first).fail("create")
    second.create(PAGE)
    assert DriverFaults(first).calls("create") == 0
    assert DriverFaults(second).calls("create") == 1


def test_unknown_entries_have_no_failures_and_no_counts() -> None:
    faults = DriverFaults(open_driver())
    with pytest.raises(ValueError, match="cuMemCreate"):
        faults.fail("cuMemCreate")
    with pytest.raises(ValueError, match="cuMemCreate"):
        faults.calls("cuMemCreate")
