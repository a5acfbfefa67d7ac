"""The backend's memory: the CPU backend's driver, with a small budget."""

from __future__ import annotations

from hardpoint.interfaces import Device
from hardpoint.memory import VirtualAllocator
from hardpoint_cpu.driver import driver_table
from hardpoint_simulators.triton_interpreter.descriptor import BUDGET, capabilities


class HostMemory(VirtualAllocator):
    """Memory of the host, as much as the simulated device has."""

    def __init__(self, device: Device) -> None:
        super().__init__(
            driver_table(device.index, {"budget": BUDGET}),
            device=device.index,
            torch_device=device.torch_device,
            capabilities=capabilities(device).memory,
        )
