"""What the kernels claim. The conformance suite proves it, on a device and in Triton's interpreter."""

from __future__ import annotations

import os
from collections.abc import Mapping

from hardpoint.interfaces.capabilities import AttentionCapabilities, AttentionFeature, Determinism, GraphLevel, IntSet
from hardpoint.interfaces.dtypes import DType
from hardpoint.interfaces.errors import ConfigError

_HALF = frozenset({DType.FLOAT16, DType.BFLOAT16})
_DTYPES = _HALF | {DType.FLOAT32}
MAX_CONTEXT = 1 << 20
GRAPHS_VARIABLE = "HARDPOINT_MIXED_GRAPHS"
"""1 has steps with prompts captured, too. Not by default: no hardware has run them yet."""


def wanted_graphs(environment: Mapping[str, str] = os.environ) -> GraphLevel:
    """Return which steps are to be captured; raises ConfigError for a setting that is neither 0 nor 1."""
    asked = environment.get(GRAPHS_VARIABLE, "")
    if asked not in ("", "0", "1"):
        raise ConfigError(
            f"{GRAPHS_VARIABLE}={asked} was asked for",
            found="it is 1 to capture steps with prompts, and 0 not to",
            hint=f"Set {GRAPHS_VARIABLE} to 1 or 0, or unset it",
        )
    return GraphLevel.MIXED if asked == "1" else GraphLevel.UNIFORM_DECODE


def triton_attention_capabilities(graph_level: GraphLevel | None = None) -> AttentionCapabilities:
    """Return what `TritonAttention` does on any device that Triton compiles for.

    Args:
        graph_level: NONE where the device captures no graphs; by default what `wanted_graphs` says.
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
        graph_level=wanted_graphs() if graph_level is None else graph_level,
        determinism=Determinism.BATCH_INVARIANT,
    )
