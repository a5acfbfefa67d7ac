"""The worker of a device with memory and work queues of its own, for which torch has a module."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from hardpoint.interfaces.batch import StepInput
from hardpoint.interfaces.errors import BackendUnavailable, CapabilityRefused
from hardpoint.interfaces.worker import MemoryProfile, ModelInfo
from hardpoint.worker.profile import StepCost, logits_bytes
from hardpoint.worker.readiness import need
from hardpoint.worker.torch_worker import TorchWorker

if TYPE_CHECKING:
    from torch import Tensor

_log = logging.getLogger("hardpoint")


class AcceleratorWorker(TorchWorker, partial=True):
    """A rank on a device that torch drives through one of its modules; a vendor's worker names the module.

    Work is queued on the device's current stream; a step waits for it when its tokens are read. Torch counts what it allocates by
    itself, the allocator what is in its own memory, and the driver what kernels and libraries take: a profile adds them up.

    Over a simulated driver everything works that copies and maps memory. Nothing computes: the profile counts no working
    memory, with a warning, and the first step raises CapabilityRefused.

    Attributes:
        _torch_module: name of torch's module for the device. It has `is_available`, `device_count`, `init`, `set_device`,
            `synchronize`, `empty_cache`, `memory_reserved`, `max_memory_reserved` and `reset_peak_memory_stats`.
    """

    _torch_module: ClassVar[str]
    _compiles = True

    # The device

    @property
    def _index(self) -> int:
        return torch.device(self._device.torch_device).index or 0

    def _torch(self) -> Any:
        """Return torch's module for the device."""
        return import_module(self._torch_module)

    def _make_current(self) -> None:
        """Make the device current in this thread: another engine may have made its own current since."""
        self._torch().set_device(self._index)

    def _start_device(self) -> None:
        """Make the device current; raises BackendUnavailable where torch does not see it."""
        module, index = self._torch(), self._index
        count = module.device_count() if module.is_available() else 0
        if index >= count:
            raise BackendUnavailable(
                f"torch cannot use device {index} of backend '{self._device.backend}'",
                found=f"torch {torch.__version__} sees {count} such devices" + _told_by_init(module),
                hint="Install torch's build for this device and its driver, and look for environment variables that hide devices",
            )
        self._make_current()

    def _synchronize(self) -> None:
        self._torch().synchronize(self._index)

    def _check_computes(self) -> None:
        if self._device.simulated:
            raise CapabilityRefused(
                f"a step cannot be computed on {self._device.name}",
                [f"the driver of backend '{self._device.backend}' is a simulation: it has memory and computes nothing"],
                hint="Use a real device, or the backend cpu",
            )

    def _empty_host(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)

    # The contract

    def load(self) -> ModelInfo:
        """Load the model's weights onto the device; see `TorchWorker.load`."""
        self._make_current()
        return super().load()

    def profile(self) -> MemoryProfile:
        """Return what the largest legal step takes; over a simulated driver, what is known without running it."""
        self._make_current()
        return super().profile()

    def warm_up(self) -> None:
        """Run and capture the steps whose first run would be slow; raises CapabilityRefused over a simulated driver."""
        self._make_current()
        super().warm_up()

    def submit(self, step: StepInput) -> None:
        """Begin one step; over a simulated driver, `collect` raises CapabilityRefused."""
        self._make_current()
        super().submit(step)

    def shutdown(self) -> None:
        """Give everything back, what torch keeps of the device's and of pinned memory included; legal in any state and more than once."""
        started = self._allocator is not None
        super().shutdown()
        if started:
            self._torch().empty_cache()
            _empty_host_cache()

    # Sizes

    def _peak_growth(self, step: Callable[[], object]) -> int:
        """Run `step`; return torch's growth at its peak, and what kernels and libraries took outside of torch and allocator.

        Torch's memory counts by whole segments, as the device loses it.
        """
        module, index, allocator = self._torch(), self._index, need(self._allocator)
        self._synchronize()
        module.empty_cache()
        module.reset_peak_memory_stats(index)
        free, reserved, books = allocator.memory_info().free, module.memory_reserved(index), allocator.stats()
        step()
        self._synchronize()
        after = allocator.stats()
        in_torch = module.max_memory_reserved(index) - reserved
        in_books = max(after.peak_allocated - books.peak_allocated, 0)
        kept = module.memory_reserved(index) - reserved + after.allocated - books.allocated
        elsewhere = max(free - allocator.memory_info().free - kept, 0)
        module.empty_cache()
        return int(in_torch + in_books + elsewhere)

    def _largest_step(self) -> StepCost:
        if not self._device.simulated:
            return super()._largest_step()
        _log.warning(
            "the driver of %s is simulated: the largest step is not run, and counts as its logits alone",
            self._device.name,
        )
        return StepCost(growth=logits_bytes(self._config.max_num_seqs, need(self._loaded).info.vocab_size))


def _empty_host_cache() -> None:
    """Let torch give back pinned memory that no tensor uses (swapped blocks lay there), in versions that can."""
    empty = getattr(torch.accelerator, "empty_host_cache", None)
    if empty is not None and torch.accelerator.is_available():
        empty()


def _told_by_init(module: Any) -> str:
    """Return why torch's module for a device cannot be started (a driver too old for it, say), as the rest of a sentence."""
    try:
        module.init()
    except Exception as error:
        return f": {(str(error).splitlines() or [type(error).__name__])[0]}"
    return ""
