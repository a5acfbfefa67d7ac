"""The CUDA memory driver over the simulated driver library: what all drivers do, and what is NVIDIA's."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from hardpoint.interfaces.errors import DriverError
from hardpoint.memory.driver_table import DriverQuirks
from hardpoint_cuda import allocator, descriptor
from hardpoint_simulators import Simulator

from ...testing.driver_suite import (
    MAIN_DEVICE,
    MIB,
    PREREQUISITES,
    SIZE,
    UNUSABLE_DEVICE,
    CallerDevice,
    DriverFacts,
    DriverSuite,
    held,
)


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
        tolerated=frozenset((entry, "cuCtxSetCurrent", 2) for entry in PREREQUISITES),
        quirk_settings={"unified_memory": (1, DriverQuirks.UNIFIED_MEMORY)},
    )
    backend = allocator
    descriptor = descriptor
    caller_device = PrimaryContext
