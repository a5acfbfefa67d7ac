"""Captured steps on the device: HIP graphs."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import torch

from hardpoint.worker import TorchGraphRunner

if TYPE_CHECKING:
    from hardpoint.memory import TorchGraphPool


class RocmGraphRunner(TorchGraphRunner):
    """Graphs of torch's module, which its builds for ROCm call as those for CUDA do."""

    _torch_module = "torch.cuda"
    _graph_class = "CUDAGraph"

    def _forget_capture(self, memory: TorchGraphPool) -> None:
        # Torch gives up at the first call that fails: later captures would ask this one, which is gone, for each allocation.
        with suppress(RuntimeError):  # it had come to that
            torch._C._cuda_endAllocateToPool(self._index, memory.id)
        if memory.users() > 1 + len(self._graphs):
            torch._C._cuda_releasePool(self._index, memory.id)

    def _forget_workspaces(self) -> None:
        # Kept by torch for each stream, the capture's among them, and taken from the pool that was in effect.
        torch._C._cuda_clearCublasWorkspaces()
