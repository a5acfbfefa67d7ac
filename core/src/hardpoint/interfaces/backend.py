"""The descriptor by which a backend is found: what it is, where it can run, and how its parts are made.

A backend's distribution has an entry point in the group `hardpoint.backends` that names a module (or object) with the
pluggy hook `hardpoint_backend()`, which returns a `BackendDescriptor`. Importing that module imports neither torch nor a device library:
everything heavy is behind the factories.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hardpoint.interfaces.capabilities import Capabilities

if TYPE_CHECKING:
    from hardpoint.interfaces.allocator import DeviceAllocator
    from hardpoint.interfaces.attention import AttentionBackend
    from hardpoint.interfaces.collectives import Collectives
    from hardpoint.interfaces.graphs import GraphRunner
    from hardpoint.interfaces.kernels import KernelSet
    from hardpoint.interfaces.platform import Platform
    from hardpoint.interfaces.worker import Worker

API_VERSION = 1
"""Version of the contract that this core implements."""


@dataclass(frozen=True)
class Device:
    """One device of a backend, as its probe found it.

    Attributes:
        backend: name of the backend.
        index: number of the device within the backend.
        name: as the driver gives it.
        torch_device: what torch calls it, for example "cpu".
        total_memory: bytes; 0 when not known without starting the device.
        driver_version: as the driver gives it; "" when there is none.
        simulated: the driver is a simulation.
        properties: further facts for `doctor`, as text.
    """

    backend: str
    index: int
    name: str
    torch_device: str
    total_memory: int = 0
    driver_version: str = ""
    simulated: bool = False
    properties: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ProbeResult:
    """What a backend's probe found.

    Attributes:
        devices: in the order of their index.
        reason: why the backend cannot be used here (no driver, a driver without a device, a device that it cannot run on);
            empty when it can. Devices that are there and cannot be used may be listed beside it.
    """

    devices: tuple[Device, ...] = ()
    reason: str = ""

    def __post_init__(self) -> None:
        if not self.devices and not self.reason:
            raise ValueError("a probe that finds no device must say why (ProbeResult.reason)")


@dataclass(frozen=True)
class BackendDescriptor:
    """What a backend says of itself.

    Attributes:
        name: unique, lower case; what users write after `--backend`.
        vendor: who makes the device.
        api: inclusive range of contract versions that the backend implements.
        priority: the highest among available backends is taken when none is named.
        accelerator: False for a backend that runs on the host's processor.
        probe: cheap; looks for driver and devices without starting them. Raising means that the backend is broken.
        capabilities: what the backend claims for one device.
        allocator, attention, worker: return the class that implements the contract; each may import what it needs.
        platform, kernels, graph_runner, collectives: the same for the optional contracts; without a platform, the device works in the
            caller's thread, in the host's memory.
        driver: opens the memory driver of a device (a `hardpoint.memory.DriverTable`), for tools and tests; None for a backend
            whose allocator is all its own.
        cluster_resource: what Ray calls the backend's devices among a machine's resources; empty where it knows none.
        install_hint: what to do when the backend is unavailable.
    """

    name: str
    vendor: str
    api: tuple[int, int]
    probe: Callable[[], ProbeResult]
    capabilities: Callable[[Device], Capabilities]
    allocator: Callable[[], type[DeviceAllocator]]
    attention: Callable[[], type[AttentionBackend]]
    worker: Callable[[], type[Worker]]
    platform: Callable[[], type[Platform]] | None = None
    kernels: Callable[[], type[KernelSet]] | None = None
    graph_runner: Callable[[], type[GraphRunner]] | None = None
    collectives: Callable[[], type[Collectives]] | None = None
    driver: Callable[[Device], Any] | None = None
    priority: int = 0
    accelerator: bool = True
    cluster_resource: str = ""
    install_hint: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.isidentifier() or self.name != self.name.lower():
            raise ValueError(f"a backend's name is a lower-case identifier, not {self.name!r}")
        versions = self.api if isinstance(self.api, tuple) and all(type(number) is int for number in self.api) else ()
        if len(versions) != 2 or not 1 <= versions[0] <= versions[1]:
            raise ValueError(f"api is an inclusive range of contract versions from 1, not {self.api!r}")

    def make(self, part: str, device: Device) -> Any:
        """Return an instance of `platform`, `allocator`, `attention`, `kernels`, `graph_runner` or `collectives` for a device.

        Returns None for an optional part that the backend does not have.
        """
        factory = getattr(self, part)
        return None if factory is None else factory()(device)
