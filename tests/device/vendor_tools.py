"""What a vendor's own tool says of the memory in use: an account that is neither the driver's nor ours."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

MIB = 1 << 20

SLACK = 64 * MIB
"""Bytes by which a tool may differ from a sleep, beside a share: contexts, page tables, whole MiB in what it prints."""
SHARE = 0.02
PATIENCE_SECONDS = 5.0
"""For a tool's count, which may lag."""

Parse = Callable[[str], list[int]]


def nvidia_smi(output: str) -> list[int]:
    """Read `--query-gpu=memory.used --format=csv,noheader,nounits`: a line with MiB for each device."""
    return [int(line) * MIB for line in output.splitlines() if line.strip()]


def amd_smi(output: str) -> list[int]:
    """Read `metric --mem-usage --json`: a list of devices, below `gpu_data` in later releases, after warnings in some."""
    start = min(place for mark in "[{" if (place := output.find(mark)) >= 0)
    found = json.loads(output[start:])
    devices = found["gpu_data"] if isinstance(found, dict) else found
    return [int(device["mem_usage"]["used_vram"]["value"]) * MIB for device in devices]


def rocm_smi(output: str) -> list[int]:
    """Read `--showmeminfo vram --json`: bytes as text for each card, beside entries that are no cards."""
    found = json.loads(output[output.index("{") :])
    key = "VRAM Total Used Memory (B)"
    return [int(card[key]) for name, card in found.items() if name.startswith("card")]


_CHIP = re.compile(r"^\|\s*\d+(?:\s+\d+)?\s*\|\s*[0-9A-Fa-f]{4}:[0-9A-Fa-f]{2}:\S+\s*\|.*?(\d+)\s*/\s*\d+\s*\|\s*$")


def npu_smi(output: str) -> list[int]:
    """Read `info`: a table with two lines for each chip; the second has its bus address and ends with "used / total" MiB of its HBM."""
    return [int(found[1]) * MIB for line in output.splitlines() if (found := _CHIP.match(line))]


TOOLS: dict[str, Sequence[tuple[Sequence[str], Parse]]] = {
    "cuda": [(("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"), nvidia_smi)],
    "rocm": [
        (("amd-smi", "metric", "--mem-usage", "--json"), amd_smi),
        (("rocm-smi", "--showmeminfo", "vram", "--json"), rocm_smi),
    ],
    "ascend": [(("npu-smi", "info"), npu_smi)],
}
"""By backend: commands, the first of which that runs is asked, and what reads their output."""


class NoTool(Exception):
    """There is no tool that could be asked; the text says why."""


@dataclass(frozen=True)
class Use:
    """Bytes in use by a tool's account.

    Attributes:
        tool: its name.
        devices: bytes for each device that the tool lists, in its order, which need not be the driver's.
    """

    tool: str
    devices: Sequence[int]

    @classmethod
    def now(cls, backend: str) -> Use:
        """Ask a backend's tool; raises NoTool where none can be asked, ValueError for output that cannot be read."""
        missing = []
        for command, parse in TOOLS.get(backend, ()):
            if shutil.which(command[0]) is None:
                missing.append(f"{command[0]} is not there")
                continue
            ended = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
            if ended.returncode:
                said = (ended.stderr or ended.stdout).strip().splitlines()
                missing.append(f"{command[0]} ended with status {ended.returncode}{f': {said[-1]}' if said else ''}")
                continue
            try:
                devices = parse(ended.stdout)
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"the output of {' '.join(command)} cannot be read ({error!r}):\n{ended.stdout}"
                ) from error
            if not devices:
                raise ValueError(f"{' '.join(command)} lists no device:\n{ended.stdout}")
            return cls(command[0], devices)
        raise NoTool("; ".join(missing) or f"backend '{backend}' has no vendor's tool")

    def freed_until(self, later: Use, count: int = 1) -> int:
        """Return the bytes by which the use of the `count` devices that changed most has fallen; negative where it has risen."""
        changes = [before - after for before, after in zip(self.devices, later.devices, strict=True)]
        return sum(sorted(changes, key=abs)[-count:])


def check_freed(before: Use, freed: int, now: Callable[[], Use], count: int = 1) -> int:
    """Compare what a sleep says it freed with what the tool says, which may lag; returns the tool's bytes.

    Args:
        before: the tool's account before the sleep.
        freed: by the sleep; negative for a wake, which takes.
        count: devices that the engine sleeps on.
    """
    tolerance, end = SLACK + int(abs(freed) * SHARE), time.monotonic() + PATIENCE_SECONDS
    while True:
        seen = before.freed_until(now(), count)
        if abs(seen - freed) <= tolerance:
            return seen
        assert time.monotonic() < end, (
            f"{before.tool} says that {seen / MIB:.0f} MiB were freed, and the sleep {freed / MIB:.0f} MiB"
        )
        time.sleep(0.1)
