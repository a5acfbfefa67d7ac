"""The CUDA memory driver over the simulated driver library: what all drivers do, and what is NVIDIA's."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from hardpoint.interfaces.errors import DriverError
from hardpoint.memory.driver_table import DriverQuirks, DriverTable
from hardpoint_cuda import allocator, descriptor
from hardpoint_simulators import Simulator

from ...testing.driver_suite import (
    MAIN_DEVICE,
    MIB,
    UNUSABLE_DEVICE,
    CallerDevice,
    DriverFacts,
    DriverSuite,
    held,
    in_fresh_thread,
)

RDMA_DEVICE = 5
"""Its table is made while the simulated devices have RDMA."""


class PrimaryContext(CallerDevice):
    """The thread's current context: the primary one of a device, retained meanwhile."""

    def __init__(self, simulator: Simulator) -> None:
        super().__init__(simulator)
        self._contexts: dict[int, ctypes.c_void_p] = {}

    def use(self, device: int) -> None:
        if device not in self._contexts:
            context = ctypes.c_void_p()
            self.call("cuInit", 0)
            self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
            self._contexts[device] = context
        self.call("cuCtxSetCurrent", self._contexts[device])

    def current(self) -> int:
        context = ctypes.c_void_p()
        self.call("cuCtxGetCurrent", ctypes.byref(context))
        return context.value or 0

    def close(self) -> None:
        for device in self._contexts:
            self.call("cuDevicePrimaryCtxRelease_v2", device)


class TestCudaDriver(DriverSuite):
    facts = DriverFacts(
        vendor="cuda",
        codes={"out_of_memory": 2, "failed": 700, "invalid": 1, "unsupported": 801, "no_device": 100},
        names={"out_of_memory": "CUDA_ERROR_OUT_OF_MEMORY", "failed": "CUDA_ERROR_ILLEGAL_ADDRESS"},
        dlpack_device=2,
        create="cuMemCreate",
        count="cuDeviceGetCount",
        required_symbol="cuGetErrorName",
        restoring="cuCtxSetCurrent",
        quirk_settings={"unified_memory": (1, DriverQuirks.UNIFIED_MEMORY)},
    )
    backend = allocator
    descriptor = descriptor
    caller_device = PrimaryContext

    def test_context_that_is_already_current_is_left_alone(
        self, driver: DriverTable, simulator: Simulator, caller: CallerDevice
    ) -> None:
        def calls_of_memory_info() -> dict[str, int]:
            caller.use(MAIN_DEVICE)
            before = simulator.calls()
            driver.memory_info()
            return {call: number - before.get(call, 0) for call, number in simulator.calls().items()}

        calls = in_fresh_thread(calls_of_memory_info)
        assert (calls["cuCtxGetCurrent"], calls["cuCtxSetCurrent"], calls["cuMemGetInfo_v2"]) == (1, 0, 1)

    def test_device_without_virtual_memory_is_unsupported(self, simulator: Simulator) -> None:
        simulator.set("virtual_memory", 0)
        with pytest.raises(DriverError, match="the device has no virtual memory management"):
            self.table(simulator, UNUSABLE_DEVICE)

    @pytest.mark.parametrize(("kind", "setting"), [("posix", "posix_handles"), ("fabric", "fabric_handles")])
    def test_shareable_handles_that_the_device_lacks_are_refused(
        self, kind: str, setting: Any, simulator: Simulator
    ) -> None:
        simulator.set(setting, 0)
        with pytest.raises(DriverError, match=f"(?i)the device has no {kind} handles"):
            self.table(simulator, UNUSABLE_DEVICE, shareable=kind)

    @pytest.mark.parametrize(("kind", "setting"), [("posix", "posix_handles"), ("fabric", "fabric_handles")])
    def test_granularity_is_asked_with_the_properties_of_create(
        self, kind: str, setting: Any, simulator: Simulator
    ) -> None:
        simulator.set(setting, 1)
        simulator.set("shareable_granularity", 4 * MIB)
        driver = self.table(simulator, shareable=kind)
        driver.open()
        assert driver.geometry().granularity == 4 * MIB
        driver.release(driver.create(4 * MIB), 4 * MIB)
        driver.close()

    def test_shareable_memory_that_the_system_does_not_permit_is_refused_at_open(self, simulator: Simulator) -> None:
        simulator.set("fabric_handles", 2)
        driver = self.table(simulator, shareable="fabric")
        before = held(simulator.stats())
        with pytest.raises(DriverError, match="no shareable memory on this system: CUDA_ERROR_NOT_PERMITTED"):
            driver.open()
        assert held(simulator.stats()) == before

    def test_memory_is_made_for_rdma_where_the_device_can(self, simulator: Simulator) -> None:
        simulator.set("rdma", 1)
        simulator.set("shareable_granularity", 4 * MIB)
        driver = self.table(simulator, RDMA_DEVICE)
        driver.open()
        assert driver.geometry().granularity == 4 * MIB
        driver.close()

    @pytest.mark.parametrize("value", ["", "yes", "posix,fabric"])
    def test_unknown_kind_of_shareable_handle_is_refused(self, value: str, simulator: Simulator) -> None:
        with pytest.raises(DriverError, match=f"option shareable is '{value}', not none, posix or fabric"):
            self.table(simulator, UNUSABLE_DEVICE, shareable=value)

    def test_close_while_the_driver_shuts_down_is_no_error(self, simulator: Simulator) -> None:
        driver = self.table(simulator)
        driver.open()
        simulator.fail("cuDevicePrimaryCtxRelease", code=4)
        driver.close()
        # The injected failure left the reference that a real shutdown takes.
        assert ctypes.CDLL(str(simulator.path)).cuDevicePrimaryCtxRelease_v2(MAIN_DEVICE) == 0
