"""Paged attention and the operators of rows in Triton, for every device that Triton compiles for and for its interpreter.

What belongs here: the kernels, how their work is divided and how large their tiles are, the attention backend over them, and what a backend
with them claims, from facts about a device or its platform and without the name of one. Backends derive their attention from
`TritonAttention`. Nothing here imports triton, which is optional, before an attention is made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hardpoint.triton.capabilities import triton_attention_capabilities

if TYPE_CHECKING:
    from hardpoint.triton.attention import TritonAttention
    from hardpoint.triton.operators import TritonKernels

__all__ = ["TritonAttention", "TritonKernels", "triton_attention_capabilities"]


def __getattr__(name: str) -> Any:
    # Descriptors import this package for the claims, and must not cost the import of torch.
    if name == "TritonAttention":
        from hardpoint.triton.attention import TritonAttention

        return TritonAttention
    if name == "TritonKernels":
        from hardpoint.triton.operators import TritonKernels

        return TritonKernels
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
