"""Graphs for hosts: what a device would do again is called again. Right ones, and one that replays with old metadata."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from hardpoint.interfaces import (
    GRAPHS,
    AttentionPlan,
    Capabilities,
    Device,
    DeviceAllocator,
    DType,
    GraphLevel,
    GraphRunner,
    Refusal,
)
from hardpoint_conformance.target import Target
from hardpoint_cpu.attention import CpuAttention


@dataclass
class Static:
    """Metadata whose address stays: what `prepare` found last, for the number of tokens that it was captured with."""

    now: Any = None


class GraphedAttention(CpuAttention):
    """The CPU's attention with metadata that a replay reads anew."""

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self._static: dict[int, Static] | None = None

    def plan(self, request: Any) -> AttentionPlan | Refusal:
        plan = super().plan(request)
        return plan if isinstance(plan, Refusal) else replace(plan, graph_level=GraphLevel.UNIFORM_DECODE)

    def begin_capture(self, plan: AttentionPlan, max_num_seqs: int) -> None:
        self._static = {}

    def prepare(self, plan: AttentionPlan, batch: Any) -> Any:
        step = super().prepare(plan, batch)
        if self._static is None:
            return step
        static = self._static.setdefault(batch.num_tokens, Static())
        static.now = step
        return static

    def write_kv(self, layer: int, k: Any, v: Any, kv_cache: Any, metadata: Any) -> None:
        super().write_kv(layer, k, v, kv_cache, getattr(metadata, "now", metadata))

    def forward(
        self,
        layer: int,
        q: Any,
        k: Any,
        v: Any,
        kv_cache: Any,
        metadata: Any,
        out: Any,
        sinks: Any = None,
        alibi_slopes: Any = None,
    ) -> None:
        now = getattr(metadata, "now", metadata)
        super().forward(layer, q, k, v, kv_cache, now, out, sinks, alibi_slopes)


class StaleAttention(GraphedAttention):
    """Replays with the metadata of the capture."""

    def prepare(self, plan: AttentionPlan, batch: Any) -> Any:
        return CpuAttention.prepare(self, plan, batch)


class Recorder(GraphRunner):
    """Runs the recorded call again.

    Attributes:
        replays: keys of all replays, in order, of all recorders.
    """

    replays: ClassVar[list[int]] = []

    def __init__(self, device: Device) -> None:
        self._steps: dict[int, Callable[[], None]] = {}

    def start(self, allocator: DeviceAllocator) -> None:
        """The recorded call takes no memory of its own."""

    def capture(self, key: int, step: Callable[[], None]) -> None:
        step()
        self._steps[key] = step

    def replay(self, key: int) -> None:
        self._steps[key]()
        self.replays.append(key)

    def resident_bytes(self) -> int:
        return 100 * len(self._steps)

    def reset(self) -> None:
        self._steps.clear()


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


def graphed(attention: type = GraphedAttention, runner: type = Recorder) -> Target:
    """Return the CPU backend with graphs of decodes."""
    found = Target.find("cpu")
    inner = found.descriptor.capabilities

    def claims(device: Device) -> Capabilities:
        honest = inner(device)
        return replace(honest, attention=replace(honest.attention, graph_level=GraphLevel.UNIFORM_DECODE))

    return found.with_descriptor(capabilities=claims, attention=lambda: attention, graph_runner=lambda: runner)
