"""What the kernels claim. The conformance suite proves it, on a device and in Triton's interpreter."""

from __future__ import annotations

from hardpoint.interfaces.capabilities import AttentionCapabilities, AttentionFeature, Determinism, GraphLevel, IntSet
from hardpoint.interfaces.dtypes import DType

_HALF = frozenset({DType.FLOAT16, DType.BFLOAT16})
_DTYPES = _HALF | {DType.FLOAT32}
MAX_CONTEXT = 1 << 20


def triton_attention_capabilities(graph_level: GraphLevel = GraphLevel.MIXED) -> AttentionCapabilities:
    """Return what `TritonAttention` does on any device that Triton compiles for.

    Args:
        graph_level: NONE where the device captures no graphs.
    """
    return AttentionCapabilities(
        dtypes=_DTYPES,
        kv_dtypes={d: frozenset({d, DType.FLOAT8_E4M3}) if d in _HALF else frozenset({d}) for d in sorted(_DTYPES)},
        head_dims=IntSet.between(16, 256, multiple_of=16),
        block_sizes=IntSet.of(16, 32, 64, 128),
        default_block_size=32,
        group_sizes=IntSet.between(1, 64),
        max_context=MAX_CONTEXT,
        features=frozenset(
            {
                AttentionFeature.SLIDING_WINDOW,
                AttentionFeature.SOFT_CAP,
                AttentionFeature.SINKS,
                AttentionFeature.ALIBI,
                AttentionFeature.CHUNKED_PREFILL,
                AttentionFeature.MIXED_BATCH,
                AttentionFeature.FP8_KV_SCALES,
            }
        ),
        graph_level=graph_level,
        determinism=Determinism.BATCH_INVARIANT,
    )
