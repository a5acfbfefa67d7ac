"""Captured steps on the device: CUDA graphs."""

from __future__ import annotations

import torch

from hardpoint.worker import TorchGraphRunner


class CudaGraphRunner(TorchGraphRunner):
    """Graphs of torch's module for CUDA."""

    _torch_module = "torch.cuda"
    _graph_class = "CUDAGraph"

    def _forget_workspaces(self) -> None:
        # Kept by torch for each stream, the capture's among them, and taken from the pool that was in effect.
        torch._C._cuda_clearCublasWorkspaces()
