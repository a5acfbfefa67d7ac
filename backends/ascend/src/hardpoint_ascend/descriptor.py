"""The backend's descriptor: found through the entry point `ascend`, imported without torch and without a driver."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pluggy

from hardpoint.interfaces import BackendDescriptor, ProbeResult
from hardpoint.memory.driver_probe import take_inventory
from hardpoint_ascend import allocator, capabilities

if TYPE_CHECKING:
    from hardpoint_ascend.attention import AscendAttention
    from hardpoint_ascend.collectives import AscendCollectives
    from hardpoint_ascend.graphs import AscendGraphRunner
    from hardpoint_ascend.worker import AscendWorker

DRIVER_VARIABLE = "HARDPOINT_ASCEND_DRIVER"
SONAMES = ("libascendcl.so",)

hookimpl = pluggy.HookimplMarker("hardpoint")


def probe() -> ProbeResult:
    """Look for the CANN runtime and its devices, in a process of its own; raises BackendBroken, DriverError.

    Devices on which nothing can be computed are listed, with the reasons: their memory works.
    """
    inventory = take_inventory(Path(__file__).with_name("driver.py"), DRIVER_VARIABLE, SONAMES)
    devices = inventory.as_devices("ascend", "npu")
    obstacles = [capabilities.reasons(device) for device in devices]
    return ProbeResult(devices, inventory.reason or ("; ".join(obstacles[0]) if all(obstacles) else ""))


def _attention() -> type[AscendAttention]:
    if capabilities.requirements():
        raise capabilities.refusal("attention")
    from hardpoint_ascend.attention import AscendAttention

    return AscendAttention


def _worker() -> type[AscendWorker]:
    if capabilities.requirements():
        raise capabilities.refusal("worker")
    from hardpoint_ascend.worker import AscendWorker

    return AscendWorker


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
        api=(2, 2),
        probe=probe,
        capabilities=capabilities.capabilities,
        allocator=allocator.allocator,
        attention=_attention,
        worker=_worker,
        graph_runner=_graph_runner,
        collectives=_collectives,
        driver=allocator.driver,
        priority=100,
        cluster_resource="NPU",
        install_hint=(
            f"{capabilities.INSTALL}, and source its set_env.sh, or give the path of libascendcl.so in {DRIVER_VARIABLE}"
        ),
    )
