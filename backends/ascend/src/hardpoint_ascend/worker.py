"""The worker of the Ascend backend: the core's for accelerators."""

from __future__ import annotations

from typing import ClassVar

from hardpoint.worker import AcceleratorWorker


class AscendWorker(AcceleratorWorker):
    """Runs on one device through torch_npu."""

    _torch_module: ClassVar[str] = "torch_npu.npu"
