"""What an engine says of itself: what it turned out to be, and what it has done."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hardpoint.engine.adapters import AdapterStats
from hardpoint.engine.sleep import SleepTotals


@dataclass(frozen=True)
class EngineInfo:
    """What an engine turned out to be; sizes in bytes, times in seconds.

    Attributes:
        path: how the model runs: "fused" (one native call per step), "modules" (the core's torch decoder) or "transformers".
        weight_bytes, kv_bytes: of all ranks and engines together; so are the numbers of blocks, of all engines.
        weight_formats: how many of the weights' matrices, of all ranks and engines, are stored in which format of blocks or dtype.
        accelerator: the device has memory of its own; False where it is the host's.
        notice: one line where a backend of higher priority was passed over; logged as a warning when the first engine is made on a machine.
    """

    backend: str
    device: str
    simulated: bool
    model: str
    architecture: str
    dtype: str
    path: str
    max_model_len: int
    block_size: int
    num_device_blocks: int
    num_host_blocks: int
    weight_bytes: int
    kv_bytes: int
    load_seconds: float
    accelerator: bool = False
    notice: str = ""
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    weight_formats: Mapping[str, int] = field(default_factory=dict)

    @property
    def num_ranks(self) -> int:
        """How many ranks share the model; of one engine, where there are several."""
        return self.tensor_parallel_size * self.pipeline_parallel_size


@dataclass(slots=True)
class StepTotals:
    """Tokens and seconds since the engine was made; a step with any prompt token counts as prefill.

    Attributes:
        prefill_tokens, prefill_seconds: prompt tokens computed, and the time of steps that had any.
        decode_tokens, decode_seconds: tokens sampled in, and the time of, steps that had no prompt token.
        sampled_tokens: all tokens sampled.
        preemptions: sequences preempted.
        sleep: what sleeps and wakes did.
    """

    steps: int = 0
    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0
    sampled_tokens: int = 0
    preemptions: int = 0
    sleep: SleepTotals = field(default_factory=SleepTotals)


@dataclass(frozen=True)
class EngineStats:
    """Counters since the engine was made; see StepTotals for the first ones.

    Attributes:
        drafts, draft_tokens, accepted_tokens: of speculative decoding: sequences in steps with guesses at their next tokens, these
            guesses, and those that were right.
        prefix_queries, prefix_hits: prompt tokens looked up in, and found in, the prefix cache.
        blocks_used, blocks_free, blocks_cached: device blocks; those cached hold reusable prefixes, in use or free.
        sleep: what sleeps and wakes did.
        running, waiting, swapped: sequences now.
        offload_host_blocks, offload_disk_blocks, offload_host_bytes, offload_disk_bytes: evicted blocks that the tiers below the prefix
            cache hold, of all ranks together.
        offload_queries, offload_host_hits, offload_disk_hits: blocks of prompts that were looked up there, and found.
        offload_stores, offload_demotions, offload_evictions: blocks that went to the host, from there to the disk, and out of the tiers.
        offload_failures, offload_checksum_failures, offload_io_errors: blocks found that could not be loaded, and were computed; blocks
            that were damaged; reads and writes of the disk that failed.
        offload_seconds: that the slowest rank's host has spent on copies.
        adapters: LoRA adapters.
    """

    steps: int
    prefill_tokens: int
    prefill_seconds: float
    decode_tokens: int
    decode_seconds: float
    sampled_tokens: int
    preemptions: int
    prefix_queries: int
    prefix_hits: int
    blocks_used: int
    blocks_free: int
    blocks_cached: int
    sleep: SleepTotals = field(default_factory=SleepTotals)
    running: int = 0
    waiting: int = 0
    swapped: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    offload_host_blocks: int = 0
    offload_disk_blocks: int = 0
    offload_host_bytes: int = 0
    offload_disk_bytes: int = 0
    offload_queries: int = 0
    offload_host_hits: int = 0
    offload_disk_hits: int = 0
    offload_stores: int = 0
    offload_demotions: int = 0
    offload_evictions: int = 0
    offload_failures: int = 0
    offload_checksum_failures: int = 0
    offload_io_errors: int = 0
    offload_seconds: float = 0.0
    adapters: AdapterStats = field(default_factory=AdapterStats)
