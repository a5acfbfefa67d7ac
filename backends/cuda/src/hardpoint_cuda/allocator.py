"""The device's memory: the core's engine over the driver's virtual memory."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from hardpoint.interfaces import Device
from hardpoint.memory import (
    TorchPoolAllocator,
    TorchPoolFunctions,
    check_torch_build,
    open_driver,
    without_expandable_segments,
)
from hardpoint.memory.driver_table import DriverTable
from hardpoint_cuda.capabilities import capabilities

TORCH_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""The environment variables of torch's allocator settings, by old and new names."""

TORCH_FUNCTIONS = TorchPoolFunctions.of_module(
    "torch.cuda",
    backend="cuda",
    pluggable_allocator="CUDAPluggableAllocator",
    check=partial(
        check_torch_build, "torch.cuda", backend="cuda", platform="CUDA", version="cuda", variables=TORCH_SETTINGS
    ),
    settled=partial(without_expandable_segments, "torch.cuda"),
)
"""What torch calls its functions."""


class CudaAllocator(TorchPoolAllocator):
    """Tensors in virtual memory of the CUDA driver."""

    def __init__(self, device: Device) -> None:
        """Open the device; raises BackendUnavailable, BackendBroken, DriverError."""
        super().__init__(
            driver_table(device.index),
            device=device.index,
            torch_device=device.torch_device,
            capabilities=capabilities(device).memory,
            functions=TORCH_FUNCTIONS,
        )


def allocator() -> type[CudaAllocator]:
    """Return the class that implements the contract."""
    return CudaAllocator


def driver_table(device: int, options: Mapping[str, object] | None = None) -> DriverTable:
    """Return the memory driver of a device; see `open_driver`.

    Args:
        options: `shareable` (none, posix or fabric: the kind of handle by which other processes can be given the memory).
    """
    return open_driver("hardpoint_cuda", device, options)


def driver(device: Device) -> DriverTable:
    """Open the memory driver of a device as its probe found it; raises as `driver_table` does."""
    return driver_table(device.index)
