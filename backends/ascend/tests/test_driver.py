"""The Ascend memory driver over the simulated CANN runtime: what all drivers do, and what is Huawei's."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from hardpoint.interfaces import SleepPlan, SleepTier
from hardpoint.interfaces.errors import DriverError
from hardpoint.memory import VirtualPool
from hardpoint.memory.driver_table import DriverTable
from hardpoint_ascend import allocator, descriptor
from hardpoint_simulators import Simulator

from ...testing.driver_suite import (
    MAIN_DEVICE,
    MAPPED,
    MIB,
    OTHER_DEVICE,
    SIZE,
    CallerDevice,
    DeviceMemory,
    DriverFacts,
    DriverSuite,
    held,
    in_fresh_thread,
)

FEATURE_NOT_SUPPORTED = 207000
OLD_KERNEL_DEVICE = 5
"""Its table, which is kept, is made while the kernel seems old."""
UNAME26 = 0x0020000
"""Of personality(2): in this thread, the kernel calls itself 2.6."""
CONTEXT_NULL = 107002


class DefaultContext(CallerDevice):
    """The thread's context: the default one of a device, which stays set meanwhile."""

    def __init__(self, simulator: Simulator) -> None:
        super().__init__(simulator)
        self._set: list[int] = []

    def use(self, device: int) -> None:
        self.library.aclInit(None)
        self.call("aclrtSetDevice", device)
        self._set.append(device)

    def current(self) -> int:
        context = ctypes.c_void_p()
        status = self.library.aclrtGetCurrentContext(ctypes.byref(context))
        assert status in (0, CONTEXT_NULL)
        return context.value or 0

    def close(self) -> None:
        for device in self._set:
            self.call("aclrtResetDevice", device)


class TestAscendDriver(DriverSuite):
    facts = DriverFacts(
        vendor="ascend",
        codes={
            "out_of_memory": 207001,
            "failed": 507015,
            "invalid": 107000,
            "unsupported": FEATURE_NOT_SUPPORTED,
            "no_device": 207004,
        },
        names={"out_of_memory": "ACL_ERROR_RT_MEMORY_ALLOCATION", "failed": "error of the runtime"},
        dlpack_device=12,
        create="aclrtMallocPhysical",
        count="aclrtGetDeviceCount",
        required_symbol="aclInit",
        restoring="aclrtSetCurrentContext",
        silent=frozenset({"device_name"}),
    )
    backend = allocator
    descriptor = descriptor
    caller_device = DefaultContext

    @pytest.fixture
    def older(self) -> Iterator[Simulator]:
        """The runtime without its optional functions."""
        simulator = Simulator("ascend", minimal=True)
        simulator.reset()
        left_by_others = simulator.leaks()
        yield simulator
        assert simulator.violations() == []
        assert simulator.leaks() == left_by_others

    def test_reservation_is_limited_to_128_gib(self, driver: DriverTable) -> None:
        assert driver.geometry().max_reservation == 128 << 30
        with pytest.raises(DriverError, match="is larger than the limit, 137438953472"):
            driver.reserve((128 << 30) + SIZE)

    def test_memory_is_taken_in_pieces_of_at_most_one_gib(self, simulator: Simulator) -> None:
        largest = 1 << 30
        simulator.set("max_chunk", largest)
        memory = VirtualPool(self.table(simulator))
        address = memory.allocate(3 * largest - SIZE)
        assert simulator.used(MAIN_DEVICE) >= 3 * largest - SIZE
        memory.free(address)
        memory.close()

    def test_runtime_initialised_by_others_is_used(self, simulator: Simulator, caller: CallerDevice) -> None:
        caller.library.aclInit(None)
        self.table(simulator, 4)

    def test_reservation_and_memory_are_of_the_same_page_type(self, memory: DeviceMemory, simulator: Simulator) -> None:
        simulator.set("match_page_type", 1)
        memory.do(*MAPPED)

    def test_threads_without_a_context_get_the_devices_default_one(
        self, driver: DriverTable, caller: CallerDevice
    ) -> None:
        def context_after_an_entry() -> int:
            assert caller.current() == 0
            driver.memory_info()
            return caller.current()

        def default_context() -> int:
            caller.use(MAIN_DEVICE)
            return caller.current()

        assert in_fresh_thread(context_after_an_entry) == in_fresh_thread(default_context)

    def test_context_that_is_already_current_is_left_alone(
        self, driver: DriverTable, simulator: Simulator, caller: CallerDevice
    ) -> None:
        def calls_of_memory_info() -> int:
            caller.use(MAIN_DEVICE)
            before = simulator.calls().get("aclrtSetCurrentContext", 0)
            driver.memory_info()
            return simulator.calls().get("aclrtSetCurrentContext", 0) - before

        assert in_fresh_thread(calls_of_memory_info) == 0

    def test_devices_of_two_drivers_do_not_mix_on_one_thread(self, driver: DriverTable, simulator: Simulator) -> None:
        other = self.table(simulator, OTHER_DEVICE)
        other.open()
        for _ in range(2):
            handles = driver.create(SIZE), other.create(2 * SIZE)
            assert (simulator.used(MAIN_DEVICE), simulator.used(OTHER_DEVICE)) == (SIZE, 2 * SIZE)
            driver.release(handles[0], SIZE)
            other.release(handles[1], 2 * SIZE)
        other.close()

    def test_access_that_the_device_grants_by_mapping_need_not_be_set(
        self, memory: DeviceMemory, simulator: Simulator
    ) -> None:
        simulator.fail("aclrtMemSetAccess", code=FEATURE_NOT_SUPPORTED)
        memory.do(*MAPPED, "stream_create", "fill", "copy_to_host", "stream_synchronize")
        assert memory.read() == b"\x5a" * SIZE

    def test_mapping_whose_access_is_refused_is_undone(self, memory: DeviceMemory, simulator: Simulator) -> None:
        memory.do("reserve", "create")
        before = held(simulator.stats())
        simulator.fail("aclrtMemSetAccess", code=self.facts.codes["invalid"])
        with pytest.raises(DriverError):
            memory.do("map")
        assert held(simulator.stats()) == before

    @staticmethod
    def sleep_and_wake(driver: DriverTable, simulator: Simulator, tier: SleepTier, folder: Path) -> int:
        """Have memory sleep and wake with its bytes; return how many copies were of memory that is not pinned."""
        memory = VirtualPool(driver)
        content = os.urandom(3 * SIZE)
        address = memory.allocate(len(content))
        memory.write(address, content)
        before = simulator.stats().pageable_copies
        memory.sleep(SleepPlan(tier=tier, disk_directory=str(folder)))
        memory.wake()
        pageable = simulator.stats().pageable_copies - before
        assert memory.read(address, len(content)) == content
        memory.free(address)
        memory.close()
        return pageable

    @pytest.mark.parametrize("tier", [SleepTier.HOST, SleepTier.DISK])
    def test_host_memory_is_pinned(
        self, driver: DriverTable, simulator: Simulator, tier: SleepTier, tmp_path: Path
    ) -> None:
        if tuple(map(int, os.uname().release.split(".")[:2])) <= (5, 10):
            pytest.skip("with this kernel CANN pins no memory but its own")
        assert self.sleep_and_wake(driver, simulator, tier, tmp_path) == 0
        assert simulator.call_count("aclrtHostRegisterV2") > 0

    @pytest.mark.parametrize("tier", [SleepTier.HOST, SleepTier.DISK])
    def test_with_a_kernel_that_does_not_allow_it_no_host_memory_is_registered(
        self, simulator: Simulator, tier: SleepTier, tmp_path: Path
    ) -> None:
        def table_as_with_an_old_kernel() -> DriverTable | None:
            ctypes.CDLL(None).personality(UNAME26)
            return self.table(simulator, OLD_KERNEL_DEVICE) if os.uname().release.startswith("2.6") else None

        simulator.set("old_kernel", 1)
        driver = in_fresh_thread(table_as_with_an_old_kernel)
        if driver is None:
            pytest.skip("this system lets no thread see an older kernel")
        assert self.sleep_and_wake(driver, simulator, tier, tmp_path) > 0
        assert not [call for call in simulator.calls() if "HostRegister" in call]

    @pytest.mark.parametrize("tier", [SleepTier.HOST, SleepTier.DISK])
    def test_host_memory_is_used_as_it_is_where_the_runtime_cannot_pin_it(
        self, driver: DriverTable, simulator: Simulator, tier: SleepTier, tmp_path: Path
    ) -> None:
        simulator.fail("aclrtHostRegisterV2", code=FEATURE_NOT_SUPPORTED, times=-1)
        assert self.sleep_and_wake(driver, simulator, tier, tmp_path) > 0

    @pytest.mark.parametrize("tier", [SleepTier.HOST, SleepTier.DISK])
    def test_runtime_that_can_only_map_host_memory_is_not_asked_to(
        self, older: Simulator, tier: SleepTier, tmp_path: Path
    ) -> None:
        assert self.sleep_and_wake(self.table(older, 0), older, tier, tmp_path) > 0
        assert not [call for call in older.calls() if "HostRegister" in call]

    def test_runtime_without_optional_functions_is_used_without_them(self, older: Simulator) -> None:
        driver = self.table(older, 0)
        driver.open()
        assert (driver.geometry().granularity, driver.geometry().recommended) == (2 * MIB, 2 * MIB)
        memory = DeviceMemory(driver, SIZE)
        memory.do(*MAPPED, "stream_create", "fill", "copy_to_host", "stream_synchronize")
        assert memory.read() == b"\x5a" * SIZE
        memory.close()
        driver.close()
