"""The device's memory: the core's engine over the driver's virtual memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from hardpoint.interfaces import Device
from hardpoint.interfaces.errors import CapabilityRefused
from hardpoint.memory import TorchPoolAllocator, TorchPoolFunctions, driver_file, refuse_expandable_segments
from hardpoint.memory.driver_table import DriverTable
from hardpoint_ascend.capabilities import capabilities

TORCH_SETTINGS = ("PYTORCH_NPU_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""The environment variables of torch's allocator settings, by old and new names."""


class AscendAllocator(TorchPoolAllocator):
    """Tensors in virtual memory of the AscendCL runtime."""

    def __init__(self, device: Device) -> None:
        """Open the device; raises BackendUnavailable, BackendBroken, DriverError."""
        super().__init__(
            driver_table(device.index),
            device=device.index,
            torch_device=device.torch_device,
            capabilities=capabilities(device).memory,
            functions=TorchPoolFunctions(
                symbols=("hp_ascend_malloc", "hp_ascend_free"),
                allocator=_pluggable_allocator,
                pool=_torch_pool,
                use=_use,
                segments=_segments,
                empty_cache=_empty_cache,
                check=_check,
            ),
        )


def allocator() -> type[AscendAllocator]:
    """Return the class that implements the contract."""
    return AscendAllocator


def driver_table(device: int, options: Mapping[str, object] | None = None) -> DriverTable:
    """Return the memory driver of a device; the vendor's library is found as the probe finds it.

    Args:
        device: index of the device.
        options: none.

    Raises:
        BackendBroken: the driver was not built, or for another contract.
        BackendUnavailable: the vendor's library or the device is not here.
        DriverError: a vendor call failed, or an option is not one of those above.
    """
    return DriverTable(driver_file("hardpoint_ascend"), device=device, options=options)


def _check() -> None:
    """Raise CapabilityRefused where torch_npu is missing, or is set up without pools."""
    try:
        import torch_npu  # noqa: F401 - adds the device to torch
    except ImportError as error:
        raise CapabilityRefused(
            "torch cannot allocate from a pool of the backend 'ascend'",
            [f"torch_npu cannot be imported ({error})"],
            hint="Install the release of torch_npu that goes with torch",
        ) from error
    refuse_expandable_segments(TORCH_SETTINGS)


def _pluggable_allocator(library: str, malloc: str, free: str) -> Any:
    from torch_npu.npu.memory import NPUPluggableAllocator

    return NPUPluggableAllocator(library, malloc, free)


def _torch_pool(pluggable: Any, device: int) -> Any:
    import torch
    from torch_npu.npu.memory import MemPool

    with torch.npu.device(device):  # a pool is of the current device
        return MemPool(pluggable.allocator())


def _use(pool: Any, device: int) -> AbstractContextManager[None]:
    from torch_npu.npu.memory import use_mem_pool

    context: AbstractContextManager[None] = use_mem_pool(pool, device)
    return context


def _segments(pool: Any) -> Sequence[Mapping[str, Any]]:
    segments: Sequence[Mapping[str, Any]] = pool.snapshot()
    return segments


def _empty_cache() -> None:
    import torch

    torch.npu.empty_cache()
