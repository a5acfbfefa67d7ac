"""What the CPU backend says of itself. Imports neither torch nor the native module."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING

import pluggy

from hardpoint.interfaces.backend import BackendDescriptor, Device, ProbeResult
from hardpoint_cpu.capabilities import capabilities
from hardpoint_cpu.host import cpu_name, total_memory

if TYPE_CHECKING:
    from hardpoint.memory import DriverTable
    from hardpoint.worker import StandardWorker
    from hardpoint_cpu.allocator import CpuAllocator
    from hardpoint_cpu.attention import CpuAttention
    from hardpoint_cpu.collectives import CpuCollectives
    from hardpoint_cpu.kernels import CpuKernels
    from hardpoint_cpu.platform import CpuPlatform

hookimpl = pluggy.HookimplMarker("hardpoint")


def _probe() -> ProbeResult:
    device = Device(
        backend="cpu",
        index=0,
        name=cpu_name(),
        torch_device="cpu",
        total_memory=total_memory(),
        driver_version=f"{platform.system()} {platform.release()}",
    )
    return ProbeResult(devices=(device,))


def _allocator() -> type[CpuAllocator]:
    from hardpoint_cpu.allocator import CpuAllocator

    return CpuAllocator


def _attention() -> type[CpuAttention]:
    from hardpoint_cpu.attention import CpuAttention

    return CpuAttention


def _worker() -> type[StandardWorker]:
    from hardpoint.worker import StandardWorker

    return StandardWorker


def _platform() -> type[CpuPlatform]:
    from hardpoint_cpu.platform import CpuPlatform

    return CpuPlatform


def _kernels() -> type[CpuKernels]:
    from hardpoint_cpu.kernels import CpuKernels

    return CpuKernels


def _collectives() -> type[CpuCollectives]:
    from hardpoint_cpu.collectives import CpuCollectives

    return CpuCollectives


def _driver(device: Device) -> DriverTable:
    from hardpoint_cpu.driver import driver_table

    return driver_table(device.index)


@hookimpl
def hardpoint_backend() -> BackendDescriptor:
    """Describe the CPU backend."""
    return BackendDescriptor(
        name="cpu",
        vendor="Hardpoint",
        api=(1, 1),
        probe=_probe,
        capabilities=capabilities,
        allocator=_allocator,
        attention=_attention,
        worker=_worker,
        platform=_platform,
        kernels=_kernels,
        collectives=_collectives,
        driver=_driver,
        priority=0,
        accelerator=False,
    )
