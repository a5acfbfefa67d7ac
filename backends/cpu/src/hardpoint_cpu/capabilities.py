"""What the CPU backend claims. The conformance suite proves it."""

from __future__ import annotations

from hardpoint.interfaces.backend import Device
from hardpoint.interfaces.capabilities import (
    AttentionCapabilities,
    AttentionFeature,
    Capabilities,
    Determinism,
    IntSet,
    MemoryCapabilities,
    SleepTier,
    TorchPoolScope,
)
from hardpoint.interfaces.dtypes import DType

_DTYPES = frozenset({DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16})


def capabilities(device: Device) -> Capabilities:
    """Return what this backend does on the host's processor."""
    return Capabilities(
        attention=AttentionCapabilities(
            dtypes=_DTYPES,
            kv_dtypes={dtype: frozenset({dtype, DType.FLOAT8_E4M3}) for dtype in _DTYPES},
            head_dims=IntSet.between(8, 256, multiple_of=8),
            block_sizes=IntSet.of(8, 16, 32, 64, 128),
            default_block_size=32,
            group_sizes=IntSet.between(1, 128),
            max_context=1 << 20,
            features=frozenset(
                {
                    AttentionFeature.SLIDING_WINDOW,
                    AttentionFeature.SOFT_CAP,
                    AttentionFeature.SINKS,
                    AttentionFeature.ALIBI,
                    AttentionFeature.CHUNKED_PREFILL,
                    AttentionFeature.MIXED_BATCH,
                    AttentionFeature.BIDIRECTIONAL,
                    AttentionFeature.FP8_KV_SCALES,
                }
            ),
            determinism=Determinism.BATCH_INVARIANT,
        ),
        memory=MemoryCapabilities(
            sleep_levels=frozenset({0, 1, 2}),
            tiers=frozenset(SleepTier),
            elastic=True,
            torch_pool=TorchPoolScope.FACTORY_CALLS,
        ),
        tensor_parallel=IntSet.between(1, 8),
        collectives=("gloo",),
    )
