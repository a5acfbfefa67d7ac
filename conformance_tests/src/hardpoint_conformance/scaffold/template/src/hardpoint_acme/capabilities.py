"""What the backend claims for a device. The suite proves every claim, and that everything else is refused."""

from hardpoint.interfaces import Capabilities, Device, DType, IntSet, SleepTier, TorchPoolScope
from hardpoint.interfaces.capabilities import AttentionCapabilities, AttentionFeature, MemoryCapabilities

DTYPES = frozenset({DType.FLOAT32, DType.BFLOAT16})


def capabilities(device: Device) -> Capabilities:
    """Return the claims; what is not named here is refused with reasons."""
    attention = AttentionCapabilities(
        dtypes=DTYPES,
        kv_dtypes={dtype: frozenset({dtype}) for dtype in DTYPES},
        head_dims=IntSet.between(8, 256, multiple_of=8),
        block_sizes=IntSet.of(16, 32),
        default_block_size=16,
        group_sizes=IntSet.between(1, 64),
        max_context=1 << 17,
        features=frozenset({AttentionFeature.CHUNKED_PREFILL, AttentionFeature.MIXED_BATCH}),
    )
    levels, tiers = frozenset({0, 1, 2}), frozenset(SleepTier)
    return Capabilities(attention, MemoryCapabilities(levels, tiers, True, TorchPoolScope.FACTORY_CALLS))
