"""FlashInfer's attention kernels over the cache of Triton's: the wrappers that plan and run them, and the trial that chooses between the two.

What belongs here: everything that calls FlashInfer or knows its rules. FlashInfer is optional: `signatures` reads what is installed from its
source, and nothing is imported before an attention plans. All this stands beside `hardpoint.triton` and not in the core, which names no
device, because FlashInfer does, down to its arguments.
"""

from __future__ import annotations

from hardpoint_cuda.flashinfer.claims import flashinfer_attention_capabilities
from hardpoint_cuda.flashinfer.signatures import flashinfer_obstacle

__all__ = ["flashinfer_attention_capabilities", "flashinfer_obstacle"]
