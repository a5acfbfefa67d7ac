"""Communication between the ranks of one model: RCCL."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from hardpoint.interfaces.errors import CapabilityRefused
from hardpoint.worker.collectives import TorchCollectives, insist_on

if TYPE_CHECKING:
    from torch.distributed import Store


_REGISTRATION = (
    "RCCL would map what captured steps reduce into the other ranks' processes, which would still read that memory after a sleep has "
    "given it back"
)


class RocmCollectives(TorchCollectives):
    """Ranks on devices of one or several machines; torch's builds for ROCm give RCCL the names of NCCL."""

    def _make_group(self, store: Store, rank: int, size: int, timeout: timedelta, host: str) -> Any:
        if not distributed.is_nccl_available():
            raise CapabilityRefused(
                f"{size} ranks of backend 'rocm' cannot be joined",
                [f"torch {torch.__version__} is built without RCCL"],
                hint="Install torch's build for ROCm, or run one rank",
            )
        insist_on("NCCL_GRAPH_REGISTER", "0", because=_REGISTRATION)
        options = distributed.ProcessGroupNCCL.Options()
        options._timeout = timeout
        group = distributed.ProcessGroupNCCL(store, rank, size, options)
        group.bound_device_id = torch.device(self._device.torch_device)
        return group
