"""The backend's descriptor: found through the entry point `cuda`, imported without torch and without a driver."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pluggy

from hardpoint.interfaces import BackendDescriptor, ProbeResult
from hardpoint.memory.driver_probe import take_inventory
from hardpoint_cuda import allocator, capabilities

if TYPE_CHECKING:
    from hardpoint.interfaces import AttentionBackend
    from hardpoint.triton import TritonKernels
    from hardpoint_cuda.collectives import CudaCollectives
    from hardpoint_cuda.graphs import CudaGraphRunner
    from hardpoint_cuda.worker import CudaWorker

DRIVER_VARIABLE = "HARDPOINT_CUDA_DRIVER"
SONAMES = ("libcuda.so.1",)

hookimpl = pluggy.HookimplMarker("hardpoint")


def probe() -> ProbeResult:
    """Look for the CUDA driver and its devices, in a process of its own; raises BackendBroken, DriverError.

    Devices on which nothing can be computed are listed, with the reasons: their memory works.
    """
    inventory = take_inventory(Path(__file__).with_name("driver.py"), DRIVER_VARIABLE, SONAMES)
    devices = inventory.as_devices("cuda", "cuda")
    obstacles = [capabilities.reasons(device) for device in devices]
    return ProbeResult(devices, inventory.reason or ("; ".join(obstacles[0]) if all(obstacles) else ""))


def _attention() -> type[AttentionBackend]:
    if capabilities.requirements():
        raise capabilities.PLATFORM.refusal("attention")
    from hardpoint_cuda.attention import attention

    return attention()


def _worker() -> type[CudaWorker]:
    if capabilities.requirements():
        raise capabilities.PLATFORM.refusal("worker")
    from hardpoint_cuda.worker import CudaWorker

    return CudaWorker


def _kernels() -> type[TritonKernels]:
    if capabilities.requirements():
        raise capabilities.PLATFORM.refusal("kernel set")
    from hardpoint.triton import TritonKernels

    return TritonKernels


def _graph_runner() -> type[CudaGraphRunner]:
    from hardpoint_cuda.graphs import CudaGraphRunner

    return CudaGraphRunner


def _collectives() -> type[CudaCollectives]:
    from hardpoint_cuda.collectives import CudaCollectives

    return CudaCollectives


@hookimpl
def hardpoint_backend() -> BackendDescriptor:
    """Return the descriptor."""
    return BackendDescriptor(
        name="cuda",
        vendor="NVIDIA",
        api=(2, 2),
        probe=probe,
        capabilities=capabilities.capabilities,
        allocator=allocator.allocator,
        attention=_attention,
        worker=_worker,
        kernels=_kernels,
        graph_runner=_graph_runner,
        collectives=_collectives,
        driver=allocator.driver,
        priority=100,
        cluster_resource="GPU",
        install_hint=(
            f"{capabilities.PLATFORM.install}, and NVIDIA's driver (libcuda.so.1), "
            f"or give the path of a driver library in {DRIVER_VARIABLE}"
        ),
    )
