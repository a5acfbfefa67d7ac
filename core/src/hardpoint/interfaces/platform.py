"""The contract of what a worker asks of its device beside memory, attention and kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar, Protocol

from hardpoint.interfaces.backend import Device
from hardpoint.interfaces.contract import Contract

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch
    from torch import Tensor

    from hardpoint.interfaces.allocator import DeviceAllocator


class Event(Protocol):
    """A point in a device's queue of work."""

    def synchronize(self) -> None:
        """Wait until the device has come to it."""


class Platform(Contract, contract=True):
    """One rank's device; made by the descriptor's factory with the device as its only argument.

    Every method has a default: that of a device which works in the caller's thread, in the host's memory. `hardpoint.worker.TorchPlatform`
    answers them for a device that torch has a module for.

    Attributes:
        memory_utilization: share of the device's memory that an engine uses when it is not told.
        kv_bytes: most bytes for the KV cache then; None for no such limit.
        compiles: the first run of a step compiles kernels and starts libraries: it is not timed, and `Worker.warm_up` runs such steps.
        steps_in_flight: how many steps may be queued beyond the one whose output is waited for; 0 where work is done when it is asked for.
    """

    memory_utilization: ClassVar[float] = 0.9
    kv_bytes: ClassVar[int | None] = None
    compiles: ClassVar[bool] = False
    steps_in_flight: ClassVar[int] = 0

    def __init__(self, device: Device) -> None:
        self._device = device

    def start(self, threads: int | None) -> None:
        """Start the device; raises BackendUnavailable where it cannot be used. Default: nothing.

        Args:
            threads: host threads for computing; None for all usable cores.
        """

    def make_current(self) -> None:
        """Make the device current in this thread: another engine may have made its own current since. Default: nothing."""

    def check_computes(self) -> None:
        """Raise CapabilityRefused where the device cannot compute a step. Default: nothing."""

    def synchronize(self) -> None:
        """Wait until the device has done all its work. Default: nothing."""

    def record_event(self) -> Event | None:
        """Return the point that the device's queue has come to; None where all work is done already. Default: None."""
        return None

    def empty_host(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return host memory that the device copies to and from, pinned where that helps. Default: plain memory."""
        import torch

        return torch.empty(tuple(shape), dtype=dtype)

    def upload(self, array: npt.NDArray[np.generic]) -> Tensor:
        """Queue a copy of an array to the device, and return it without waiting. Default: the array itself, as a tensor.

        What is queued later sees the array as it is now, also where the caller changes it meanwhile; a platform without steps in flight,
        whose work is done when it is asked for, may share the array's memory.
        """
        import torch

        return torch.from_numpy(array)

    def download(self, tensor: Tensor) -> Tensor:
        """Queue a copy of a tensor to the host, and return it without waiting. Default: a copy that is done.

        It has its values once an event that was recorded later has been waited for.
        """
        return tensor.clone()

    def total_and_used(self, allocator: DeviceAllocator, ranks: int) -> tuple[int, int]:
        """Return the memory of which an engine may use its share, and what is in use of it, bytes. Default: as the driver reports them.

        Args:
            ranks: of the engine, which may be neighbours in this memory where it is the host's.
        """
        info = allocator.memory_info()
        return info.total, info.total - info.free

    def peak_growth(self, step: Callable[[], object], allocator: DeviceAllocator) -> int:
        """Run `step` to its end and return the most device memory that it took beyond what was in use, bytes.

        Default: by the allocator's own books.
        """
        before = allocator.stats()
        step()
        self.synchronize()
        return max(allocator.stats().peak_allocated - before.peak_allocated, 0)

    def release(self) -> None:
        """Give back what the device's libraries keep for later, after the last use. Default: nothing."""
