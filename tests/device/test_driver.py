"""A driver's entries, one by one and on several threads."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest

from hardpoint.memory import VirtualPool
from hardpoint_conformance.device_memory import MAPPED, PREREQUISITES, DeviceMemory, in_fresh_thread

from .targets import DEVICE, MIB, SIMULATION_EXPECTED, DeviceTarget


@pytest.fixture
def memory(target: DeviceTarget) -> Iterator[DeviceMemory]:
    memory = DeviceMemory(target.table, target.table.geometry().recommended)
    yield memory
    in_fresh_thread(memory.close)


def test_driver_is_simulated_only_where_that_is_said(target: DeviceTarget) -> None:
    assert target.table.simulated is target.simulated


def test_device_describes_itself(target: DeviceTarget) -> None:
    free, total = target.table.memory_info()
    assert 0 < free <= total
    assert target.table.device_count() > target.index
    assert target.table.device_name()
    assert target.table.driver_version()


RUNTIMES = {"cuda": "libcuda.so", "rocm": "libamdhip64.so", "ascend": "libascendcl.so"}


@pytest.fixture(scope="module")
def torch_has_started() -> None:
    """Have torch take what it keeps of the device, before the device's free memory is looked at."""
    if DEVICE and not SIMULATION_EXPECTED and find_spec("torch") is not None:
        import torch

        if torch.accelerator.is_available():
            torch.zeros(1, device=torch.accelerator.current_accelerator())


def test_vendors_library_is_in_the_process_once(torch_has_started: None, vendors_target: DeviceTarget) -> None:
    """Torch's too, where torch is built for the device: of two, each would know nothing of the other's memory."""
    target = vendors_target
    if target.backend not in RUNTIMES:
        pytest.skip(f"these tests do not know the name of the vendor's library under backend '{target.backend}'")
    lines = Path("/proc/self/maps").read_text("utf-8").splitlines()
    files = {os.path.realpath(line.split(maxsplit=5)[5]) for line in lines if len(line.split()) > 5}
    found = [file for file in files if Path(file).name.startswith(RUNTIMES[target.backend])]
    assert len(found) == 1, found


def test_granularities_are_multiples_of_pages_and_of_one_another(target: DeviceTarget) -> None:
    geometry = target.table.geometry()
    assert geometry.granularity > 0
    assert geometry.granularity % 4096 == 0
    assert geometry.recommended % geometry.granularity == 0


def test_quirks_are_the_same_when_asked_again(target: DeviceTarget) -> None:
    assert target.table.quirks() == target.table.quirks()


def test_bytes_written_are_read_back(memory: DeviceMemory) -> None:
    content = os.urandom(memory.size)
    memory.do("host_register", *MAPPED, "stream_create")
    memory.write(content)
    memory.do("copy_to_device", "stream_synchronize")
    memory.write(bytes(memory.size))
    memory.do("copy_to_host", "stream_synchronize")
    assert memory.read() == content


def test_bytes_of_host_memory_that_is_not_pinned_are_copied_too(memory: DeviceMemory) -> None:
    memory.do(*MAPPED, "stream_create", "fill", "copy_to_host", "stream_synchronize")
    assert memory.read() == b"\x5a" * memory.size


ROUNDS = 200 if DEVICE else 20


def test_memory_holds_what_is_written_at_once_after_it_was_mapped(target: DeviceTarget) -> None:
    """By copies on another stream than the one that wrote, each time at an address and with memory of its own."""
    table, size = target.table, target.table.geometry().recommended
    streams = [table.stream_create() for _ in range(2)]
    content, found = (ctypes.create_string_buffer(size) for _ in range(2))
    for number in range(ROUNDS):
        ctypes.memset(content, number % 251 + 1, size)
        address, handle = table.reserve(size), table.create(size)
        table.map(address, size, handle)
        table.copy_to_device(address, ctypes.addressof(content), size, streams[number % 2])
        table.stream_synchronize(streams[number % 2])
        table.copy_to_host(ctypes.addressof(found), address, size, streams[1 - number % 2])
        table.stream_synchronize(streams[1 - number % 2])
        assert found.raw == content.raw, f"round {number}"
        table.unmap(address, size)
        table.release(handle, size)
        table.release_address(address, size)
    for stream in streams:
        table.stream_destroy(stream)


def pool_size(size: int, part: float, granularity: int) -> int:
    return max(1, int(size * part) // granularity) * granularity


def test_allocations_of_several_chunks_are_made_touched_and_freed_again(target: DeviceTarget) -> None:
    """A whole number of chunks and a part, so that the tail may be of another size than the others, and beside other allocations."""
    geometry, before = target.table.geometry(), target.free()
    chunk = geometry.max_chunk or 256 * MIB
    size = min(int(2.4 * chunk), before // 2) // geometry.granularity * geometry.granularity
    pool, others = VirtualPool(target.table), [pool_size(size, part, geometry.granularity) for part in (0.1, 0.25, 0.5)]
    for number in range(3):
        beside = [pool.allocate(other) for other in others]
        address = pool.allocate(size)
        places = [*range(0, size - 64, min(chunk, size) // 2), size - 64]
        for place in places:
            pool.write(address + place, bytes([number + 1]) * 64)
        assert all(pool.read(address + place, 64) == bytes([number + 1]) * 64 for place in places)
        for one in (*beside, address):
            pool.free(one)
    pool.close()
    assert target.has_free(before)


def test_handle_keeps_its_bytes_while_unmapped(memory: DeviceMemory) -> None:
    memory.do(*MAPPED, "stream_create", "fill", "device_synchronize", "unmap", "map")
    memory.do("copy_to_host", "stream_synchronize")
    assert memory.read() == b"\x5a" * memory.size


@pytest.mark.parametrize("entry", PREREQUISITES)
def test_every_entry_works_on_a_thread_that_never_used_the_device(entry: str, memory: DeviceMemory) -> None:
    for step in (*PREREQUISITES[entry], entry):
        in_fresh_thread(lambda step=step: memory.do(step))  # type: ignore[misc]


def test_two_threads_work_side_by_side(target: DeviceTarget) -> None:
    def work() -> None:
        memory = DeviceMemory(target.table, target.table.geometry().recommended)
        for _ in range(10):
            memory.do(*MAPPED, "stream_create", "fill", "copy_to_host", "stream_synchronize")
            assert memory.read() == b"\x5a" * memory.size
            memory.write(bytes(memory.size))
            memory.do("device_synchronize", "unmap", "release", "release_address", "stream_destroy")
        memory.close()

    with ThreadPoolExecutor(2) as executor:
        for done in [executor.submit(work) for _ in range(2)]:
            done.result()
