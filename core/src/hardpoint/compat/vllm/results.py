"""Outputs of requests with all of vLLM's fields."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import hardpoint
from hardpoint import RequestOutputKind
from hardpoint.engine.outputs import RequestMetrics


@dataclass(frozen=True, slots=True)
class RequestStateStats(RequestMetrics):
    """`RequestMetrics` as seconds since the epoch, with vLLM's fields; what has not happened yet is 0 in these.

    Attributes:
        num_generation_tokens: of all completions so far.
        queued_ts, scheduled_ts, first_token_ts, last_token_ts: seconds of `time.monotonic`.
        first_token_latency: seconds from arrival.
        is_corrupted: always False; a completion without a possible token has the finish reason "error".
    """

    num_generation_tokens: int = 0
    queued_ts: float = 0.0
    scheduled_ts: float = 0.0
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    first_token_latency: float = 0.0
    is_corrupted: bool = False


@dataclass(frozen=True, slots=True)
class CompletionOutput(hardpoint.CompletionOutput):
    """`hardpoint.CompletionOutput` with vLLM's further fields: the request's adapter, and None for what is not here."""

    lora_request: Any = None
    routed_experts: None = None
    kv_transfer_params: None = None


@dataclass(frozen=True, slots=True)
class RequestOutput(hardpoint.RequestOutput):
    """`hardpoint.RequestOutput` with vLLM's further fields: the request's adapter, and None for what is not here."""

    lora_request: Any = None
    encoder_prompt: None = None
    encoder_prompt_token_ids: None = None
    kv_transfer_params: None = None


class OutputConverter:
    """Gives the outputs of one request vLLM's fields, as they come."""

    def __init__(self, params: Any = None, lora_request: Any = None) -> None:
        self._adds = getattr(params, "output_kind", None) is RequestOutputKind.DELTA
        self._lora_request = lora_request
        self._tokens = 0

    def convert(self, given: hardpoint.RequestOutput) -> RequestOutput:
        """Return an output with vLLM's fields."""
        tokens = sum(len(one.token_ids) for one in given.outputs)
        self._tokens = self._tokens + tokens if self._adds else tokens
        completions = [
            CompletionOutput(
                one.index,
                one.text,
                one.token_ids,
                one.cumulative_logprob,
                one.logprobs,
                one.finish_reason,
                one.stop_reason,
                self._lora_request,
            )
            for one in given.outputs
        ]
        return RequestOutput(
            given.request_id,
            given.prompt,
            given.prompt_token_ids,
            completions,
            given.finished,
            None if given.metrics is None else _stats(given.metrics, self._tokens),
            given.num_cached_tokens,
            given.prompt_logprobs,
            self._lora_request,
        )


def _stats(metrics: RequestMetrics, tokens: int) -> RequestStateStats:
    now, arrival, first, end = (
        time.perf_counter(),
        metrics.arrival_time,
        metrics.first_token_time,
        metrics.finished_time,
    )
    wall, monotonic = time.time() - now, time.monotonic() - now
    last = end if end is not None else now
    return RequestStateStats(
        arrival + wall,
        None if first is None else first + wall,
        None if end is None else end + wall,
        metrics.queue_seconds,
        num_generation_tokens=tokens,
        queued_ts=arrival + monotonic,
        scheduled_ts=0.0 if metrics.queue_seconds is None else arrival + metrics.queue_seconds + monotonic,
        first_token_ts=0.0 if first is None else first + monotonic,
        last_token_ts=0.0 if first is None else last + monotonic,
        first_token_latency=metrics.time_to_first_token or 0.0,
    )
