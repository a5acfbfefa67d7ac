"""FlashInfer's attention kernels over the cache of Triton's: the wrappers that plan and run them, and the trial that chooses between both.

What belongs here: everything that calls FlashInfer or knows its rules. FlashInfer is optional: `signatures` reads what is installed from
its source, and nothing is imported before an attention plans. All this stands in the backend and not in the core beside `hardpoint.triton`:
the core names no device, and FlashInfer does, down to its arguments.
"""

from __future__ import annotations

from hardpoint_cuda.flashinfer.claims import flashinfer_attention_capabilities
from hardpoint_cuda.flashinfer.signatures import flashinfer_obstacle, flashinfer_version

FLASHINFER = "flashinfer"
"""Its name among the kernels that can be chosen."""

__all__ = ["FLASHINFER", "flashinfer_attention_capabilities", "flashinfer_obstacle", "flashinfer_version"]
