"""The ROCm memory driver over the simulated HIP runtime: what all drivers do, and what is AMD's."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hardpoint.interfaces import SleepPlan, SleepTier
from hardpoint.interfaces.errors import DriverError, ForeignMemory
from hardpoint.memory import VirtualPool, driver_file
from hardpoint.memory.driver_table import DriverQuirks, DriverTable
from hardpoint_rocm import allocator, descriptor
from hardpoint_simulators import Simulator

from ...testing.driver_suite import (
    MIB,
    SIZE,
    UNOPENED_DEVICE,
    UNUSABLE_DEVICE,
    CallerDevice,
    DeviceMemory,
    DriverFacts,
    DriverSuite,
    held,
    in_fresh_thread,
)

OURS, VLLMS = "HARDPOINT_ROCM_CHUNK_MB", "VLLM_ROCM_SLEEP_MEM_CHUNK_SIZE"


class ThreadDevice(CallerDevice):
    """The thread's current device, counted from 1."""

    def use(self, device: int) -> None:
        self.call("hipSetDevice", device)

    def current(self) -> int:
        device = ctypes.c_int()
        self.call("hipGetDevice", ctypes.byref(device))
        return device.value + 1

    def close(self) -> None:
        pass


class TestRocmDriver(DriverSuite):
    facts = DriverFacts(
        vendor="rocm",
        codes={"out_of_memory": 2, "failed": 700, "invalid": 1, "unsupported": 801, "no_device": 100},
        names={"out_of_memory": "hipErrorOutOfMemory", "failed": "hipErrorIllegalAddress"},
        dlpack_device=10,
        create="hipMemCreate",
        count="hipGetDeviceCount",
        required_symbol="hipGetErrorName",
        restoring="hipSetDevice",
        tolerated=frozenset({("reserve", "hipMemAddressReserve", 1)}),
        granularity=4096,
        quirks=DriverQuirks.STALE_PAGES,
        quirk_settings={
            "unified_memory": (1, DriverQuirks.UNIFIED_MEMORY | DriverQuirks.STALE_PAGES),
            "hold_until_address_free": (2, DriverQuirks.ADDRESS_HOLDS_MEMORY | DriverQuirks.STALE_PAGES),
            "stale_pages": (0, DriverQuirks(0)),
            "free_counter_lag": (3, DriverQuirks.FREE_LAGS | DriverQuirks.STALE_PAGES),
        },
    )
    backend = allocator
    descriptor = descriptor
    caller_device = ThreadDevice

    @pytest.fixture(autouse=True)
    def _no_chunk_variables(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv(OURS, raising=False)
        monkeypatch.delenv(VLLMS, raising=False)

    def max_chunk(self, simulator: Simulator, **options: Any) -> int:
        driver = self.table(simulator, **options)
        driver.open()
        largest = driver.geometry().max_chunk
        driver.close()
        return largest

    def test_chunk_is_256_mib_unless_something_else_is_asked_for(self, simulator: Simulator) -> None:
        assert self.max_chunk(simulator) == 256 * MIB

    def test_chunk_is_the_options_then_our_variables_then_vllms(
        self, simulator: Simulator, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(VLLMS, "32")
        assert self.max_chunk(simulator) == 32 * MIB
        monkeypatch.setenv(OURS, "64")
        assert self.max_chunk(simulator) == 64 * MIB
        assert self.max_chunk(simulator, chunk_mb=128) == 128 * MIB

    def test_chunk_is_rounded_down_to_the_recommended_granularity(self, simulator: Simulator) -> None:
        assert self.max_chunk(simulator, chunk_mb=5) == 4 * MIB

    def test_chunk_smaller_than_the_recommended_granularity_is_refused(self, simulator: Simulator) -> None:
        with pytest.raises(
            DriverError, match="a chunk of 1 MiB is smaller than the recommended granularity, 2097152 bytes"
        ):
            self.max_chunk(simulator, chunk_mb=1)

    @pytest.mark.parametrize("value", ["0", "-4", "1.5", "64MB", " 64", "1048577", "99999999999999999999999"])
    @pytest.mark.parametrize("origin", ["option chunk_mb", OURS, VLLMS])
    def test_chunk_that_is_no_size_is_refused(
        self, value: str, origin: str, simulator: Simulator, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        options: dict[str, Any] = {"chunk_mb": value} if origin.startswith("option") else {}
        if not options:
            monkeypatch.setenv(origin, value)
        with pytest.raises(DriverError, match=f"{origin} is '{value}', not a whole number from 1 to 1048576"):
            self.table(simulator, **options)

    def test_allocation_larger_than_a_chunk_is_refused(self, simulator: Simulator) -> None:
        driver = self.table(simulator, chunk_mb=4)
        driver.open()
        with pytest.raises(DriverError, match="size 6291456 is larger than the limit, 4194304"):
            driver.create(6 * MIB)
        driver.close()

    def test_reserving_is_tried_without_an_alignment(
        self, memory: DeviceMemory, driver: DriverTable, simulator: Simulator
    ) -> None:
        simulator.set("refuse_alignment", 1)
        tried = simulator.call_count("hipMemAddressReserve")
        memory.do("reserve", "create", "map")
        assert simulator.call_count("hipMemAddressReserve") - tried == 2
        assert memory.address % driver.geometry().granularity == 0

    def test_reserving_that_fails_twice_is_reported(self, driver: DriverTable, simulator: Simulator) -> None:
        before = held(simulator.stats())
        simulator.fail("hipMemAddressReserve", code=self.facts.codes["failed"], times=2)
        with pytest.raises(DriverError) as caught:
            driver.reserve(SIZE)
        assert (caught.value.call, caught.value.code) == ("hipMemAddressReserve", self.facts.codes["failed"])
        assert held(simulator.stats()) == before

    def test_device_without_virtual_memory_is_unsupported(self, simulator: Simulator) -> None:
        simulator.set("virtual_memory", 0)
        with pytest.raises(DriverError, match="the device has no virtual memory management"):
            self.table(simulator, UNUSABLE_DEVICE)

    def test_handle_that_create_never_returned_is_refused(self, memory: DeviceMemory) -> None:
        memory.do("reserve")
        with pytest.raises(DriverError, match="handle 0 is none that create returned"):
            memory.driver.map(memory.address, SIZE, 0)

    def test_memory_held_by_its_address_returns_with_it(self, memory: DeviceMemory, simulator: Simulator) -> None:
        simulator.set("hold_until_address_free", 2)
        memory.do("reserve", "create", "map", "unmap", "release")
        assert simulator.used(1) == SIZE
        memory.do("release_address")
        assert simulator.used(1) == 0

    def test_several_quirks_are_found_together(self, driver: DriverTable, simulator: Simulator) -> None:
        simulator.set("hold_until_address_free", 2)
        simulator.set("free_counter_lag", 3)
        found = driver.quirks()
        assert found == DriverQuirks.ADDRESS_HOLDS_MEMORY | DriverQuirks.STALE_PAGES | DriverQuirks.FREE_LAGS

    def test_unaligned_range_is_given_back_and_reported(self, simulator: Simulator) -> None:
        simulator.set("granularity", 2 * MIB)
        driver = self.table(simulator, UNOPENED_DEVICE)
        driver.open()
        address = driver.reserve(2 * SIZE)
        driver.release_address(address, 2 * SIZE)
        before = held(simulator.stats())
        simulator.set("granularity", 64 * 1024)
        simulator.set("refuse_alignment", 1)
        with pytest.raises(DriverError, match=f"at {address + 64 * 1024}, is not aligned to the granularity"):
            driver.reserve(SIZE, hint=address + 64 * 1024)
        assert held(simulator.stats()) == before
        driver.close()

    def test_no_error_is_left_to_the_runtimes_next_caller(
        self, driver: DriverTable, simulator: Simulator, caller: CallerDevice
    ) -> None:
        def last_errors() -> list[int]:
            simulator.fail("hipMemCreate", code=self.facts.codes["failed"])
            with pytest.raises(DriverError):
                driver.create(SIZE)
            after_failure = caller.library.hipGetLastError()
            simulator.set("refuse_alignment", 1)
            driver.release_address(driver.reserve(SIZE), SIZE)
            return [after_failure, caller.library.hipGetLastError()]

        assert in_fresh_thread(last_errors) == [0, 0]

    def test_nearly_full_device_is_probed_with_what_it_has(self, driver: DriverTable, simulator: Simulator) -> None:
        simulator.capacity = 4 * MIB
        assert driver.quirks() == self.facts.quirks

    @pytest.mark.parametrize(
        ("minimum", "vendors", "recommended"), [(4096, 4096, 2), (4096, 4 * MIB, 4), (MIB, MIB, 1)]
    )
    def test_pages_of_4_kib_are_not_recommended(
        self, minimum: int, vendors: int, recommended: int, simulator: Simulator
    ) -> None:
        simulator.set("recommended_granularity", 0)
        simulator.set("granularity", minimum)
        simulator.set("recommended_granularity", vendors)
        driver = self.table(simulator, UNOPENED_DEVICE)
        driver.open()
        assert (driver.geometry().granularity, driver.geometry().recommended) == (minimum, recommended * MIB)
        assert driver.geometry().max_chunk == 256 * MIB
        driver.close()


class TestRocmMemory:
    """The core's engine over the driver, on an MI300X under ROCm 7.2 (simulated)."""

    @pytest.fixture
    def simulator(self) -> Iterator[Simulator]:
        simulator = Simulator("rocm")
        simulator.reset()
        yield simulator
        assert simulator.violations() == []
        assert simulator.stats().used == 0
        simulator.reset()

    @pytest.fixture
    def pool(self, simulator: Simulator) -> Iterator[VirtualPool]:
        pool = VirtualPool(
            DriverTable(driver_file("hardpoint_rocm"), device=0, library=str(simulator.path), options={"chunk_mb": 8})
        )
        yield pool
        pool.close()

    @pytest.mark.parametrize("chunks", [1, 1.25, 2.4, 3])
    def test_every_chunk_of_an_allocation_can_be_used(self, pool: VirtualPool, chunks: float) -> None:
        size = int(chunks * 8 * MIB)
        address = pool.allocate(size, "weights")
        content = os.urandom(size)
        pool.write(address, content)
        pool.sleep(SleepPlan())
        pool.wake()
        assert pool.read(address, size) == content
        pool.free(address)

    @pytest.mark.parametrize(("size", "mapped"), [(4096, 4096), (5000, 8192), (MIB, MIB), (3 * MIB, 4 * MIB)])
    def test_large_allocations_are_of_recommended_pages(self, pool: VirtualPool, size: int, mapped: int) -> None:
        address = pool.allocate(size, "weights")
        assert pool.stats().tags["weights"].mapped == mapped
        assert mapped < 2 * MIB or address % (2 * MIB) == 0
        pool.free(address)

    def test_memory_returns_while_its_address_is_kept(self, pool: VirtualPool, simulator: Simulator) -> None:
        simulator.set("thief", 1)  # would take an address that is given up
        content = os.urandom(16 * MIB)
        address = pool.allocate(16 * MIB, "weights")
        growing = pool.allocate(MIB, "kv_cache", capacity=8 * MIB)
        pool.write(address, content)
        for _ in range(3):
            pool.sleep(SleepPlan())
            assert simulator.used() == 0
            pool.wake()
        assert pool.read(address, 16 * MIB) == content
        pool.resize(growing, 8 * MIB)
        for block in (address, growing):
            pool.free(block)

    def test_no_byte_is_lost_with_an_address_that_had_to_be_given_up(self, simulator: Simulator) -> None:
        simulator.set("hold_until_address_free", 2)
        other = VirtualPool(
            DriverTable(driver_file("hardpoint_rocm"), device=0, library=str(simulator.path), options={"chunk_mb": 6})
        )
        content = os.urandom(4 * MIB)
        address = other.allocate(4 * MIB, "weights")
        other.write(address, content)
        simulator.set("thief", 1)
        other.sleep(SleepPlan())
        assert simulator.used() == 0
        with pytest.raises(ForeignMemory, match="its address was taken by something else"):
            other.wake()
        assert other.read_backup(address, 4 * MIB) == content
        other.free(address)
        other.close()

    @pytest.mark.parametrize("tier", [SleepTier.HOST, SleepTier.DISK])
    def test_verified_wake_finds_what_was_written_before_the_device_saw_the_mapping(
        self, pool: VirtualPool, simulator: Simulator, tier: SleepTier, tmp_path: Path
    ) -> None:
        content = os.urandom(4 * MIB)
        address = pool.allocate(4 * MIB, "weights")
        pool.write(address, content)
        pool.sleep(SleepPlan(tier=tier, disk_directory=str(tmp_path), verify=True))
        simulator.set("late_mapping", 1)
        with pytest.raises(DriverError, match="byte 0 and following of tag 'weights' are not what was copied there"):
            pool.wake()
        assert pool.is_asleep(address)
        simulator.set("late_mapping", 0)
        pool.wake()
        assert pool.read(address, 4 * MIB) == content
        pool.free(address)

    def test_unmapping_never_waits_for_copies_of_a_sleep(self, pool: VirtualPool, simulator: Simulator) -> None:
        simulator.set("deferred", 1)
        addresses = [pool.allocate(24 * MIB, "weights") for _ in range(6)]
        simulator.delay("hipStreamSynchronize", 0.1)
        before, unmapped_among_copies = simulator.call_count("hipMemUnmap"), 0

        def look(done: int, total: int) -> None:
            nonlocal unmapped_among_copies
            if done < total:
                unmapped_among_copies = simulator.call_count("hipMemUnmap") - before

        pool.sleep(SleepPlan(progress=look))
        simulator.delay("hipStreamSynchronize", 0)
        assert simulator.call_count("hipMemUnmap") - before == 18
        assert (unmapped_among_copies, simulator.stats().unmaps_waited) == (0, 0)
        pool.wake()
        for address in addresses:
            pool.free(address)
