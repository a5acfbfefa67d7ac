"""Settings of the scheduler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hardpoint.interfaces.errors import ConfigError


@dataclass(frozen=True)
class SchedulerConfig:
    """What the scheduler may use, and how it decides.

    Attributes:
        block_size: tokens per KV block.
        num_device_blocks, num_host_blocks: sizes of the block pools.
        max_num_seqs: most sequences running at once; forks count from the admission of their prompt.
        max_num_batched_tokens: token budget of a step; at least `max_num_seqs`, so that every running sequence can decode.
        max_model_len: most tokens of a sequence, prompt included.
        enable_prefix_caching: reuse computed blocks of equal prefixes.
        enable_chunked_prefill: a prompt may be computed in several steps. Without it the budget must hold the longest prompt.
        long_prefill_token_threshold: longest chunk of one prompt in a step, so that several prompts and all decodes share a
            step; 0 for no limit but the budget.
        watermark: share of the device blocks that admission leaves free.
        preemption_mode: "swap" wherever the host pool has room, "recompute", or "auto": whichever costs less time.
        swap_seconds_per_block, recompute_seconds_per_token: the costs that "auto" compares (a swap moves a block twice);
            with both unknown (0) it recomputes.
        policy: "fcfs" by arrival, "priority" by priority (lower first), then arrival.
        steps_in_flight: steps that may be planned beyond the oldest one that was not booked.
        num_lookahead_slots: slots kept ready behind each decoding sequence.
        fairness_bound: a waiting request that was passed over so many times by later ones, or a sequence that was preempted
            so many times, goes before all others that were not.
        vocab_size: token ids are checked against it; 0 checks only that they fit int32.
        hash_bits: bits of the prefix hash in use. A hit is verified in full, so fewer only cost time; for tests.

    Raises:
        ConfigError: a value is impossible, or contradicts another.
    """

    block_size: int
    num_device_blocks: int
    num_host_blocks: int = 0
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_model_len: int = 2048
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    watermark: float = 0.01
    preemption_mode: Literal["auto", "swap", "recompute"] = "auto"
    swap_seconds_per_block: float = 0.0
    recompute_seconds_per_token: float = 0.0
    policy: Literal["fcfs", "priority"] = "fcfs"
    steps_in_flight: int = 0
    num_lookahead_slots: int = 0
    fairness_bound: int = 8
    vocab_size: int = 0
    hash_bits: int = 64

    def __post_init__(self) -> None:
        for name in ("block_size", "num_device_blocks", "max_num_seqs", "max_num_batched_tokens", "fairness_bound"):
            self._require(getattr(self, name) >= 1, name, "must be at least 1")
        for name in (
            "num_host_blocks",
            "long_prefill_token_threshold",
            "steps_in_flight",
            "num_lookahead_slots",
            "vocab_size",
            "swap_seconds_per_block",
            "recompute_seconds_per_token",
        ):
            self._require(getattr(self, name) >= 0, name, "must not be negative")
        self._require(self.max_model_len >= 2, "max_model_len", "must hold a prompt token and a new one")
        self._require(0.0 <= self.watermark < 1.0, "watermark", "is a share of the device blocks, in [0, 1)")
        self._require(0 <= self.hash_bits <= 64, "hash_bits", "is between 0 and 64")
        self._require(
            self.preemption_mode in ("auto", "swap", "recompute"), "preemption_mode", "is auto, swap or recompute"
        )
        self._require(self.policy in ("fcfs", "priority"), "policy", "is fcfs or priority")
        for name in ("num_device_blocks", "num_host_blocks"):
            self._require(
                getattr(self, name) * self.block_size < 1 << 31, name, "must not have more slots than int32 can number"
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                "the token budget must let every running sequence decode",
                found=f"max_num_batched_tokens={self.max_num_batched_tokens} with max_num_seqs={self.max_num_seqs}",
                hint="Raise max_num_batched_tokens or lower max_num_seqs",
            )
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise ConfigError(
                "without chunked prefill a step must hold the longest prompt",
                found=f"max_num_batched_tokens={self.max_num_batched_tokens} with max_model_len={self.max_model_len}",
                hint="Raise max_num_batched_tokens, lower max_model_len, or set enable_chunked_prefill",
            )
        if not self.enable_chunked_prefill and self.long_prefill_token_threshold > 0:
            raise ConfigError(
                "long_prefill_token_threshold needs enable_chunked_prefill",
                found=f"long_prefill_token_threshold={self.long_prefill_token_threshold}",
            )

    def _require(self, holds: bool, name: str, rule: str) -> None:
        if not holds:
            raise ConfigError(f"{name} {rule}", found=repr(getattr(self, name)))

    @property
    def max_seq_tokens(self) -> int:
        """Most tokens that one sequence can reach: the context length, or all slots of the device pool where that is less."""
        return min(self.max_model_len, self.num_device_blocks * self.block_size)
