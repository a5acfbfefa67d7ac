"""Paged attention on the device: the core's Triton kernels."""

from __future__ import annotations

from hardpoint.interfaces import Device
from hardpoint.triton import TritonAttention
from hardpoint_cuda.capabilities import capabilities


class CudaAttention(TritonAttention):
    """Triton's kernels, compiled for the device at their first use."""

    def __init__(self, device: Device) -> None:
        super().__init__(device, claims=capabilities(device).attention)
