"""The worker of the Ascend backend: the core's, with what differs on the device."""

from __future__ import annotations

from hardpoint.worker import TorchWorker


class AscendWorker(TorchWorker):
    """Runs on one device through torch_npu."""
