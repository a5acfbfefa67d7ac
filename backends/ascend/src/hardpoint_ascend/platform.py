"""What differs on an Ascend device: torch's module for it comes with torch_npu."""

from __future__ import annotations

from typing import Any

from hardpoint.worker import TorchPlatform


class AscendPlatform(TorchPlatform):
    """A device that torch_npu adds to torch."""

    def _module(self) -> Any:
        import torch_npu

        return torch_npu.npu
