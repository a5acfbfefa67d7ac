"""Graphs for hosts: what a device would do again is called again.

They are correct as they stand: attention with metadata that a replay reads anew, and a runner that keeps calls. A fault replaces one part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from hardpoint.interfaces import (
    AttentionPlan,
    Capabilities,
    Device,
    DeviceAllocator,
    GraphLevel,
    GraphRunner,
    Refusal,
    StepBatch,
)
from hardpoint_conformance.mutants.derived import Methods
from hardpoint_conformance.target import Target

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class Static:
    """Metadata whose address stays: what `prepare` found last, for the plan and the number of tokens that it was captured with."""

    now: Any = None


def recorded(base: Any, level: GraphLevel = GraphLevel.UNIFORM_DECODE) -> Methods:
    """Return the methods of an attention backend that give its metadata addresses that stay, from the first capture on.

    Args:
        level: that its plans have.
    """

    def init(self: Any, device: Device) -> None:
        base.__init__(self, device)
        self._static = None

    def plan(self: Any, request: Any) -> AttentionPlan | Refusal:
        made: AttentionPlan | Refusal = base.plan(self, request)
        return made if isinstance(made, Refusal) else replace(made, graph_level=level)

    def begin_capture(self: Any, plan: AttentionPlan, max_num_seqs: int) -> None:
        self._static = {}

    def prepare(self: Any, plan: AttentionPlan, batch: StepBatch) -> Any:
        step = base.prepare(self, plan, batch)
        if self._static is None:
            return step
        static = self._static.setdefault((id(plan), batch.num_tokens), Static())
        static.now = step
        return static

    def write_kv(self: Any, layer: int, k: Tensor, v: Tensor, kv_cache: Tensor, metadata: Any) -> None:
        base.write_kv(self, layer, k, v, kv_cache, getattr(metadata, "now", metadata))

    def forward(
        self: Any,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kv_cache: Tensor,
        metadata: Any,
        out: Tensor,
        sinks: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
    ) -> None:
        now = getattr(metadata, "now", metadata)
        base.forward(self, layer, q, k, v, kv_cache, now, out, sinks, alibi_slopes)

    return {
        "__init__": init,
        "plan": plan,
        "begin_capture": begin_capture,
        "prepare": prepare,
        "write_kv": write_kv,
        "forward": forward,
    }


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


def graphed(
    target: Target,
    attention: Callable[[], Any],
    runner: type[GraphRunner] = Recorder,
    level: GraphLevel = GraphLevel.UNIFORM_DECODE,
) -> Target:
    """Return a target that claims graphs.

    Args:
        attention: factory of an attention backend with `recorded` methods.
        level: that is claimed.
    """
    inner = target.descriptor.capabilities

    def claims(device: Device) -> Capabilities:
        honest = inner(device)
        return replace(honest, attention=replace(honest.attention, graph_level=level))

    return target.with_descriptor(capabilities=claims, attention=attention, graph_runner=lambda: runner)
