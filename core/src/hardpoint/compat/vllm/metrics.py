"""Metrics under vLLM's names."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from hardpoint.engine.metrics import PREFIX, Counter, Gauge, Histogram, Metric

__all__ = ["Counter", "Gauge", "Histogram", "Metric", "Vector", "under_their_names"]


@dataclass(frozen=True)
class Vector(Metric):
    """Counters by position, which speculative decoding has there; none is ever made here."""

    values: list[int]


def under_their_names(metrics: Iterable[Metric]) -> list[Metric]:
    """Return metrics with vLLM's prefix."""
    return [replace(one, name=f"vllm:{one.name.removeprefix(PREFIX)}") for one in metrics]
