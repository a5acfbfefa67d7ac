"""The backend's descriptor: found through the entry point `rocm`, imported without torch and without a driver."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pluggy

from hardpoint.interfaces import BackendDescriptor, ProbeResult
from hardpoint.memory.driver_probe import take_inventory
from hardpoint_rocm import allocator, capabilities

if TYPE_CHECKING:
    from hardpoint.triton import TritonKernels
    from hardpoint_rocm.attention import RocmAttention
    from hardpoint_rocm.collectives import RocmCollectives
    from hardpoint_rocm.graphs import RocmGraphRunner
    from hardpoint_rocm.worker import RocmWorker

DRIVER_VARIABLE = "HARDPOINT_ROCM_DRIVER"
SONAMES = ("libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so")

hookimpl = pluggy.HookimplMarker("hardpoint")


def probe() -> ProbeResult:
    """Look for the HIP runtime and its devices, in a process of its own; raises BackendBroken, DriverError.

    Devices on which nothing can be computed are listed, with the reasons: their memory works.
    """
    inventory = take_inventory(Path(__file__).with_name("driver.py"), DRIVER_VARIABLE, SONAMES)
    devices = inventory.as_devices("rocm", "cuda")
    obstacles = [capabilities.reasons(device) for device in devices]
    return ProbeResult(devices, inventory.reason or ("; ".join(obstacles[0]) if all(obstacles) else ""))


def _attention() -> type[RocmAttention]:
    if capabilities.requirements():
        raise capabilities.PLATFORM.refusal("attention")
    from hardpoint_rocm.attention import RocmAttention

    return RocmAttention


def _worker() -> type[RocmWorker]:
    if capabilities.requirements():
        raise capabilities.PLATFORM.refusal("worker")
    from hardpoint_rocm.worker import RocmWorker

    return RocmWorker


def _kernels() -> type[TritonKernels]:
    if capabilities.requirements():
        raise capabilities.PLATFORM.refusal("kernel set")
    from hardpoint.triton import TritonKernels

    return TritonKernels


def _graph_runner() -> type[RocmGraphRunner]:
    from hardpoint_rocm.graphs import RocmGraphRunner

    return RocmGraphRunner


def _collectives() -> type[RocmCollectives]:
    from hardpoint_rocm.collectives import RocmCollectives

    return RocmCollectives


@hookimpl
def hardpoint_backend() -> BackendDescriptor:
    """Return the descriptor."""
    return BackendDescriptor(
        name="rocm",
        vendor="AMD",
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
            f"{capabilities.PLATFORM.install}, and ROCm's HIP runtime (libamdhip64.so), "
            f"or give the path of a driver library in {DRIVER_VARIABLE}"
        ),
    )
