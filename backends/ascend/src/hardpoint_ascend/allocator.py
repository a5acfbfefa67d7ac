"""The device's memory: the core's engine over the driver's virtual memory."""

from __future__ import annotations

from collections.abc import Mapping

from hardpoint.interfaces import Device
from hardpoint.interfaces.errors import CapabilityRefused
from hardpoint.memory import TorchPoolAllocator, TorchPoolFunctions, open_driver, refuse_expandable_segments
from hardpoint.memory.driver_table import DriverTable
from hardpoint_ascend.capabilities import capabilities

TORCH_SETTINGS = ("PYTORCH_NPU_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""The environment variables of torch's allocator settings, by old and new names."""


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


TORCH_FUNCTIONS = TorchPoolFunctions.of_module(
    "torch_npu.npu", backend="ascend", pluggable_allocator="NPUPluggableAllocator", check=_check
)
"""What torch_npu calls its functions."""


class AscendAllocator(TorchPoolAllocator):
    """Tensors in virtual memory of the AscendCL runtime."""

    def __init__(self, device: Device) -> None:
        """Open the device; raises BackendUnavailable, BackendBroken, DriverError."""
        super().__init__(
            driver_table(device.index),
            device=device.index,
            torch_device=device.torch_device,
            capabilities=capabilities(device).memory,
            functions=TORCH_FUNCTIONS,
        )


def allocator() -> type[AscendAllocator]:
    """Return the class that implements the contract."""
    return AscendAllocator


def driver_table(device: int, options: Mapping[str, object] | None = None) -> DriverTable:
    """Return the memory driver of a device; see `open_driver`.

    Args:
        options: none.
    """
    return open_driver("hardpoint_ascend", device, options)


def driver(device: Device) -> DriverTable:
    """Open the memory driver of a device as its probe found it; raises as `driver_table` does."""
    return driver_table(device.index)
