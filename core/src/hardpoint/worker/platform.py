"""The platform of a device with memory and work queues of its own, for which torch has a module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from hardpoint.interfaces.allocator import DeviceAllocator
from hardpoint.interfaces.errors import BackendUnavailable, CapabilityRefused
from hardpoint.interfaces.platform import Event, Platform

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import Tensor


class TorchPlatform(Platform):
    """A device that torch drives through one of its modules.

    Work is queued on the device's current stream. Torch counts what it allocates by itself, the allocator what is in its own memory, and
    the driver what kernels and libraries take: a profile adds them up.

    Over a simulated driver everything works that copies and maps memory. Nothing computes: the first step raises CapabilityRefused.
    """

    compiles = True
    steps_in_flight = 1

    def _module(self) -> Any:
        """Return torch's module for the device. A vendor whose module is not torch's own imports it here."""
        return torch.get_device_module(self._device.torch_device)

    @property
    def _index(self) -> int:
        return torch.device(self._device.torch_device).index or 0

    def start(self, threads: int | None) -> None:
        """Make the device current; raises BackendUnavailable where torch does not see it."""
        module, index = self._module(), self._index
        count = module.device_count() if module.is_available() else 0
        if index >= count:
            raise BackendUnavailable(
                f"torch cannot use device {index} of backend '{self._device.backend}'",
                found=f"torch {torch.__version__} sees {count} such devices" + _told_by_init(module),
                hint="Install torch's build for this device and its driver, and look for environment variables that hide devices",
            )
        self.make_current()

    def make_current(self) -> None:
        """Make the device current in this thread."""
        self._module().set_device(self._index)

    def check_computes(self) -> None:
        """Raise CapabilityRefused over a simulated driver."""
        if self._device.simulated:
            raise CapabilityRefused(
                f"a step cannot be computed on {self._device.name}",
                [f"the driver of backend '{self._device.backend}' is a simulation: it has memory and computes nothing"],
                hint="Use a real device, or the backend cpu",
            )

    def synchronize(self) -> None:
        """Wait until the device has done all its work."""
        self._module().synchronize(self._index)

    def record_event(self) -> Event | None:
        """Return the point that the current stream has come to."""
        event: Event = self._module().current_stream(self._index).record_event()
        return event

    def empty_host(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return pinned memory."""
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)

    def upload(self, array: npt.NDArray[np.generic]) -> Tensor:
        """Queue a copy to the device by way of pinned memory, which torch does not give away before the copy is done."""
        given = torch.from_numpy(array)
        pinned = self.empty_host(given.shape, given.dtype)
        pinned.copy_(given)
        return pinned.to(self._device.torch_device, non_blocking=True)

    def download(self, tensor: Tensor) -> Tensor:
        """Queue a copy to pinned memory of its own."""
        host = self.empty_host(tensor.shape, tensor.dtype)
        host.copy_(tensor, non_blocking=True)
        return host

    def peak_growth(self, step: Callable[[], object], allocator: DeviceAllocator) -> int:
        """Run `step`; return torch's growth at its peak, and what kernels and libraries took outside of torch and allocator.

        Torch's memory counts by whole segments, as the device loses it.
        """
        module, index = self._module(), self._index
        self.synchronize()
        module.empty_cache()
        module.reset_peak_memory_stats(index)
        free, reserved, books = allocator.memory_info().free, module.memory_reserved(index), allocator.stats()
        step()
        self.synchronize()
        after = allocator.stats()
        in_torch = module.max_memory_reserved(index) - reserved
        in_books = max(after.peak_allocated - books.peak_allocated, 0)
        kept = module.memory_reserved(index) - reserved + after.allocated - books.allocated
        elsewhere = max(free - allocator.memory_info().free - kept, 0)
        module.empty_cache()
        return int(in_torch + in_books + elsewhere)

    def release(self) -> None:
        """Let torch give back what it keeps of the device's memory and of pinned memory (swapped blocks lay there)."""
        self._module().empty_cache()
        empty_host_cache = getattr(torch.accelerator, "empty_host_cache", None)
        if empty_host_cache is not None and torch.accelerator.is_available():
            empty_host_cache()


def _told_by_init(module: Any) -> str:
    """Return why torch's module for a device cannot be started (a driver too old for it, say), as the rest of a sentence."""
    try:
        module.init()
    except Exception as error:
        return f": {(str(error).splitlines() or [type(error).__name__])[0]}"
    return ""
