"""One rank on the device."""

from __future__ import annotations

from hardpoint.worker import AcceleratorWorker


class RocmWorker(AcceleratorWorker):
    """Runs on one device through torch's module for CUDA, as torch's builds for ROCm call theirs."""

    _torch_module = "torch.cuda"
