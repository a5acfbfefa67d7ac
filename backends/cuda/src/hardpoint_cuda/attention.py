"""Paged attention on the device: the core's Triton kernels, with FlashInfer's beside them where it can be chosen."""

from __future__ import annotations

from hardpoint.interfaces import AttentionBackend, Device
from hardpoint.triton import TritonAttention
from hardpoint.triton.choice import TRITON
from hardpoint_cuda.capabilities import capabilities, choice
from hardpoint_cuda.flashinfer import FLASHINFER
from hardpoint_cuda.flashinfer.attention import FlashInferAttention


class CudaAttention(TritonAttention):
    """Triton's kernels, compiled for the device at their first use."""

    def __init__(self, device: Device) -> None:
        super().__init__(device, claims=capabilities(device).attention, choice=choice())


class CudaFlashInferAttention(FlashInferAttention):
    """FlashInfer's kernels for the models that they are chosen for, and Triton's."""

    def __init__(self, device: Device) -> None:
        super().__init__(device, CudaAttention(device), is_named=choice().kernels == FLASHINFER)


def attention() -> type[AttentionBackend]:
    """Return the class for the kernels of `choice`; raises ConfigError where the environment asks for what is not there."""
    return CudaAttention if choice().kernels == TRITON else CudaFlashInferAttention
