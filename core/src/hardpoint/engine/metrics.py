"""An engine's metrics as values: its counters, and the times and sizes of the requests that ended.

`LLM.get_metrics` returns them, and the server's `/metrics` shows the same counters under the same names.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import Counter as Counts
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from hardpoint.engine.info import EngineStats
from hardpoint.engine.request import EndedRequest

PREFIX = "hardpoint:"

Reading: TypeAlias = tuple[str, str, Callable[[EngineStats], float]]
"""Name without the prefix, what it is, and how it is read."""

COUNTERS: tuple[Reading, ...] = (
    ("prompt_tokens", "Prompt tokens computed", lambda stats: stats.prefill_tokens),
    ("generation_tokens", "Tokens sampled", lambda stats: stats.sampled_tokens),
    ("engine_steps", "Steps computed", lambda stats: stats.steps),
    ("num_preemptions", "Sequences preempted", lambda stats: stats.preemptions),
    ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache", lambda stats: stats.prefix_queries),
    ("prefix_cache_hits", "Prompt tokens found in the prefix cache", lambda stats: stats.prefix_hits),
    ("kv_offload_queries", "KV blocks of prompts looked up in the tiers", lambda stats: stats.offload_queries),
    ("kv_offload_host_hits", "KV blocks found on the host", lambda stats: stats.offload_host_hits),
    ("kv_offload_disk_hits", "KV blocks found on disk", lambda stats: stats.offload_disk_hits),
    ("kv_offload_stores", "KV blocks copied to the host", lambda stats: stats.offload_stores),
    ("kv_offload_demotions", "KV blocks moved from the host to the disk", lambda stats: stats.offload_demotions),
    ("kv_offload_evictions", "KV blocks that left the tiers for others", lambda stats: stats.offload_evictions),
    ("kv_offload_failures", "KV blocks found and not loaded", lambda stats: stats.offload_failures),
    (
        "kv_offload_checksum_failures",
        "KV blocks found damaged",
        lambda stats: stats.offload_checksum_failures,
    ),
    ("kv_offload_io_errors", "Failed reads and writes of KV blocks", lambda stats: stats.offload_io_errors),
    ("kv_offload_seconds", "Seconds of copying KV blocks", lambda stats: stats.offload_seconds),
    ("spec_decode_num_drafts", "Sequences in steps that had draft tokens", lambda stats: stats.drafts),
    ("spec_decode_num_draft_tokens", "Draft tokens verified", lambda stats: stats.draft_tokens),
    ("spec_decode_num_accepted_tokens", "Draft tokens accepted", lambda stats: stats.accepted_tokens),
    ("lora_loads", "Folders of LoRA adapters read", lambda stats: stats.adapters.loads),
    ("lora_unloads", "LoRA adapters forgotten", lambda stats: stats.adapters.unloads),
    ("lora_evictions", "LoRA adapters that gave way to others on the host", lambda stats: stats.adapters.evictions),
)
GAUGES: tuple[Reading, ...] = (
    ("num_requests_running", "Sequences that are computed", lambda stats: stats.running),
    ("num_requests_waiting", "Sequences that wait", lambda stats: stats.waiting),
    ("num_requests_swapped", "Sequences whose blocks are on the host", lambda stats: stats.swapped),
    ("kv_offload_host_bytes", "Bytes of KV blocks on the host", lambda stats: stats.offload_host_bytes),
    ("kv_offload_disk_bytes", "Bytes of KV blocks on disk", lambda stats: stats.offload_disk_bytes),
    (
        "kv_cache_usage_perc",
        "Share of the KV blocks that is in use, 0 to 1",
        lambda stats: stats.blocks_used / max(stats.blocks_used + stats.blocks_free, 1),
    ),
    ("lora_adapters_loaded", "LoRA adapters that requests can name", lambda stats: stats.adapters.loaded),
    ("lora_adapters_on_host", "LoRA adapters that the host holds", lambda stats: stats.adapters.held),
    ("lora_adapters_on_host_max", "Most LoRA adapters that the host holds", lambda stats: stats.adapters.max_held),
    ("lora_adapters_running", "LoRA adapters of requests in progress", lambda stats: stats.adapters.active),
    ("lora_adapters_running_max", "Most LoRA adapters in one step", lambda stats: stats.adapters.max_active),
    ("lora_host_bytes", "Bytes of LoRA adapters on the host", lambda stats: stats.adapters.host_bytes),
    ("lora_device_bytes", "Device bytes of the LoRA adapters that run", lambda stats: stats.adapters.device_bytes),
    ("lora_device_budget_bytes", "Device bytes for LoRA adapters", lambda stats: stats.adapters.device_budget),
)


Labelled: TypeAlias = tuple[str, str, tuple[str, ...], Callable[[EngineStats], Iterable[tuple[tuple[str, ...], float]]]]
"""Name without the prefix, what it is, names of labels beside the model's, and how values are read with what these are."""


def _of_names(counts: Mapping[str, int]) -> list[tuple[tuple[str, ...], float]]:
    return [((name,), count) for name, count in sorted(counts.items())]


def _adapter_names(stats: EngineStats) -> list[tuple[tuple[str, ...], float]]:
    adapters = stats.adapters
    if not adapters.max_active:
        return []
    names = (str(adapters.max_active), ",".join(sorted(adapters.running)), ",".join(sorted(adapters.waiting)))
    return [(names, time.time())]


LABELLED_GAUGES: tuple[Labelled, ...] = (
    (
        "lora_requests_running",
        "Requests in progress, by LoRA adapter",
        ("lora_name",),
        lambda stats: _of_names(stats.adapters.running),
    ),
    (
        "lora_requests_waiting",
        "Requests that wait for room among the LoRA adapters of a step",
        ("lora_name",),
        lambda stats: _of_names(stats.adapters.waiting),
    ),
    (
        "lora_requests_info",
        "Time, with the names of LoRA adapters that have requests",
        ("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
        _adapter_names,
    ),
)
FIRST_TOKEN_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5),
    *(0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160),
)
WHOLE_SECONDS = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


@dataclass(frozen=True)
class Metric:
    """One metric.

    Attributes:
        labels: `model_name`, and what else tells metrics of the same name apart.
    """

    name: str
    labels: Mapping[str, str]


@dataclass(frozen=True)
class Counter(Metric):
    """A number that only grows."""

    value: float


@dataclass(frozen=True)
class Gauge(Metric):
    """A number of now."""

    value: float


@dataclass(frozen=True)
class Histogram(Metric):
    """How many observations are at most as large as each limit.

    Attributes:
        buckets: by limit as a text, the last one "+Inf".
    """

    count: int
    sum: float
    buckets: Mapping[str, int]


@dataclass
class _Observations:
    """Observations of one kind; `counts` has one entry more than `limits`."""

    limits: Sequence[float]
    counts: list[int] = field(init=False)
    sum: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.limits) + 1)

    def note(self, value: float) -> None:
        self.counts[bisect_left(self.limits, value)] += 1
        self.sum += value

    def histogram(self, name: str, labels: Mapping[str, str]) -> Histogram:
        below, buckets = 0, {}
        for limit, count in zip((*map(str, self.limits), "+Inf"), self.counts, strict=True):
            below += count
            buckets[limit] = below
        return Histogram(name, labels, below, self.sum, buckets)


class RequestMetricsBook:
    """Times and sizes of the generation requests that ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reasons: Counts[str] = Counts()
        self._of = {
            "time_to_first_token_seconds": _Observations(FIRST_TOKEN_SECONDS),
            "request_queue_time_seconds": _Observations(FIRST_TOKEN_SECONDS),
            "e2e_request_latency_seconds": _Observations(WHOLE_SECONDS),
            "request_prompt_tokens": _Observations(TOKENS),
            "request_generation_tokens": _Observations(TOKENS),
        }

    def note(self, ended: EndedRequest) -> None:
        """Count a request that has ended."""
        times = ended.metrics
        with self._lock:
            self._reasons.update(ended.reasons)
            self._of["request_prompt_tokens"].note(ended.prompt_tokens)
            self._of["request_generation_tokens"].note(ended.generated_tokens)
            if times.first_token_time is not None:
                self._of["time_to_first_token_seconds"].note(times.first_token_time - times.arrival_time)
            if times.queue_seconds is not None:
                self._of["request_queue_time_seconds"].note(times.queue_seconds)
            if times.finished_time is not None:
                self._of["e2e_request_latency_seconds"].note(times.finished_time - times.arrival_time)

    def metrics(self, labels: Mapping[str, str]) -> list[Metric]:
        """Return what was counted."""
        with self._lock:
            ended: list[Metric] = [
                Counter(f"{PREFIX}request_success", {**labels, "finished_reason": reason}, count)
                for reason, count in sorted(self._reasons.items())
            ]
            return ended + [one.histogram(PREFIX + name, labels) for name, one in self._of.items()]


def engine_metrics(stats: EngineStats, model: str, book: RequestMetricsBook) -> list[Metric]:
    """Return an engine's metrics: its counters, and those of the requests that a client saw end."""
    labels = {"model_name": model}
    counters: list[Metric] = [Counter(PREFIX + name, labels, read(stats)) for name, _, read in COUNTERS]
    gauges: list[Metric] = [Gauge(PREFIX + name, labels, read(stats)) for name, _, read in GAUGES]
    for name, _, more, values in LABELLED_GAUGES:
        gauges += [
            Gauge(PREFIX + name, labels | dict(zip(more, of_labels, strict=True)), value)
            for of_labels, value in values(stats)
        ]
    return counters + gauges + book.metrics(labels)
