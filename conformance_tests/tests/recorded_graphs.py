"""The CPU backend with graphs that record calls: right ones, and some that replay with old metadata."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hardpoint.interfaces import GRAPHS, AttentionPlan, DeviceAllocator, DType, GraphLevel
from hardpoint_conformance.mutants.derived import derived
from hardpoint_conformance.mutants.recorded_graphs import Recorder, Static, recorded
from hardpoint_conformance.mutants.recorded_graphs import graphed as graphed_target
from hardpoint_conformance.target import Target
from hardpoint_cpu.attention import CpuAttention

GraphedAttention: Any = derived(CpuAttention, recorded(CpuAttention))
MixedAttention: Any = derived(CpuAttention, recorded(CpuAttention, GraphLevel.MIXED))
"""The same for steps with prompts too."""
StaleAttention: Any = derived(GraphedAttention, {"prepare": CpuAttention.prepare})
"""Replays with the metadata of the capture."""


@dataclass
class Updated(Static):
    """Metadata that replays read after an update only: what `prepare` found last is `next` until then."""

    next: Any = None


class HostArguments(GraphedAttention):
    """The same, but decodes are replayed with the metadata of the last update, as if they were numbers on the host."""

    def prepare(self, plan: AttentionPlan, batch: Any) -> Any:
        step = CpuAttention.prepare(self, plan, batch)
        if self._static is None or len(batch.rows) != batch.num_tokens:
            return step
        static = self._static.setdefault(batch.num_tokens, Updated(step))
        static.next = step
        return static

    def host_arguments(self, metadata: Any) -> Any:
        return {"static": metadata}


class Hungry(Recorder):
    """Takes memory for every graph, as the contract has it: from the allocator, with the tag of graphs.

    Attributes:
        first, other: bytes that the first graph takes, and every other one.
    """

    first, other = 1 << 20, 3 << 16

    def start(self, allocator: DeviceAllocator) -> None:
        self._allocator = allocator
        self._held: list[Any] = []

    def capture(self, key: int, step: Callable[[], None]) -> None:
        super().capture(key, step)
        taken = self.other if self._held else self.first
        self._held.append(self._allocator.empty((taken,), DType.UINT8, GRAPHS))

    def resident_bytes(self) -> int:
        return sum(int(tensor.nbytes) for tensor in self._held)

    def reset(self) -> None:
        super().reset()
        self._held.clear()


class UpdatedRecorder(Recorder):
    """Takes what `HostArguments` gives it."""

    def update(self, key: int, arguments: Any) -> None:
        assert key in self._steps
        arguments["static"].now = arguments["static"].next


class DeafRecorder(Recorder):
    """Takes no notice of updates."""

    def update(self, key: int, arguments: Any) -> None:
        """Do nothing."""


def graphed(attention: Any = GraphedAttention, runner: type[Recorder] = Recorder) -> Target:
    """Return the CPU backend with graphs: of decodes, unless `attention` is derived from `MixedAttention`."""
    level = GraphLevel.MIXED if issubclass(attention, MixedAttention) else GraphLevel.UNIFORM_DECODE
    return graphed_target(Target.find("cpu"), lambda: attention, runner, level)
