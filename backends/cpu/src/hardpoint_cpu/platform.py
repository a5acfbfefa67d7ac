"""What differs on a host processor: whose memory it is, and how much of it an engine may take."""

from __future__ import annotations

import os
from collections.abc import Callable

from hardpoint.interfaces import DeviceAllocator, Platform
from hardpoint.interfaces.errors import ConfigError
from hardpoint_cpu import _native
from hardpoint_cpu.host import peak_resident, reset_peak_resident, resident

_THREADS_VARIABLE = "HARDPOINT_CPU_THREADS"


class CpuPlatform(Platform):
    """The host, whose memory belongs to everything else there too.

    By default an engine takes at most 40 % of the memory and 4 GiB for the KV cache, and counts only its own tensors as used: what
    other programs hold now is no measure of what this one may take, but what is free is. The thread pool is the process's:
    of several engines, the last one made sets its size, and one with memory for fewer threads runs on these. Ranks may be neighbours on
    one host, so that each has its part of the memory alone.
    """

    memory_utilization = 0.4
    kv_bytes = 4 << 30

    def start(self, threads: int | None) -> None:
        """Set the size of the thread pool; raises ConfigError for one that it cannot have, also from the environment."""
        try:
            # The pool is made when it is first asked for, with as many threads as the environment says.
            _native.num_threads()
        except ValueError as error:
            raise ConfigError(
                f"{_THREADS_VARIABLE} must be an integer from 1 to 4096",
                found=f"'{os.environ.get(_THREADS_VARIABLE)}'",
                hint="Unset it for as many threads as there are cores that this process may run on",
            ) from error
        if threads is not None:
            try:
                _native.set_num_threads(threads)
            except ValueError as error:
                raise ConfigError(f"threads={threads} cannot be", found=str(error)) from error

    def total_and_used(self, allocator: DeviceAllocator, ranks: int) -> tuple[int, int]:
        """Return a rank's part of what is free or its own, and its own tensors."""
        info, own = allocator.memory_info(), allocator.stats().allocated
        return min(info.total, own * ranks + info.free) // ranks, own

    def peak_growth(self, step: Callable[[], object], allocator: DeviceAllocator) -> int:
        """Run `step` and return the growth of the process's resident memory at its peak."""
        before = resident()
        reset_peak_resident()
        step()
        return max(peak_resident() - before, 0)
