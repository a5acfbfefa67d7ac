"""The backend's memory: the CPU backend's driver, with a small budget."""

from __future__ import annotations

from contextlib import AbstractContextManager

from hardpoint.interfaces import Device, Policy
from hardpoint.memory import VirtualAllocator, factory_call_pool
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

    def pool(self, tag: str, policy: Policy = Policy.PRESERVE) -> AbstractContextManager[None]:
        """Put what torch's factory calls of this thread make into this memory."""
        return factory_call_pool(self, tag, policy)
