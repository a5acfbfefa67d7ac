"""The device's memory: the core's engine over the driver's virtual memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from hardpoint.interfaces import Device
from hardpoint.interfaces.errors import CapabilityRefused
from hardpoint.memory import TorchPoolAllocator, TorchPoolFunctions, driver_file, refuse_expandable_segments
from hardpoint.memory.driver_table import DriverTable
from hardpoint_rocm.capabilities import capabilities

TORCH_SETTINGS = ("PYTORCH_HIP_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""The environment variables of torch's allocator settings, by old and new names."""


class RocmAllocator(TorchPoolAllocator):
    """Tensors in virtual memory of the HIP runtime. Torch's builds for ROCm call it `torch.cuda`."""

    def __init__(self, device: Device) -> None:
        """Open the device; raises BackendUnavailable, BackendBroken, DriverError."""
        super().__init__(
            driver_table(device.index),
            device=device.index,
            torch_device=device.torch_device,
            capabilities=capabilities(device).memory,
            functions=TorchPoolFunctions(
                symbols=("hp_rocm_malloc", "hp_rocm_free"),
                allocator=_pluggable_allocator,
                pool=_torch_pool,
                use=_use,
                segments=_segments,
                empty_cache=_empty_cache,
                check=_check,
            ),
        )


def allocator() -> type[RocmAllocator]:
    """Return the class that implements the contract."""
    return RocmAllocator


def driver_table(device: int, options: Mapping[str, object] | None = None) -> DriverTable:
    """Return the memory driver of a device; the vendor's library is found as the probe finds it.

    Args:
        device: index of the device.
        options: `chunk_mb` (largest single allocation in MiB; else HARDPOINT_ROCM_CHUNK_MB,
            VLLM_ROCM_SLEEP_MEM_CHUNK_SIZE, 256).

    Raises:
        BackendBroken: the driver was not built, or for another contract.
        BackendUnavailable: the vendor's library or the device is not here.
        DriverError: a vendor call failed, or an option is not one of those above.
    """
    return DriverTable(driver_file("hardpoint_rocm"), device=device, options=options)


def _check() -> None:
    """Raise CapabilityRefused where torch is built without ROCm, or is set up without pools."""
    import torch

    problem = "torch cannot allocate from a pool of the backend 'rocm'"
    if torch.version.hip is None:
        raise CapabilityRefused(
            problem, [f"torch {torch.__version__} is built without ROCm"], hint="Install torch's build for ROCm"
        )
    backend = torch.cuda.get_allocator_backend()
    if backend != "native":
        raise CapabilityRefused(
            problem,
            [f"torch's allocator is '{backend}', which has no pools"],
            hint=f"Remove `backend:` from {' and '.join(TORCH_SETTINGS)}",
        )
    settings = torch.cuda.memory._snapshot()["allocator_settings"]  # type: ignore[no-untyped-call]
    refuse_expandable_segments(TORCH_SETTINGS, settings["expandable_segments"])


def _pluggable_allocator(library: str, malloc: str, free: str) -> Any:
    from torch.cuda.memory import CUDAPluggableAllocator

    return CUDAPluggableAllocator(library, malloc, free)


def _torch_pool(pluggable: Any, device: int) -> Any:
    import torch

    with torch.cuda.device(device):  # a pool is of the current device
        return torch.cuda.MemPool(pluggable.allocator())


def _use(pool: Any, device: int) -> AbstractContextManager[None]:
    import torch

    return torch.cuda.use_mem_pool(pool, device)


def _segments(pool: Any) -> Sequence[Mapping[str, Any]]:
    segments: Sequence[Mapping[str, Any]] = pool.snapshot()
    return segments


def _empty_cache() -> None:
    import torch

    torch.cuda.empty_cache()
