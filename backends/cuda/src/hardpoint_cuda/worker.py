"""One rank on the device."""

from __future__ import annotations

from hardpoint.worker import AcceleratorWorker


class CudaWorker(AcceleratorWorker):
    """Runs on one device through torch's module for CUDA."""

    _torch_module = "torch.cuda"
