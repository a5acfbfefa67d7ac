"""The ROCm memory driver over the simulated HIP runtime: what all drivers do, and what is AMD's."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from hardpoint.interfaces.errors import DriverError
from hardpoint.memory.driver_table import DriverQuirks, DriverTable
from hardpoint_rocm import allocator, descriptor
from hardpoint_simulators import Simulator

from ...testing.driver_suite import (
    MIB,
    SIZE,
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
        quirk_settings={
            "unified_memory": (1, DriverQuirks.UNIFIED_MEMORY),
            "hold_until_address_free": (1, DriverQuirks.ADDRESS_HOLDS_MEMORY),
            "stale_pages": (1, DriverQuirks.STALE_PAGES),
            "free_counter_lag": (3, DriverQuirks.FREE_LAGS),
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

    def test_chunk_is_rounded_down_to_the_granularity(self, simulator: Simulator) -> None:
        assert self.max_chunk(simulator, chunk_mb=5) == 4 * MIB

    def test_chunk_smaller_than_the_granularity_is_refused(self, simulator: Simulator) -> None:
        with pytest.raises(DriverError, match="a chunk of 1 MiB is smaller than the granularity, 2097152 bytes"):
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
        simulator.set("hold_until_address_free", 1)
        memory.do("reserve", "create", "map", "unmap", "release")
        assert simulator.used(1) == SIZE
        memory.do("release_address")
        assert simulator.used(1) == 0

    def test_several_quirks_are_found_together(self, driver: DriverTable, simulator: Simulator) -> None:
        simulator.set("hold_until_address_free", 1)
        simulator.set("stale_pages", 1)
        simulator.set("free_counter_lag", 3)
        found = driver.quirks()
        assert found == DriverQuirks.ADDRESS_HOLDS_MEMORY | DriverQuirks.STALE_PAGES | DriverQuirks.FREE_LAGS

    def test_unaligned_range_is_given_back_and_reported(self, driver: DriverTable, simulator: Simulator) -> None:
        address = driver.reserve(2 * SIZE)
        driver.release_address(address, 2 * SIZE)
        before = held(simulator.stats())
        simulator.set("granularity", 64 * 1024)
        simulator.set("refuse_alignment", 1)
        with pytest.raises(DriverError, match=f"at {address + 64 * 1024}, is not aligned to the granularity"):
            driver.reserve(SIZE, hint=address + 64 * 1024)
        assert held(simulator.stats()) == before

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
        assert driver.quirks() == DriverQuirks(0)
