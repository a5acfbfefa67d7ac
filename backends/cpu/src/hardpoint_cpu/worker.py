"""The worker of the CPU backend: the core's, with what differs on a host processor."""

from __future__ import annotations

from collections.abc import Callable

from hardpoint.worker import TorchWorker
from hardpoint_cpu import _native
from hardpoint_cpu.host import peak_resident, reset_peak_resident, resident


class CpuWorker(TorchWorker):
    """Runs on the host, whose memory belongs to everything else there too.

    By default it takes at most 40 % of the memory and 4 GiB for the KV cache, and counts only its own tensors as used: what
    other programs hold now is no measure of what this one may take, but what is free is. The thread pool is the process's:
    of several engines, the last one made sets its size. Ranks may be neighbours on one host, so that each has its part of the memory alone.
    """

    _default_memory_utilization = 0.4
    _default_kv_bytes = 4 << 30

    def _start_device(self) -> None:
        if self._config.threads is not None:
            _native.set_num_threads(self._config.threads)

    def _total_and_used(self) -> tuple[int, int]:
        info, own = self._allocator.memory_info(), self._allocator.stats().allocated
        ranks = self._config.world_size
        return min(info.total, own * ranks + info.free) // ranks, own

    def _peak_growth(self, step: Callable[[], object]) -> int:
        before = resident()
        reset_peak_resident()
        step()
        return max(peak_resident() - before, 0)
