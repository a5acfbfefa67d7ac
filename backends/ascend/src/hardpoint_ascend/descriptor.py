"""The backend's descriptor: found through the entry point `ascend`, imported without torch and without a driver."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pluggy

from hardpoint.interfaces import BackendDescriptor, ProbeResult
from hardpoint.memory.driver_probe import probe_devices
from hardpoint_ascend import allocator, capabilities

if TYPE_CHECKING:
    from hardpoint.worker import StandardWorker
    from hardpoint_ascend.attention import AscendAttention
    from hardpoint_ascend.collectives import AscendCollectives
    from hardpoint_ascend.graphs import AscendGraphRunner
    from hardpoint_ascend.kernels import AscendKernels
    from hardpoint_ascend.platform import AscendPlatform

DRIVER_VARIABLE = "HARDPOINT_ASCEND_DRIVER"
SONAMES = ("libascendcl.so",)

hookimpl = pluggy.HookimplMarker("hardpoint")


def probe() -> ProbeResult:
    """Look for the CANN runtime and its devices; raises BackendBroken, DriverError."""
    return probe_devices(
        Path(__file__).with_name("driver.py"),
        DRIVER_VARIABLE,
        SONAMES,
        backend="ascend",
        torch_type="npu",
        obstacles=capabilities.reasons,
    )


def _attention() -> type[AscendAttention]:
    if capabilities.requirements():
        raise capabilities.refusal("attention")
    from hardpoint_ascend.attention import AscendAttention

    return AscendAttention


def _worker() -> type[StandardWorker]:
    if capabilities.requirements():
        raise capabilities.refusal("worker")
    from hardpoint.worker import StandardWorker

    return StandardWorker


def _platform() -> type[AscendPlatform]:
    from hardpoint_ascend.platform import AscendPlatform

    return AscendPlatform


def _kernels() -> type[AscendKernels]:
    if capabilities.requirements():
        raise capabilities.refusal("kernel set")
    from hardpoint_ascend.kernels import AscendKernels

    return AscendKernels


def _graph_runner() -> type[AscendGraphRunner]:
    from hardpoint_ascend.graphs import AscendGraphRunner

    return AscendGraphRunner


def _collectives() -> type[AscendCollectives]:
    from hardpoint_ascend.collectives import AscendCollectives

    return AscendCollectives


@hookimpl
def hardpoint_backend() -> BackendDescriptor:
    """Return the descriptor."""
    return BackendDescriptor(
        name="ascend",
        vendor="Huawei",
        api=(1, 1),
        probe=probe,
        capabilities=capabilities.capabilities,
        allocator=allocator.allocator,
        attention=_attention,
        worker=_worker,
        platform=_platform,
        kernels=_kernels,
        graph_runner=_graph_runner,
        collectives=_collectives,
        driver=allocator.driver,
        priority=100,
        cluster_resource="NPU",
        install_hint=(
            f"{capabilities.INSTALL}, and source its set_env.sh, or give the path of libascendcl.so in {DRIVER_VARIABLE}"
        ),
    )
