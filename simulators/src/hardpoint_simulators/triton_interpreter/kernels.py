"""The core's kernels in Triton, as this backend runs them."""

from __future__ import annotations

from hardpoint.interfaces import Device
from hardpoint.triton import TritonKernels
from hardpoint_simulators.triton_interpreter.products import multiply_rows_alike
from hardpoint_simulators.triton_interpreter.speed import quicken_interpreter


class InterpretedKernels(TritonKernels):
    """Triton's kernels, interpreted."""

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        quicken_interpreter()
        multiply_rows_alike()
