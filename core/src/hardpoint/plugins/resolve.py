"""The choice of a backend: exactly the one that is named, or else the best one that can run here, explained.

Without a name, candidates stand in the order of their declared priority. An unavailable one passes on to the next, with a
line that says so. A faulty one (broken, incompatible, or a name claimed twice) stops the choice unless the chosen backend has a
higher priority: an accelerator that is installed and does not work must never turn into something slower in silence. Where a fault came
before the priority was known, it is taken to be the highest. `HARDPOINT_BLOCK_BACKENDS` excludes a candidate on purpose.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from hardpoint.interfaces import BackendDescriptor, Device
from hardpoint.interfaces.errors import (
    AmbiguousBackend,
    BackendBroken,
    BackendError,
    BackendIncompatible,
    BackendNotFound,
    BackendUnavailable,
    ConfigError,
)
from hardpoint.plugins.loader import BLOCK_VARIABLE, installed
from hardpoint.plugins.record import BackendRecord, BackendState

NAME_VARIABLE = "HARDPOINT_BACKEND"
"""Environment variable: name of the backend to use where no argument gives one."""

_DOCTOR = "Run `hardpoint doctor` for the details"


@dataclass(frozen=True)
class Resolved:
    """The backend and device to use.

    Attributes:
        notice: one line for the user when a backend of higher priority was passed over; else empty.
    """

    descriptor: BackendDescriptor
    device: Device
    notice: str = ""


def resolve_backend(
    name: str | None = None,
    *,
    device: int = 0,
    require_accelerator: bool = False,
    records: Sequence[BackendRecord] | None = None,
) -> Resolved:
    """Return the backend and device to use.

    Args:
        name: exactly this backend; None for the one that `HARDPOINT_BACKEND` names, or else the best one.
        device: index within the backend.
        require_accelerator: a backend that runs on the host's processor is an error.
        records: choose among these; None for the installed backends. With a name, no other backend is then imported.

    Raises:
        BackendNotFound: no candidate has the name, or nothing is installed.
        BackendUnavailable: the named backend cannot run here or is blocked, or none can.
        BackendIncompatible, BackendBroken: the named backend is, or one that stands before the best one is.
        AmbiguousBackend: several stand first with equal priority, or a name is claimed twice.
        ConfigError: there is no such device, or the named backend is no accelerator and one is required.
    """
    name = name or os.environ.get(NAME_VARIABLE) or None
    if name is not None:
        return _pick(_named(name, require_accelerator, records), device)
    return _best(installed().records() if records is None else records, device, require_accelerator)


def _named(name: str, require_accelerator: bool, records: Sequence[BackendRecord] | None) -> BackendRecord:
    known = installed().records(name) if records is None else records
    found = [record for record in known if record.name == name]
    # One of two distributions that claim a name can be blocked; the other one is meant then.
    found = [record for record in found if record.state is not BackendState.BLOCKED] or found
    if not found:
        everything = installed().records() if records is None else records
        raise BackendNotFound(f"there is no backend named '{name}'", found=_listed(everything), hint=_DOCTOR)
    record = found[0]
    if record.state is not BackendState.OK:
        raise _error(f"backend '{name}' was asked for and cannot be used", record)
    if require_accelerator and not _descriptor(record).accelerator:
        raise ConfigError(
            f"backend '{name}' was asked for together with an accelerator",
            found=f"{name} runs on the host's processor",
            hint="Name an accelerator's backend, or do not require one",
        )
    return record


def _best(records: Sequence[BackendRecord], device: int, require_accelerator: bool) -> Resolved:
    candidates = [
        record
        for record in records
        if record.state is not BackendState.BLOCKED
        and not (require_accelerator and record.descriptor is not None and not record.descriptor.accelerator)
    ]
    usable = [record for record in candidates if record.state is BackendState.OK]
    highest = max((_descriptor(record).priority for record in usable), default=None)
    for record in candidates:
        if record.state.is_fault and _stands_before(record, highest):
            raise _error("no backend was named, and one that stands before the others is faulty", record)
    if highest is None:
        raise _nothing(records, candidates, require_accelerator)
    first = [record for record in usable if _descriptor(record).priority == highest]
    if len(first) > 1:
        raise AmbiguousBackend(
            f"no backend was named, and {len(first)} share the highest priority, {highest}",
            found=_listed(first),
            hint=f"Name one with --backend or {NAME_VARIABLE}",
        )
    passed = [r for r in candidates if r.state is BackendState.UNAVAILABLE and _descriptor(r).priority > highest]
    reasons = "; ".join(f"{record.name} is unavailable ({record.reason})" for record in passed)
    return _pick(first[0], device, f"{reasons}: using {first[0].name} instead" if passed else "")


def _stands_before(record: BackendRecord, priority: int | None) -> bool:
    return priority is None or record.priority is None or record.priority >= priority


def _pick(record: BackendRecord, device: int, notice: str = "") -> Resolved:
    if not 0 <= device < len(record.devices):
        there = ", ".join(f"{d.index} ({d.name})" for d in record.devices)
        raise ConfigError(
            f"device {device} of backend '{record.name}' was asked for", found=f"its devices are {there}", hint=_DOCTOR
        )
    return Resolved(_descriptor(record), record.devices[device], notice)


def _error(problem: str, record: BackendRecord) -> BackendError:
    block = f"Mend or uninstall {record.distribution or record.entry_point}, or exclude it with {BLOCK_VARIABLE}={record.name}"
    match record.state:
        case BackendState.UNAVAILABLE:
            hint = record.descriptor.install_hint if record.descriptor is not None else ""
            return BackendUnavailable(problem, found=str(record), hint=hint or _DOCTOR)
        case BackendState.BLOCKED:
            return BackendUnavailable(problem, found=str(record), hint=f"Take it out of {BLOCK_VARIABLE}")
        case BackendState.INCOMPATIBLE:
            return BackendIncompatible(problem, found=str(record), hint=f"{block}. {_DOCTOR}")
        case BackendState.SHADOWED:
            one = f"Uninstall one of them, or exclude it with {BLOCK_VARIABLE}=<its distribution>"
            return AmbiguousBackend(problem, found=str(record), hint=one)
        case _:
            return BackendBroken(problem, found=str(record), hint=f"{block}. {_DOCTOR}")


def _nothing(
    records: Sequence[BackendRecord], candidates: Sequence[BackendRecord], require_accelerator: bool
) -> BackendError:
    if not records:
        return BackendNotFound("no backend is installed", hint='Install one, for example: pip install "hardpoint[cpu]"')
    problem = "an accelerator is required, and none can be used" if require_accelerator else "no backend can be used"
    return BackendUnavailable(problem, found=_listed(candidates or records), hint=_DOCTOR)


def _descriptor(record: BackendRecord) -> BackendDescriptor:
    """Return the descriptor of a record whose state implies that there is one."""
    assert record.descriptor is not None
    return record.descriptor


def _listed(records: Sequence[BackendRecord]) -> str:
    return "; ".join(map(str, records)) or "no backend is installed"
