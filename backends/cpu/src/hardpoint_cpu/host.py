"""Facts about the host: its processor's name and its memory, container limits included."""

from __future__ import annotations

import contextlib
import os
import platform
from pathlib import Path


def cpu_name() -> str:
    """Return the processor's name and how many of its cores this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return f"{_model_name()}, {cores} core{'s' if cores != 1 else ''}"


def total_memory() -> int:
    """Return the bytes of memory that this process may use: the host's, or its control group's limit if that is less."""
    return min(_meminfo("MemTotal"), *_cgroup("memory.max", "memory/memory.limit_in_bytes"))


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


def _meminfo(key: str) -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name == key:
                return int(value.split()[0]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _cgroup(*names: str) -> tuple[int, ...]:
    """Return the first readable number among the control-group files of this process (version 2, then 1), if any."""
    for name in names:
        try:
            text = (Path("/sys/fs/cgroup") / name).read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            return (int(text),)
    return ()
