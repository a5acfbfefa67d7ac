"""How many KV blocks an engine has, on the device and below it, or what to change where there is no room."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hardpoint.engine.config import EngineConfig
from hardpoint.interfaces.batch import EmbeddingKind
from hardpoint.interfaces.errors import CapabilityRefused, ConfigError, KVCacheTooSmall
from hardpoint.interfaces.worker import MemoryProfile, ModelInfo


@dataclass(frozen=True)
class KVCacheSize:
    """The KV blocks of an engine.

    Attributes:
        block_bytes: of a block, on all ranks together.
        num_device_blocks: those that steps compute with.
        num_host_blocks: those of preempted sequences.
        num_tier_host_blocks, num_tier_disk_blocks: evicted ones that the host and the disk keep for the prefix cache.
    """

    block_bytes: int
    num_device_blocks: int
    num_host_blocks: int
    num_tier_host_blocks: int
    num_tier_disk_blocks: int


def kv_cache_size(
    config: EngineConfig, models: Sequence[ModelInfo], profiles: Sequence[MemoryProfile], *, accelerator: bool
) -> KVCacheSize:
    """Return how many KV blocks to allocate.

    Args:
        models, profiles: of each rank.
        accelerator: the device has memory of its own; all ranks and engines share that of the host.

    Raises:
        KVCacheTooSmall: one request of the longest context does not fit.
        CapabilityRefused: evicted blocks of such a model cannot be kept.
        ConfigError: there is no room for one of them.
    """
    if not accelerator:
        profiles = [_share(profile, len(profiles) * config.data_parallel_size) for profile in profiles]
    num_blocks = min(_num_device_blocks(config, *rank) for rank in zip(profiles, models, strict=True))
    block_bytes = sum(one.block_bytes for one in models)
    # A preempted sequence loses its recurrent state and is computed from its first token: swapped blocks would be of no use.
    swapped = block_bytes and not models[0].state_bytes
    num_host = min(int(config.swap_space * (1 << 30)) // block_bytes, num_blocks) if swapped else 0
    return KVCacheSize(block_bytes, num_blocks, num_host, *_num_tier_blocks(config, models[0], block_bytes))


def _num_device_blocks(config: EngineConfig, profile: MemoryProfile, model: ModelInfo) -> int:
    spec = model.attention.kv_cache
    if config.num_device_blocks is not None:
        return config.num_device_blocks
    num_groups = len(model.kv_group_windows)
    needed = num_groups * -(-model.max_model_len // spec.block_size)
    if spec.block_bytes == 0:
        # Blocks without bytes cost nothing: there are enough for every sequence at full length.
        return needed * config.max_num_seqs
    kv_bytes = profile.kv_bytes
    if EmbeddingKind.IMAGE in model.embedding_kinds:
        kv_bytes -= config.encoder_cache_bytes
    num_blocks = kv_bytes // model.block_bytes
    if num_blocks < needed:
        raise _too_small(profile, model, needed, max(num_blocks, 0) // num_groups * spec.block_size)
    return int(num_blocks)


def _num_tier_blocks(config: EngineConfig, model: ModelInfo, block_bytes: int) -> tuple[int, int]:
    """Return how many evicted blocks the host and the disk keep."""
    if not config.kv_offload_gib:
        return 0, 0
    reasons = []
    if model.state_bytes:
        reasons.append("it keeps recurrent states, so that its prefixes are not cached")
    if block_bytes == 0:
        reasons.append("it has no KV cache")
    if model.kv_group_windows != (0,):
        reasons.append(f"its KV cache groups have the windows {list(model.kv_group_windows)}")
    if reasons:
        raise CapabilityRefused(
            f"kv_offload_gib cannot be had with {model.architecture}",
            reasons,
            hint="Leave kv_offload_gib out, or where windows are the reason set disable_hybrid_kv_cache_manager",
        )
    num_host, num_disk = (
        int(size * (1 << 30)) // block_bytes for size in (config.kv_offload_gib, config.kv_offload_disk_gib)
    )
    if not num_host or (config.kv_offload_disk_gib and not num_disk):
        raise ConfigError(
            "there is no room for one evicted KV block",
            found=f"kv_offload_gib={config.kv_offload_gib}, kv_offload_disk_gib={config.kv_offload_disk_gib}, of {block_bytes} bytes",
            hint="Give more, or leave it out",
        )
    return num_host, num_disk


def _too_small(profile: MemoryProfile, model: ModelInfo, num_blocks: int, fits: int) -> KVCacheTooSmall:
    """Return what is said where the KV cache of one request needs `num_blocks`, and there is room for one of `fits` tokens."""
    needed = num_blocks * model.block_bytes
    enough = math.ceil(1000 * (profile.utilization + (needed - profile.kv_bytes) / profile.total)) / 1000
    others = [f"lower max_model_len (at most {fits} fits)"] if fits else []
    others += ["lower max_num_batched_tokens or max_num_seqs"] if profile.peak > profile.current else []
    last = (
        f"raise memory_utilization to {enough} or more"
        if enough <= 1
        else "choose a smaller or quantised checkpoint or more ranks, or free memory of the device"
    )
    left = f"{profile.kv_bytes} bytes are left" if profile.kv_bytes > 0 else f"{-profile.kv_bytes} bytes are missing"
    return KVCacheTooSmall.of(
        f"one request of {model.max_model_len} tokens needs {needed} bytes of KV cache, beside {model.weight_bytes} bytes of weights",
        (
            f"{left} of {profile.total} at a memory utilisation of {profile.utilization} ({profile.used} in use,"
            f" {profile.peak - profile.current} for the largest step, {profile.graphs} for captured steps)"
        ),
        others,
        last,
        enough if enough <= 1 else None,
    )


def _share(profile: MemoryProfile, ranks: int) -> MemoryProfile:
    """Return the profile of one of several ranks in the same memory, of one engine or more: its part of what may be used there."""
    limit = profile.kv_limit
    return replace(profile, total=profile.total // ranks, kv_limit=None if limit is None else limit // ranks)
