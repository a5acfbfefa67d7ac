"""Facts about the host: its processor's name and its memory, container limits included."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Iterator
from pathlib import Path, PurePath


def cpu_name() -> str:
    """Return the processor's name and how many of its cores this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return f"{_model_name()}, {cores} core{'s' if cores != 1 else ''}"


def total_memory(root: Path = Path("/")) -> int:
    """Return the bytes of memory that this process may use: the host's, or the tightest limit of its control groups.

    It is what `total_memory` of `hardpoint/host_memory.hpp` returns, for a probe that loads nothing native.

    Args:
        root: the folder in which /proc and /sys are; tests give another.
    """
    return min([_meminfo(root), *_group_limits(root)])


def resident() -> int:
    """Return the bytes of this process that are in memory."""
    return _status("VmRSS")


def peak_resident() -> int:
    """Return the most bytes of this process that were in memory, since the last reset if the kernel allows resets."""
    return _status("VmHWM")


def reset_peak_resident() -> None:
    """Start `peak_resident` anew (proc(5), clear_refs); without the right to do so the peak stays, which errs on the safe side."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0]) * 1024
    return 0


def _model_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _meminfo(root: Path) -> int:
    try:
        for line in (root / "proc/meminfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name == "MemTotal":
                return int(value.split()[0]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _group_limits(root: Path) -> Iterator[int]:
    """Yield the limits of the process's control groups and of those above them; in a container only the root may be there to be read."""
    try:
        lines = (root / "proc/self/cgroup").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return
    for line in lines:
        # "0::/path" in version 2; "4:memory:/path" in version 1, which may mount several controllers as one.
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if not path or (controllers and "memory" not in controllers.split(",")):
            continue
        folder, name = ("memory", "memory.limit_in_bytes") if controllers else ("", "memory.max")
        group = PurePath(path)
        for one in (group, *group.parents):
            with contextlib.suppress(OSError):
                text = (root / "sys/fs/cgroup" / folder / str(one).lstrip("/") / name).read_text().strip()
                if text.isdigit():
                    yield int(text)
