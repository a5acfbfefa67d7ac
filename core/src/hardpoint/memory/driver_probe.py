"""Asking a vendor's driver which devices there are, without letting the driver into this process.

Starting a driver has lasting effects: forked children can no longer use it, some can be initialised only once in a process, and
a bad installation may hang or abort. So a short-lived interpreter (`-I -S`: no site packages, tens of milliseconds) opens the
library and answers as JSON. Its end, however it comes, costs this process nothing.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hardpoint.interfaces import Device, ProbeResult
from hardpoint.interfaces.errors import BackendBroken, DriverError

TIME_LIMIT = 8.0
"""Seconds that a driver may take; less than discovery allows a probe, so that the error says what hung."""


@dataclass(frozen=True)
class DriverDevice:
    """One device as its driver describes it; `total_memory` in bytes, 0 when not known."""

    name: str
    total_memory: int = 0
    properties: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Inventory:
    """A driver's devices.

    Attributes:
        reason: why there are none.
        library: path of the driver library.
        simulated: the driver is a simulation.
    """

    devices: tuple[DriverDevice, ...] = ()
    driver_version: str = ""
    reason: str = ""
    library: str = ""
    simulated: bool = False

    def as_devices(self, backend: str, torch_type: str) -> tuple[Device, ...]:
        """Return the devices as the contract describes them; torch knows device i as `torch_type:i`."""
        return tuple(
            Device(
                backend=backend,
                index=index,
                name=device.name,
                torch_device=f"{torch_type}:{index}",
                total_memory=device.total_memory,
                driver_version=self.driver_version,
                simulated=self.simulated,
                properties={"library": self.library, **device.properties},
            )
            for index, device in enumerate(self.devices)
        )


def probe_devices(
    script: Path,
    variable: str,
    sonames: Sequence[str],
    *,
    backend: str,
    torch_type: str,
    obstacles: Callable[[Device], tuple[str, ...]],
) -> ProbeResult:
    """Look for a vendor's driver and its devices, in a process of its own; see `query_devices` for arguments and errors.

    Devices on which nothing can be computed are listed, with the reasons: their memory works.

    Args:
        torch_type: torch knows device i as `torch_type:i`.
        obstacles: why nothing can be computed on a device, one sentence each.
    """
    inventory = query_devices(script, variable, sonames)
    devices = inventory.as_devices(backend, torch_type)
    reasons = [obstacles(device) for device in devices]
    return ProbeResult(devices, inventory.reason or ("; ".join(reasons[0]) if all(reasons) else ""))


def query_devices(script: Path, variable: str, sonames: Sequence[str], time_limit: float = TIME_LIMIT) -> Inventory:
    """Return the devices of the driver that an environment variable or the usual names lead to.

    Args:
        script: the backend's file with `inventory` and `describe` (see `hardpoint.memory.driver_library.answer`);
            standard library only.
        variable: environment variable with the path of the library.
        sonames: usual names of the library, best first.
        time_limit: seconds.

    Raises:
        DriverError: a driver call failed.
        BackendBroken: the library cannot be used, or the driver hung or crashed.
    """
    child = Path(__file__).with_name("driver_library.py")
    command = [sys.executable, "-I", "-S", str(child), str(script), variable, *sonames]
    wanted = f"the driver was asked for its devices ({variable}, {', '.join(sonames)})"
    try:
        ended = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=time_limit, errors="replace"
        )
    except subprocess.TimeoutExpired:
        raise BackendBroken(wanted, found=f"it did not answer within {time_limit:g} s") from None
    if ended.returncode or not ended.stdout:
        raise BackendBroken(wanted, found=_ending(ended.returncode, ended.stderr))
    answer: dict[str, Any] = json.loads(ended.stdout)
    if "unusable" in answer:
        raise BackendBroken(wanted, found=answer["unusable"])
    if "call" in answer:
        raise DriverError(answer["call"], answer["status"], answer["text"])
    devices = tuple(DriverDevice(**device) for device in answer.pop("devices"))
    return Inventory(devices, **answer)


def _ending(code: int, output: str) -> str:
    last = output.strip().splitlines()[-1:]
    ending = f"it was ended by {signal.Signals(-code).name}" if code < 0 else f"it ended with code {code}"
    return ": ".join([ending, *last])
