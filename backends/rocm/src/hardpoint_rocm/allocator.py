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
from hardpoint_rocm.capabilities import capabilities
from hardpoint_rocm.libraries import check_one_runtime, runtime

TORCH_SETTINGS = ("PYTORCH_HIP_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""The environment variables of torch's allocator settings, by old and new names."""


def _check_torch() -> None:
    check_torch_build("torch.cuda", backend="rocm", platform="ROCm", version="hip", variables=TORCH_SETTINGS)
    check_one_runtime()


TORCH_FUNCTIONS = TorchPoolFunctions.of_module(
    "torch.cuda",
    backend="rocm",
    pluggable_allocator="CUDAPluggableAllocator",
    check=_check_torch,
    settled=partial(without_expandable_segments, "torch.cuda"),
)
"""Torch's builds for ROCm call the device, its module and the allocator as those for CUDA do."""


class RocmAllocator(TorchPoolAllocator):
    """Tensors in virtual memory of the HIP runtime."""

    def __init__(self, device: Device) -> None:
        """Open the device; raises BackendUnavailable, BackendBroken (where two HIP runtimes are loaded, too), DriverError."""
        super().__init__(
            driver_table(device.index),
            device=device.index,
            torch_device=device.torch_device,
            capabilities=capabilities(device).memory,
            functions=TORCH_FUNCTIONS,
        )
        check_one_runtime()


def allocator() -> type[RocmAllocator]:
    """Return the class that implements the contract."""
    return RocmAllocator


def driver_table(device: int, options: Mapping[str, object] | None = None) -> DriverTable:
    """Return the memory driver of a device; see `open_driver`.

    Args:
        options: `chunk_mb` (largest single allocation in MiB; else HARDPOINT_ROCM_CHUNK_MB, VLLM_ROCM_SLEEP_MEM_CHUNK_SIZE, 256).
    """
    return open_driver("hardpoint_rocm", device, options, runtime())


def driver(device: Device) -> DriverTable:
    """Open the memory driver of a device as its probe found it; raises as `driver_table` does."""
    return driver_table(device.index)
