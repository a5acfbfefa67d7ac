"""The ready-made allocator: torch's tensors over a vendor's memory driver, with sleep and wake by the core's native engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from math import prod
from typing import TYPE_CHECKING, Any

from hardpoint import _native
from hardpoint.interfaces.allocator import (
    DEFAULT,
    FileExtent,
    Policy,
)
from hardpoint.interfaces.capabilities import MemoryCapabilities, TorchPoolScope
from hardpoint.interfaces.dtypes import DType
from hardpoint.interfaces.errors import CapabilityRefused, InvalidAllocation
from hardpoint.memory.driver_table import DriverTable
from hardpoint.memory.factory_calls import factory_call_pool
from hardpoint.memory.native_files import driver_file
from hardpoint.memory.pool import SEE_DOCTOR, VirtualMemory, check_size
from hardpoint.memory.tensors import TensorAllocator

if TYPE_CHECKING:
    from torch import Tensor


def open_driver(
    package: str, device: int, options: Mapping[str, object] | None = None, library: str | None = None
) -> DriverTable:
    """Return the memory driver of a backend's package for one device; the vendor's library is found as the probe finds it.

    Args:
        device: index of the device.
        options: the driver's own.
        library: path of the vendor's library; None for the usual one.

    Raises:
        BackendBroken: the driver was not built, or for another contract.
        BackendUnavailable: the vendor's library or the device is not here.
        DriverError: a vendor call failed, or the driver does not know an option.
    """
    return DriverTable(driver_file(package), device=device, library=library, options=options)


class VirtualAllocator(VirtualMemory, TensorAllocator, beside=frozenset({"empty_host"})):
    """A `DeviceAllocator` over a memory driver.

    Tensors below 8 MiB share allocations by tag and policy; larger ones have their own. A backend derives from it, and adds `pool`
    where torch has a pluggable allocator for the device.

    While a tag is asleep, new tensors of it are awake memory; they join the next sleep. What the backend does not claim is refused.

    Beside the contract the core's worker asks it for pinned memory of the host (`empty_host`).
    """

    def __init__(
        self, driver: DriverTable, *, device: int, torch_device: str, capabilities: MemoryCapabilities
    ) -> None:
        """Open the device; raises DriverError.

        Args:
            driver: the device's memory driver.
            device: the device's index, as DLPack and torch count.
            torch_device: the device's name in torch.
            capabilities: what the backend claims for the device.
        """
        super().__init__(driver, capabilities)
        self._tensors = _native.MemoryTensors(self.native, device)
        self._torch_device = torch_device

    def capabilities(self) -> MemoryCapabilities:
        """Return what this allocator does."""
        return self._claims

    def empty(
        self,
        shape: Sequence[int],
        dtype: DType,
        tag: str = DEFAULT,
        policy: Policy = Policy.PRESERVE,
        max_rows: int | None = None,
    ) -> Tensor:
        """Return an uninitialised contiguous tensor in this memory, elastic with `max_rows`.

        Raises InvalidAllocation for a negative extent, CapabilityRefused, DeviceOutOfMemory, DriverError.
        """
        import torch

        shape = tuple(shape)
        size = prod(shape) * dtype.itemsize
        if min(shape, default=0) < 0 or (max_rows is not None and (size == 0 or not shape or max_rows < shape[0])):
            raise InvalidAllocation(
                "a tensor has no negative extent, and an elastic one has bytes and at most its most rows",
                found=f"shape {list(shape)}, most rows {max_rows}",
            )
        if max_rows is not None:
            self._check_elastic()
        if size == 0:
            return torch.empty(shape, dtype=dtype.to_torch(), device=self._torch_device)
        capacity = 0 if max_rows is None else size // shape[0] * max_rows
        check_size(size, capacity)
        return self._as_tensor(self._tensors.make(size, tag, policy, capacity), shape, dtype.to_torch())

    def empty_host(self, shape: Sequence[int], dtype: DType) -> Tensor | None:
        """Return an uninitialised tensor in pinned host memory, as many pages as it fills; None where the driver pins none.

        It is no part of a sleep. When its last view goes, the device's work is waited for, and the memory is given back.

        Raises HostBudgetExceeded, DriverError.
        """
        size = prod(shape) * dtype.itemsize
        capsule = self._tensors.make_host(size) if size else None
        return None if capsule is None else self._as_tensor(capsule, tuple(shape), dtype.to_torch())

    def resize(self, tensor: Tensor, rows: int) -> Tensor:
        """Grow or shrink an elastic tensor along its first axis, in place, and return it in its new extent."""
        self._check_elastic()
        if tensor.dim() == 0 or not tensor.is_contiguous() or rows < 1:
            raise InvalidAllocation(
                "only a contiguous tensor with rows can be resized, to at least one",
                found=f"shape {list(tensor.shape)}, {rows} rows",
            )
        shape = (rows, *tensor.shape[1:])
        check_size(prod(shape) * tensor.itemsize)
        return self._as_tensor(
            self._tensors.resize(tensor.data_ptr(), prod(shape) * tensor.itemsize), shape, tensor.dtype
        )

    def pool(self, tag: str, policy: Policy = Policy.PRESERVE) -> AbstractContextManager[None]:
        """Put what torch's factory calls of this thread make into this memory, where that is what the backend claims; else refused."""
        if self._claims.torch_pool is not TorchPoolScope.FACTORY_CALLS:
            raise CapabilityRefused(
                "torch cannot allocate from a pool of this memory", ["no torch pool is claimed"], hint=SEE_DOCTOR
            )
        return factory_call_pool(self, tag, policy)

    def declare_source(self, tensor: Tensor, source: Sequence[FileExtent] | Callable[[], None]) -> None:
        """Say where a tensor's bytes come from; raises ForeignMemory, InvalidAllocation."""
        self._declare(tensor.data_ptr(), tensor.nbytes, source)

    def read_backup(self, tensor: Tensor) -> Tensor:
        """Return a copy, on the host, of a sleeping tensor's bytes."""
        import torch

        if not tensor.is_contiguous():
            raise InvalidAllocation("only a contiguous tensor's backup can be read", found=f"strides {tensor.stride()}")
        copy = torch.empty(tensor.shape, dtype=tensor.dtype)
        if tensor.nbytes:
            self.native.read_backup(tensor.data_ptr(), copy.view(-1).view(torch.uint8).numpy())
        return copy

    def _as_tensor(self, capsule: object, shape: tuple[int, ...], dtype: Any) -> Tensor:
        from torch.utils.dlpack import from_dlpack

        storage: Tensor = from_dlpack(capsule)
        return storage.view(dtype).view(shape)
