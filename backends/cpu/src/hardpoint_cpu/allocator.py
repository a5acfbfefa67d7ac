"""Memory of the CPU backend: the core's engine over anonymous huge pages."""

from __future__ import annotations

from hardpoint.interfaces import Device
from hardpoint.memory import VirtualAllocator
from hardpoint_cpu.capabilities import capabilities
from hardpoint_cpu.driver import driver_table


class CpuAllocator(VirtualAllocator):
    """Tensors on pages that take memory when they are first written, and give it back while they are asleep.

    An access to sleeping memory is a segmentation fault. Sleeping to the host's memory frees nothing here; the tiers disk and
    source do.
    """

    def __init__(self, device: Device) -> None:
        super().__init__(
            driver_table(device.index),
            device=device.index,
            torch_device=device.torch_device,
            capabilities=capabilities(device).memory,
        )
