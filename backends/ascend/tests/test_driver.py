"""The Ascend memory driver over the simulated CANN runtime: what all drivers do, and what is Huawei's."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest

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

    def test_runtime_without_optional_functions_is_used_without_them(self, older: Simulator) -> None:
        driver = self.table(older, 0)
        driver.open()
        assert (driver.geometry().granularity, driver.geometry().recommended) == (2 * MIB, 2 * MIB)
        memory = DeviceMemory(driver, SIZE)
        memory.do(*MAPPED, "stream_create", "fill", "copy_to_host", "stream_synchronize")
        assert memory.read() == b"\x5a" * SIZE
        memory.close()
        driver.close()
