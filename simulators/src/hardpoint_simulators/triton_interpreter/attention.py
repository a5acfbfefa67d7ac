"""The core's attention with this backend's claims."""

from __future__ import annotations

from hardpoint.interfaces import Device
from hardpoint.triton import TritonAttention
from hardpoint_simulators.triton_interpreter.descriptor import capabilities
from hardpoint_simulators.triton_interpreter.speed import quicken_interpreter


class InterpretedAttention(TritonAttention):
    """Triton's kernels, interpreted."""

    def __init__(self, device: Device) -> None:
        quicken_interpreter()
        super().__init__(device, capabilities(device).attention)
