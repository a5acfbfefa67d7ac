"""The Ascend backend's collectives: HCCL."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from hardpoint.worker.ranks import TorchCollectives

if TYPE_CHECKING:
    from torch.distributed import Store


class AscendCollectives(TorchCollectives):
    """Ranks on devices, over torch_npu's process group; devices meet at the first operation."""

    def _make_group(self, store: Store, rank: int, size: int, timeout: timedelta, host: str) -> Any:
        from torch_npu._C._distributed_c10d import ProcessGroupHCCL

        options = ProcessGroupHCCL.Options()
        options._timeout = timeout
        options.global_ranks_in_group = list(range(size))
        return ProcessGroupHCCL(store, rank, size, options)
