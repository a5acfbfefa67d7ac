"""A driver's entries, one by one and on several threads."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from hardpoint_conformance.device_memory import MAPPED, PREREQUISITES, DeviceMemory, in_fresh_thread

from .targets import DeviceTarget


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
