"""The CPU backend's collectives: gloo."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from torch.distributed import ProcessGroupGloo

from hardpoint.worker.collectives import TorchCollectives
from hardpoint.worker.meeting import local_address

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store


class CpuCollectives(TorchCollectives):
    """Ranks on hosts, over TCP."""

    def _make_group(self, store: Store, rank: int, size: int, timeout: timedelta, host: str) -> ProcessGroupGloo:
        options = ProcessGroupGloo._Options()
        # The interface that leads to the others; gloo's own choice is what the host's name resolves to, if it does.
        options._devices = [ProcessGroupGloo.create_device(hostname=local_address(host))]
        options._timeout = timeout
        options._threads = 1
        return ProcessGroupGloo(store, rank, size, options)
