"""The state of the installation as data: every candidate's record, what each device can do, and which backend would be used."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from hardpoint.interfaces import API_VERSION, Device, MemoryInfo
from hardpoint.interfaces.errors import BackendNotFound, HardpointError
from hardpoint.plugins.classes import faulty_classes
from hardpoint.plugins.device_memory import device_memory
from hardpoint.plugins.guard import BackendCodeFailed, call_backend
from hardpoint.plugins.loader import BLOCK_VARIABLE, installed
from hardpoint.plugins.record import BackendRecord, BackendState
from hardpoint.plugins.resolve import NAME_VARIABLE, Resolved, resolve_backend

SCHEMA = 1
"""Version of the JSON report; new fields may be added without a change of it. Described in docs/doctor.md."""


@dataclass(frozen=True)
class Diagnosis:
    """What `hardpoint doctor` found.

    Attributes:
        records: of all candidates, or of those with the name that was asked for.
        choice: what would be used without further arguments (or with that name); None where that is an error.
        error: the error.
        unmatched_blocks: names in HARDPOINT_BLOCK_BACKENDS that belong to no candidate.
        memory: by name of the backend and index of the device, where it was asked for: the device's memory, or why it is not known.
    """

    records: tuple[BackendRecord, ...]
    choice: Resolved | None
    error: HardpointError | None
    unmatched_blocks: tuple[str, ...]
    memory: Mapping[tuple[str, int], tuple[MemoryInfo | None, str]] = field(default_factory=dict)

    @property
    def is_faulty(self) -> bool:
        """Something that is installed has to be fixed."""
        return any(record.state.is_fault for record in self.records)

    @property
    def is_usable(self) -> bool:
        """At least one backend can be used, if only by name."""
        return any(record.state is BackendState.OK for record in self.records)

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain data."""
        return {
            "schema": SCHEMA,
            "hardpoint": distribution_version("hardpoint"),
            "api": API_VERSION,
            "python": platform.python_version(),
            "platform": platform.platform(),
            "torch": distribution_version("torch"),
            "environment": {name: os.environ.get(name) for name in (NAME_VARIABLE, BLOCK_VARIABLE)},
            "unmatched_blocks": list(self.unmatched_blocks),
            "backends": [self._record(record) for record in self.records],
            "choice": self._choice(),
        }

    def _choice(self) -> dict[str, Any]:
        if self.choice is not None:
            device = self.choice.device
            return {"backend": device.backend, "device": device.index, "notice": self.choice.notice, "error": None}
        error = {"type": type(self.error).__name__, "message": str(self.error)}
        return {"backend": None, "device": None, "notice": "", "error": error}

    def _record(self, record: BackendRecord) -> dict[str, Any]:
        descriptor = record.descriptor
        return {
            "name": record.name,
            "state": record.state.value,
            "reason": record.reason,
            "traceback": record.traceback,
            "distribution": record.distribution,
            "version": record.version,
            "entry_point": record.entry_point,
            "vendor": None if descriptor is None else descriptor.vendor,
            "accelerator": None if descriptor is None else descriptor.accelerator,
            "priority": record.priority,
            "api": None if record.api is None else list(record.api),
            "devices": [self._device(record, device) for device in record.devices],
        }

    def _device(self, record: BackendRecord, device: Device) -> dict[str, Any]:
        claims, problem = device_claims(record, device)
        memory, unknown = self.memory.get((record.name, device.index), (None, ""))
        return {
            "index": device.index,
            "name": device.name,
            "torch_device": device.torch_device,
            "total_memory": device.total_memory,
            "driver_version": device.driver_version,
            "simulated": device.simulated,
            "properties": dict(device.properties),
            "capabilities": claims,
            "capabilities_error": problem,
            "memory": None if memory is None else asdict(memory),
            "memory_error": unknown,
        }


def diagnose(name: str | None = None, *, memory: bool = False, classes: bool = False) -> Diagnosis:
    """Look at the installed backends anew; with a name, at no other than those that have it.

    Args:
        memory: start every device, each in a process of its own, and ask its driver for free and total memory and quirks.
        classes: import the classes of every backend, in a process of its own; one whose classes break the contract is BROKEN.

    Raises BackendNotFound when no candidate has the name.
    """
    registry = installed(refresh=True)
    records = registry.records(name)
    if classes:
        records = tuple(map(_with_its_classes, records))
    choice: Resolved | None = None
    error: HardpointError | None = None
    try:
        choice = resolve_backend(name, records=(records or None) if classes else None)
    except HardpointError as found:
        if isinstance(found, BackendNotFound) and name is not None:
            raise
        error = found
    found_memory = {
        (record.name, device.index): device_memory(record, device)
        for record in (records if memory else ())
        for device in record.devices
    }
    return Diagnosis(records, choice, error, registry.unmatched_blocks, found_memory)


def _with_its_classes(record: BackendRecord) -> BackendRecord:
    """Return a record that is broken where its classes are."""
    if record.state not in (BackendState.OK, BackendState.UNAVAILABLE):
        return record
    problems = faulty_classes(record)
    return replace(record, state=BackendState.BROKEN, reason="; ".join(problems)) if problems else record


def device_claims(record: BackendRecord, device: Device) -> tuple[dict[str, Any] | None, str]:
    """Return what a backend claims for one of its record's devices, and why that could not be found out where it is None."""
    descriptor = record.descriptor
    assert descriptor is not None
    try:
        claims = call_backend("its capabilities", lambda: descriptor.capabilities(device).to_json())
    except BackendCodeFailed as failure:
        return None, failure.reason
    return claims, ""


def distribution_version(name: str) -> str | None:
    """Return the version of an installed distribution without importing it; None when it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None
