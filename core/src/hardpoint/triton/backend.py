"""The descriptor of a backend whose device torch and Triton compute on. Imports neither torch nor a device library."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from hardpoint.interfaces import BackendDescriptor, Capabilities, Device, ProbeResult
from hardpoint.triton.build import TorchBuild

if TYPE_CHECKING:
    from hardpoint.interfaces import AttentionBackend, Collectives, GraphRunner, Platform
    from hardpoint.memory import DriverTable, TorchPoolAllocator
    from hardpoint.triton import TritonKernels
    from hardpoint.worker import StandardWorker

T = TypeVar("T")


def triton_backend(
    build: TorchBuild,
    *,
    vendor: str,
    api: tuple[int, int],
    library: str,
    variable: str,
    probe: Callable[[], ProbeResult],
    capabilities: Callable[[Device], Capabilities],
    allocator: Callable[[], type[TorchPoolAllocator]],
    attention: Callable[[], type[AttentionBackend]],
    driver: Callable[[Device], DriverTable],
    collectives: Callable[[], type[Collectives]] | None = None,
) -> BackendDescriptor:
    """Return the descriptor: the vendor's own parts, and the core's for everything that torch and Triton answer.

    Args:
        library: the vendor's, in words.
        variable: environment variable with the path of a driver library.
        collectives: the vendor's own; None for those over torch's process group.
        others: as in `BackendDescriptor`.
    """

    def computing(part: str, load: Callable[[], T]) -> Callable[[], T]:
        def checked() -> T:
            if build.requirements():
                raise build.refusal(part)
            return load()

        return checked

    return BackendDescriptor(
        name=build.backend,
        vendor=vendor,
        api=api,
        probe=probe,
        capabilities=capabilities,
        allocator=allocator,
        attention=computing("attention", attention),
        worker=computing("worker", standard_worker),
        platform=torch_platform,
        kernels=computing("kernel set", _kernels),
        graph_runner=_graph_runner,
        collectives=collectives or _collectives,
        driver=driver,
        priority=100,
        cluster_resource="GPU",
        install_hint=f"{build.install}, and {library}, or give the path of a driver library in {variable}",
    )


def standard_worker() -> type[StandardWorker]:
    """Return the core's worker."""
    from hardpoint.worker import StandardWorker

    return StandardWorker


def torch_platform() -> type[Platform]:
    """Return the platform that asks torch's module for the device."""
    from hardpoint.worker import TorchPlatform

    return TorchPlatform


def _kernels() -> type[TritonKernels]:
    from hardpoint.triton import TritonKernels

    return TritonKernels


def _graph_runner() -> type[GraphRunner]:
    from hardpoint.worker import TorchGraphRunner

    return TorchGraphRunner


def _collectives() -> type[Collectives]:
    from hardpoint.worker.ranks import TorchCollectives

    return TorchCollectives
