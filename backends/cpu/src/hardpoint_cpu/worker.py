"""The worker of the CPU backend: the core's, with what differs on a host processor."""

from __future__ import annotations

from hardpoint.worker import TorchWorker


class CpuWorker(TorchWorker):
    """Runs on the host: memory is shared with everything else there, so it takes a smaller share by default."""

    _default_memory_utilization = 0.4
