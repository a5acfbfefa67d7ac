"""What a backend is and what it claims, found out in a process of its own: `python -m hardpoint_conformance.examine NAME DEVICE FILE`.

Whatever the backend's code does there (raise, hang, end the process) costs that process, and is told to the one that asked.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
from dataclasses import asdict, dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from hardpoint.plugins import ENTRY_POINT_GROUP, BackendRecord, installed
from hardpoint_conformance.processes import run_process


@dataclass(frozen=True)
class Examination:
    """What was found out about a backend on one device.

    Attributes:
        backend: name, vendor, distribution, version, entry point, range of contract versions, whether it is an accelerator; what is
            not known is None.
        device: name, index, driver version, total memory in bytes, whether it is simulated; None where there is none.
        claims: as `claims.to_json` gives them; None where they could not be had.
        unavailable: why the backend cannot compute here although its device is there.
        contradictions: where what it claims contradicts itself, one sentence each.
        problem: why the backend cannot be tested at all; "" when it can.
        usage: the problem is the caller's: no such backend or device.
    """

    backend: dict[str, Any]
    device: dict[str, Any] | None = None
    claims: dict[str, Any] | None = None
    unavailable: str = ""
    contradictions: tuple[str, ...] = ()
    problem: str = ""
    usage: bool = False


def examine(name: str, device: int, scratch: Path, time_limit: float = 90.0) -> Examination:
    """Examine an installed backend in a process of its own; never raises for what the backend does."""
    file = scratch / "examination.json"
    file.unlink(missing_ok=True)
    found = [entry for entry in entry_points(group=ENTRY_POINT_GROUP) if entry.name == name]
    if not found:
        there = ", ".join(sorted({entry.name for entry in entry_points(group=ENTRY_POINT_GROUP)})) or "none"
        return Examination(_unknown(name), problem=f"no backend is named '{name}' (installed: {there})", usage=True)
    backend = _unknown(name) | {"entry_point": found[0].value}
    if found[0].dist is not None:
        backend |= {"distribution": found[0].dist.name, "version": found[0].dist.version}
    ended = run_process("hardpoint_conformance.examine", [name, str(device), str(file)], scratch, time_limit)
    if not file.exists():
        return Examination(backend, problem=f"the process that looked at it {ended.how}{ended.last_words}")
    data = json.loads(file.read_text("utf-8"))
    return Examination(**data)


def _unknown(name: str) -> dict[str, Any]:
    return {
        "name": name,
        "vendor": None,
        "distribution": None,
        "version": None,
        "entry_point": None,
        "api": None,
        "accelerator": None,
    }


def _of(record: BackendRecord) -> dict[str, Any]:
    descriptor = record.descriptor
    return {
        "name": record.name,
        "vendor": None if descriptor is None else descriptor.vendor,
        "distribution": record.distribution or None,
        "version": record.version or None,
        "entry_point": record.entry_point,
        "api": None if record.api is None else list(record.api),
        "accelerator": None if descriptor is None else descriptor.accelerator,
    }


def examine_here(name: str, device: int) -> Examination:
    """Examine an installed backend in this process."""
    from hardpoint.interfaces.errors import ConfigError, HardpointError
    from hardpoint_conformance.claims import to_json
    from hardpoint_conformance.packaging import claims_problems, consistency_problems
    from hardpoint_conformance.target import Target

    records = [record for record in installed().records(name) if record.name == name]
    backend = _of(records[0])
    try:
        target = Target.find(name, device)
    except ConfigError as error:
        return Examination(backend, problem=str(error), usage=True)
    except HardpointError as error:
        return Examination(
            backend, problem=str(error) + "\n" + records[0].traceback if records[0].traceback else str(error)
        )
    except BaseException as error:
        return Examination(backend, problem=f"its capabilities cannot be had: {error!r}\n{traceback.format_exc()}")
    found = target.device
    described = {
        "name": found.name,
        "index": found.index,
        "driver_version": found.driver_version,
        "total_memory": found.total_memory,
        "simulated": found.simulated,
    }
    problems = claims_problems(target.claims)
    if problems:
        return Examination(backend, described, problem="what it claims cannot be read: " + "; ".join(problems))
    contradictions = tuple(consistency_problems(target.claims))
    return Examination(backend, described, to_json(target.claims), target.unavailable, contradictions)


def main(name: str, device: str, file: str) -> None:
    """Write the examination as JSON, whole or not at all, and end without the tear-down of what was loaded."""
    gc.disable()
    data = json.dumps(asdict(examine_here(name, int(device))), default=str)
    part = Path(f"{file}.part")
    part.write_text(data, "utf-8")
    part.rename(file)
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
