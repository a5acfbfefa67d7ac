"""Settings of the scheduler."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, Self

from msgspec import Meta

from hardpoint.interfaces.errors import ConfigError
from hardpoint.validation import INT32_MAX, NonNegativeFloat, NonNegativeInt, PositiveInt, Validated

_MIXED_STEP_SECONDS = 0.2
_MIN_MIXED_TOKENS = 256
"""Below this a step's own costs, such as to read all weights, outweigh those of its tokens."""
_PATIENCE = 20
"""With the policy "shortest": a burst of some hundred requests takes the server as long to take in as 20 short prompts to compute."""


@dataclass(frozen=True, kw_only=True)
class SchedulerSettings(Validated):
    """What a user decides about scheduling.

    Attributes:
        max_num_seqs: most sequences running at once; forks count from the admission of their prompt.
        max_num_batched_tokens: token budget of a step; at least `max_num_seqs`, so that every running sequence can decode.
        enable_prefix_caching: reuse the KV blocks of equal prompt beginnings.
        enable_chunked_prefill: a prompt may be computed in several steps, which decodes share. Without it the budget must hold the
            longest prompt.
        long_prefill_token_threshold: longest chunk of one prompt in a step, so that several prompts and all decodes share a
            step; None or 0 for no limit but the budget.
        mixed_prefill_tokens: most prompt tokens in a step while sequences decode, so that a long prompt, or many, makes no long gap in
            the answers that are being written; None for what the device computes in about 0.2 s, by the speed that is measured when
            the engine starts. Fewer make shorter gaps, and let prompts wait longer.
        preemption_mode: "swap" wherever the host pool has room, "recompute", or "auto": whichever costs less time.
        scheduling_policy: "fcfs" by arrival, "priority" by priority (lower first), then arrival, "shortest" by the length of prompts, so
            that of a burst most first tokens come earlier. A prompt waits for none that came later than 20 times its own computing time.
    """

    max_num_seqs: PositiveInt = 256
    max_num_batched_tokens: PositiveInt = 2048
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: NonNegativeInt | None = None
    mixed_prefill_tokens: PositiveInt | None = None
    preemption_mode: Literal["auto", "swap", "recompute"] = "auto"
    scheduling_policy: Literal["fcfs", "priority", "shortest"] = "fcfs"


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig(SchedulerSettings):
    """The settings, with what the model and the device add to them.

    Attributes:
        block_size: tokens per KV block.
        num_device_blocks, num_host_blocks: sizes of the block pools.
        num_tier_host_blocks, num_tier_disk_blocks: sizes of the tiers below the prefix cache: blocks that the device evicts go to the host,
            and from there to the disk. They need the prefix cache and a single KV cache group without a window.
        max_model_len: most tokens of a sequence, prompt included.
        watermark: share of the device blocks that admission leaves free.
        swap_seconds_per_block, recompute_seconds_per_token: the costs that the preemption mode "auto" compares (a swap moves a block
            twice); with both unknown (0) it recomputes. By the latter, `mixed_prefill_tokens` is chosen.
        steps_in_flight: steps that may be planned beyond the oldest one that was not booked.
        num_lookahead_slots: slots kept ready behind each decoding sequence.
        num_speculative_tokens: most guesses at a sequence's next tokens in a step; slots for them are kept ready.
        num_draft_slots: most such guesses of all sequences in a step.
        drafts_by_model: the worker makes the guesses, in the step that verifies them; otherwise they are looked up in the text.
        prompt_lookup_min, prompt_lookup_max: tokens of the text's end for which an earlier occurrence is looked for.
        starvation_limit: a waiting request that was passed over this many times by later ones, or a sequence that was preempted
            this many times, goes before all others that were not.
        vocab_size: token ids are checked against it; 0 checks only that they fit int32.
        group_windows: for each KV cache group, the keys that a query sees, its own included; 0 for all. The first is the largest. A
            sequence takes its blocks from one pool for each group.
        hash_bits: bits of the prefix hash in use. A hit is verified in full, so fewer only cost time; for tests.

    Raises:
        ConfigError: a value is impossible, or contradicts another.
    """

    block_size: PositiveInt
    num_device_blocks: PositiveInt
    num_host_blocks: NonNegativeInt = 0
    num_tier_host_blocks: NonNegativeInt = 0
    num_tier_disk_blocks: NonNegativeInt = 0
    max_model_len: Annotated[int, Meta(ge=2, le=INT32_MAX, description="It holds a prompt token and a new one")] = 2048
    watermark: Annotated[float, Meta(ge=0, lt=1)] = 0.01
    swap_seconds_per_block: NonNegativeFloat = 0.0
    recompute_seconds_per_token: NonNegativeFloat = 0.0
    steps_in_flight: Annotated[int, Meta(ge=0, le=7)] = 0
    num_lookahead_slots: NonNegativeInt = 0
    num_speculative_tokens: NonNegativeInt = 0
    num_draft_slots: NonNegativeInt = 0
    drafts_by_model: bool = False
    prompt_lookup_min: PositiveInt = 1
    prompt_lookup_max: PositiveInt = 1
    starvation_limit: PositiveInt = 8
    vocab_size: NonNegativeInt = 0
    group_windows: Annotated[tuple[NonNegativeInt, ...], Meta(min_length=1, max_length=8)] = (0,)
    hash_bits: Annotated[int, Meta(ge=0, le=64)] = 64

    def __post_init__(self) -> None:
        self._check_types()
        for name in ("num_device_blocks", "num_host_blocks"):
            if getattr(self, name) * self.block_size >= 1 << 31:
                raise ConfigError(
                    f"{name} has more slots than int32 can number",
                    found=f"{name}={getattr(self, name)} of {self.block_size} slots",
                    hint="Set num_device_blocks, or a smaller memory_utilization or swap_space",
                )
        if self.num_tier_host_blocks and not (self.enable_prefix_caching and self.group_windows == (0,)):
            raise ConfigError(
                "tiers below the prefix cache need it, and a single KV cache group without a window",
                found=f"enable_prefix_caching={self.enable_prefix_caching}, group_windows={self.group_windows}",
            )
        if self.num_tier_disk_blocks and not self.num_tier_host_blocks:
            raise ConfigError(
                "blocks go to the disk from the host's tier",
                found=f"num_tier_disk_blocks={self.num_tier_disk_blocks} without num_tier_host_blocks",
            )
        if self.num_tier_host_blocks + self.num_tier_disk_blocks >= 1 << 31:
            raise ConfigError(
                "there are more tier blocks than int32 can number",
                found=f"{self.num_tier_host_blocks} and {self.num_tier_disk_blocks}",
            )
        if 0 in self.group_windows[1:] and self.group_windows[0]:
            raise ConfigError("the first KV cache group has the largest window", found=f"{self.group_windows}")
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
        if not self.enable_chunked_prefill and self.long_prefill_token_threshold:
            raise ConfigError(
                "long_prefill_token_threshold needs enable_chunked_prefill",
                found=f"long_prefill_token_threshold={self.long_prefill_token_threshold}",
            )
        if not self.enable_chunked_prefill and self.mixed_prefill_tokens is not None:
            raise ConfigError(
                "mixed_prefill_tokens needs enable_chunked_prefill",
                found=f"mixed_prefill_tokens={self.mixed_prefill_tokens}",
            )

    @classmethod
    def complete(cls, settings: SchedulerSettings, **measured: Any) -> Self:
        """Return the settings with what the model and the device add or override; raises ConfigError where they contradict each other."""
        return cls(**{f.name: getattr(settings, f.name) for f in fields(SchedulerSettings)} | measured)

    @property
    def mixed_prefill_budget(self) -> int:
        """Most prompt tokens in a step while sequences decode.

        A power of two where it follows from the measured speed: steps, and with them rounding, are the same after most starts.
        """
        if self.mixed_prefill_tokens is not None:
            return min(self.mixed_prefill_tokens, self.max_num_batched_tokens)
        if not self.enable_chunked_prefill or not self.recompute_seconds_per_token:
            return self.max_num_batched_tokens
        fitting = max(_MIXED_STEP_SECONDS / self.recompute_seconds_per_token, _MIN_MIXED_TOKENS)
        return min(1 << round(math.log2(min(fitting, self.max_num_batched_tokens))), self.max_num_batched_tokens)

    def arrival(self, num_tokens: int, now: float) -> int | None:
        """Return the place of a prompt of `num_tokens` in the order of arrival, None for after all requests so far.

        With the policy "shortest" it is the time in microseconds, later by 20 times what the prompt takes to compute.

        Args:
            now: seconds of a clock that never goes back.
        """
        if self.scheduling_policy != "shortest":
            return None
        return int((now + _PATIENCE * self.recompute_seconds_per_token * num_tokens) * 1e6)

    @property
    def pool_tokens(self) -> int:
        """Most tokens of one sequence that the device pool holds, in all KV cache groups."""
        return self.num_device_blocks // len(self.group_windows) * self.block_size

    def beam_tokens(self, num_beams: int) -> int:
        """Most tokens of each beam of a search that the device pool holds, when the beams share nothing; at most `max_model_len`."""
        blocks = self.num_device_blocks // (len(self.group_windows) * num_beams)
        return min(self.max_model_len, blocks * self.block_size - self.num_lookahead_slots)
