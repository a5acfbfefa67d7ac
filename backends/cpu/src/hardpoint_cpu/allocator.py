"""Memory of the CPU backend: anonymous pages, huge where the kernel grants them, counted by tag."""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

import torch

from hardpoint.interfaces import DEFAULT, Device, DType, MemoryInfo, MemoryStats, Policy
from hardpoint.interfaces.capabilities import MemoryCapabilities
from hardpoint.interfaces.errors import DeviceOutOfMemory, MemoryFault
from hardpoint.memory import Books, TensorAllocator
from hardpoint_cpu.capabilities import capabilities
from hardpoint_cpu.host import free_memory, total_memory

if TYPE_CHECKING:
    from torch import Tensor

_HUGE_PAGE = 2 << 20


class CpuAllocator(TensorAllocator):
    """One anonymous mapping per tensor, given back when the last view of it is gone.

    Pages are zero and take memory only when they are first written, so that a large KV cache costs what is used of it.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._books = Books()
        self._closed = False

    def capabilities(self) -> MemoryCapabilities:
        """Return what this allocator does."""
        return capabilities(self._device).memory

    def empty(self, shape: Sequence[int], dtype: DType, tag: str = DEFAULT, policy: Policy = Policy.PRESERVE) -> Tensor:
        """Return a contiguous tensor in this memory, page-aligned; raises DeviceOutOfMemory."""
        if self._closed:
            raise MemoryFault("cannot allocate from a closed allocator", hint="Make a new one for the device")
        size = prod(shape) * dtype.itemsize
        if size == 0:
            return torch.empty(tuple(shape), dtype=dtype.to_torch())
        try:
            # Private: shared anonymous memory is a file to Linux, which by default gives it no huge pages.
            pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError, ValueError) as error:
            raise DeviceOutOfMemory(
                f"cannot allocate {size} bytes for '{tag}'",
                found=f"{free_memory()} bytes are free ({error})",
                hint="Lower the context length, the number of KV blocks, or the memory utilisation",
            ) from error
        if size >= _HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
            pages.madvise(mmap.MADV_HUGEPAGE)
        self._books.add(tag, size)
        weakref.finalize(pages, self._books.remove, tag, size)
        return torch.frombuffer(pages, dtype=dtype.to_torch()).view(tuple(shape))

    def stats(self) -> MemoryStats:
        """Return the books."""
        return self._books.stats()

    def memory_info(self) -> MemoryInfo:
        """Return the host's free and total memory."""
        return MemoryInfo(free=free_memory(), total=total_memory())

    def close(self) -> None:
        """Refuse new tensors; those alive keep their memory until they are gone."""
        self._closed = True
