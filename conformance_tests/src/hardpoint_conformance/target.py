"""The backend under test."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

from hardpoint.interfaces import (
    AttentionBackend,
    BackendDescriptor,
    Capabilities,
    Device,
    SleepTier,
    Worker,
    WorkerConfig,
    WorkerContext,
)
from hardpoint.interfaces.errors import BackendBroken, BackendNotFound, BackendUnavailable, ConfigError
from hardpoint.memory import TensorAllocator
from hardpoint.plugins import BackendRecord, BackendState, installed
from hardpoint_conformance.claims import claimed, plain_tier

if TYPE_CHECKING:
    from hardpoint.memory import DriverTable, VirtualPool

MUTANT_VARIABLE = "HARDPOINT_CONFORMANCE_MUTANT"
"""Environment variable with which `selftest` puts a known-bad backend in the place of the one named."""


@dataclass(frozen=True)
class Target:
    """A backend on one of its devices, with what it claims for it.

    Attributes:
        record: how the backend was found.
        unavailable: why the backend cannot compute here although its device is there; "" when it can.
        engine: makes memory of the backend's driver; None for the core's engine.
    """

    descriptor: BackendDescriptor
    device: Device
    claims: Capabilities
    record: BackendRecord
    unavailable: str = ""
    engine: type[VirtualPool] | None = None

    @classmethod
    def find(cls, name: str, device: int = 0) -> Target:
        """Return the installed backend of this name.

        A backend whose probe finds its device and says that it cannot compute on it can be tested as far as it goes.

        Raises:
            BackendNotFound, BackendUnavailable, BackendBroken, ConfigError: it cannot be tested at all.
        """
        records = [record for record in installed().records(name) if record.name == name]
        if not records:
            there = ", ".join(sorted({record.name for record in installed().records()}))
            raise BackendNotFound(f"no backend is named '{name}'", found=f"installed: {there or 'none'}")
        record = next((r for r in records if r.state is BackendState.OK), records[0])
        if record.descriptor is None or record.state not in (BackendState.OK, BackendState.UNAVAILABLE):
            raise BackendBroken(
                f"the backend '{name}' cannot be tested", found=f"{record.state.value}: {record.reason}"
            )
        if not record.devices:
            raise BackendUnavailable(f"the backend '{name}' has no device here", found=record.reason)
        if not 0 <= device < len(record.devices):
            raise ConfigError(f"device {device} of '{name}' was asked for", found=f"it has {len(record.devices)}")
        chosen = record.devices[device]
        found = cls(record.descriptor, chosen, record.descriptor.capabilities(chosen), record, record.reason)
        mutant = os.environ.get(MUTANT_VARIABLE)
        if not mutant:
            return found
        from hardpoint_conformance.mutants import mutant_named

        return mutant_named(mutant).apply(found)

    def with_descriptor(self, **parts: object) -> Target:
        """Return the target with other parts in its descriptor; its claims are asked for anew."""
        descriptor = replace(self.descriptor, **parts)  # type: ignore[arg-type]
        return replace(self, descriptor=descriptor, claims=descriptor.capabilities(self.device))

    @property
    def name(self) -> str:
        """The backend's name."""
        return self.descriptor.name

    @property
    def simulated(self) -> bool:
        """The device's driver is a simulation."""
        return self.device.simulated

    def claims_to(self, capability: str) -> bool:
        """Return whether the backend claims a capability of `claims.CLAIMS`."""
        return claimed(capability, self.claims)

    @property
    def tier(self) -> SleepTier:
        """The tier to which tests sleep that are about none."""
        return plain_tier(self.claims.memory)

    def driver(self) -> DriverTable | None:
        """Open the memory driver; None for a backend whose allocator is all its own."""
        return None if self.descriptor.driver is None else self.descriptor.driver(self.device)

    def allocator(self) -> TensorAllocator:
        """Make an allocator; the suite also calls what `TensorAllocator`, the base of allocators, has beside the contract."""
        return cast("TensorAllocator", self.descriptor.allocator()(self.device))  # type: ignore[call-arg]

    def attention(self) -> AttentionBackend:
        """Make an attention backend."""
        return self.descriptor.attention()(self.device)  # type: ignore[call-arg]

    def worker(self, config: WorkerConfig) -> Worker:
        """Make a worker."""
        return self.descriptor.worker()(WorkerContext(self.descriptor, self.device, config))
