"""Device graphs of torch_npu.

Attention does not claim them (see `capabilities`): its operator takes the lengths of sequences as numbers on the host, which a graph keeps
as they were when it was captured. They are there for work without attention.
"""

from __future__ import annotations

from typing import ClassVar

from hardpoint.worker import TorchGraphRunner


class AscendGraphRunner(TorchGraphRunner):
    """Graphs of torch_npu's `NPUGraph`."""

    _torch_module: ClassVar[str] = "torch_npu.npu"
    _graph_class: ClassVar[str] = "NPUGraph"
