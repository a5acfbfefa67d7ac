"""What the times of answers say."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from hardpoint.bench.answers import Answer
from hardpoint.bench.sending import Sent

_WORST: dict[str, Callable[[Answer], float]] = {
    "ttft": lambda answer: math.inf if answer.ttft is None else answer.ttft,
    "itl": lambda answer: max(answer.itl, default=0.0),
    "tpot": lambda answer: answer.tpot or 0.0,
    "e2e": lambda answer: answer.e2e,
}
"""What an objective is held against; for inter-token latency the longest of an answer's gaps."""


@dataclass(frozen=True)
class Objective:
    """What makes an answer a good one: a time, of `_WORST`, is at most this many seconds."""

    name: str
    seconds: float

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read "ttft:200", in ms; raises ValueError."""
        name, _, limit = text.partition(":")
        try:
            result = cls(name, float(limit) / 1e3)
        except ValueError:
            result = cls("", 0.0)
        if result.name not in _WORST or not 0 < result.seconds < math.inf:
            raise ValueError(f"{text!r} is not one of {', '.join(_WORST)} with milliseconds, such as ttft:200")
        return result

    def is_met(self, answer: Answer) -> bool:
        """Whether an answer meets it."""
        return _WORST[self.name](answer) <= self.seconds


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """Return mean, median, 90th, 95th and 99th percentile, least and greatest; None without values."""
    if not values:
        return None
    p50, p90, p95, p99 = np.percentile(values, [50, 90, 95, 99]).tolist()
    mean = float(np.mean(values))
    return {"mean": mean, "p50": p50, "p90": p90, "p95": p95, "p99": p99, "min": min(values), "max": max(values)}


def summary(sent: Sent, objectives: Sequence[Objective]) -> dict[str, Any]:
    """Return a run's rates and times. Answers that failed are in the counts of failures and of requests, and nowhere else.

    Of answers that are `uncounted` by the server, output tokens are parts with text, and input tokens are none.
    """
    done = [answer for answer in sent.answers if answer.error is None]
    failed = [answer for answer in sent.answers if answer.error is not None]
    inputs = sum(answer.prompt_tokens for answer in done)
    outputs = sum(answer.output_tokens for answer in done)
    seconds = max(sent.seconds, 1e-9)
    report: dict[str, Any] = {
        "requests": len(sent.answers),
        "succeeded": len(done),
        "failed": len(failed),
        "unfinished": sent.unfinished,
        "errors": dict(Counter(str(answer.error) for answer in failed)),
        "error_examples": {str(answer.error): answer.detail for answer in reversed(failed)},
        "elapsed_seconds": sent.seconds,
        "client_processor_share": sent.processor_seconds / seconds,
        "input_tokens": inputs,
        "output_tokens": outputs,
        "uncounted": sum(not answer.is_counted for answer in done),
        "requests_per_second": len(done) / seconds,
        "output_tokens_per_second": outputs / seconds,
        "total_tokens_per_second": (inputs + outputs) / seconds,
        "ttft_seconds": percentiles([ttft for answer in done if (ttft := answer.ttft) is not None]),
        "itl_seconds": percentiles([gap for answer in done for gap in answer.itl]),
        "tpot_seconds": percentiles([tpot for answer in done if (tpot := answer.tpot) is not None]),
        "end_to_end_seconds": percentiles([answer.e2e for answer in done]),
    }
    if objectives:
        good = sum(all(objective.is_met(answer) for objective in objectives) for answer in done)
        report["goodput"] = {
            "objectives_seconds": {objective.name: objective.seconds for objective in objectives},
            "good_requests": good,
            "share": good / max(len(sent.answers), 1),
            "requests_per_second": good / seconds,
        }
    return report
