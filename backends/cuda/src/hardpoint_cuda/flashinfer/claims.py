"""What FlashInfer's kernels claim; the conformance suite proves it on a device, with HARDPOINT_ATTENTION=flashinfer."""

from __future__ import annotations

from dataclasses import replace

from hardpoint.interfaces import AttentionCapabilities, AttentionFeature, Determinism, DType, GraphLevel, IntSet
from hardpoint.triton import triton_attention_capabilities

_DTYPES = frozenset({DType.FLOAT16, DType.BFLOAT16})
_NEVER = frozenset({AttentionFeature.SINKS, AttentionFeature.ALIBI})
"""Sinks need other modules of FlashInfer's, and its ALiBi takes its own slopes and not a model's."""


def flashinfer_attention_capabilities() -> AttentionCapabilities:
    """Return what is served by FlashInfer, within what Triton's kernels do, whose cache it reads.

    Head dimensions are those of its table of instances (DISPATCH_HEAD_DIM) up to 256. Results depend on the batch: tiles and splits do.
    Its wrappers for prompts are planned for a step's lengths, so that decodes alone are captured.
    """
    claims = triton_attention_capabilities()
    return replace(
        claims,
        dtypes=_DTYPES,
        kv_dtypes={dtype: claims.kv_dtypes[dtype] for dtype in sorted(_DTYPES)},
        head_dims=IntSet.of(64, 128, 256),
        features=claims.features - _NEVER,
        graph_level=GraphLevel.UNIFORM_DECODE,
        determinism=Determinism.RUN_TO_RUN,
    )
