"""The CPU backend with graphs that record calls: right ones, and one that replays with old metadata."""

from __future__ import annotations

from typing import Any

from hardpoint_conformance.mutants.derived import derived
from hardpoint_conformance.mutants.recorded_graphs import Recorder, recorded
from hardpoint_conformance.mutants.recorded_graphs import graphed as graphed_target
from hardpoint_conformance.target import Target
from hardpoint_cpu.attention import CpuAttention

__all__ = ["GraphedAttention", "Recorder", "StaleAttention", "graphed"]

GraphedAttention: Any = derived(CpuAttention, recorded(CpuAttention))
StaleAttention: Any = derived(GraphedAttention, {"prepare": CpuAttention.prepare})
"""Replays with the metadata of the capture."""


def graphed(attention: Any = GraphedAttention, runner: type[Recorder] = Recorder) -> Target:
    """Return the CPU backend with graphs of decodes."""
    return graphed_target(Target.find("cpu"), lambda: attention, runner)
