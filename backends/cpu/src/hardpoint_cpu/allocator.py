"""Memory of the CPU backend: the core's engine over anonymous huge pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hardpoint.interfaces import DEFAULT, KV_CACHE, Device, DType, Policy
from hardpoint.memory import VirtualAllocator
from hardpoint_cpu.capabilities import capabilities
from hardpoint_cpu.driver import driver_table, use_small_pages

if TYPE_CHECKING:
    from torch import Tensor

_OWN_BYTES = 8 << 20
"""Tensors of as many bytes have an allocation of their own."""


class CpuAllocator(VirtualAllocator):
    """Tensors on pages that take memory when they are first written, and give it back while they are asleep.

    An access to sleeping memory is a segmentation fault. Sleeping to the host's memory frees nothing here; the tiers disk and
    source do.

    The KV cache is on small pages: a sequence writes a few KiB for each layer, in as many places, and each huge page would take 2 MiB.
    """

    def __init__(self, device: Device) -> None:
        super().__init__(
            driver_table(device.index),
            device=device.index,
            torch_device=device.torch_device,
            capabilities=capabilities(device).memory,
        )

    def empty(
        self,
        shape: Sequence[int],
        dtype: DType,
        tag: str = DEFAULT,
        policy: Policy = Policy.PRESERVE,
        max_rows: int | None = None,
    ) -> Tensor:
        """Return an uninitialised tensor; see `VirtualAllocator.empty`."""
        tensor = super().empty(shape, dtype, tag, policy, max_rows)
        if tag == KV_CACHE and tensor.nbytes >= _OWN_BYTES:
            use_small_pages(self.driver, tensor.data_ptr(), tensor.nbytes)
        return tensor
