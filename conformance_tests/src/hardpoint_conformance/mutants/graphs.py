"""Faults of captured graphs, in a backend that records calls in their place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch

from hardpoint.interfaces import AttentionPlan, Device, DeviceAllocator, DType, GraphLevel, GraphRunner, StepBatch
from hardpoint_conformance.mutants import Mutant
from hardpoint_conformance.mutants.derived import Faults, Methods, derived
from hardpoint_conformance.mutants.recorded_graphs import Recorder, graphed, recorded
from hardpoint_conformance.target import Target

if TYPE_CHECKING:
    from torch import Tensor

_FAULTS = Faults("attention")
_CLAUSES = (
    "graph.replay.inputs@1",
    "graph.replay.metadata@1",
    "graph.replay.padded@1",
    "graph.capture.sizes@1",
    "graph.replay.no-allocation@1",
    "graph.replay.after-sleep@1",
    "graph.reset@1",
)
_MIXED = ("graph.mixed.replay@1", "graph.mixed.padded@1", "graph.mixed.sizes@1", "graph.mixed.same-bits@1")


def _graphed(
    target: Target,
    runner: type[GraphRunner] = Recorder,
    methods: Callable[[Any], Methods] = lambda base: {},
    level: GraphLevel = GraphLevel.UNIFORM_DECODE,
) -> Target:
    """Return a target with graphs; `methods` replace those of its attention, given the class without graphs."""

    @cache
    def attention() -> Any:
        base = target.descriptor.attention()
        correct = derived(base, recorded(base, level))
        return derived(correct, methods(base))

    return graphed(target, attention, runner, level)


_mixed = partial(_graphed, level=GraphLevel.MIXED)
"""The same, of steps with prompts too."""


@_FAULTS.target_fault("No fault: steps are recorded, as a second correct way of graphs.", *_CLAUSES, harmless=True)
def recorded_graphs(target: Target) -> Target:
    return _graphed(target)


@_FAULTS.target_fault(
    "A replay takes the metadata of the capture.",
    "graph.replay.metadata@1",
    "graph.replay.padded@1",
    "graph.replay.after-sleep@1",
)
def replay_takes_old_metadata(target: Target) -> Target:
    def methods(base: Any) -> Methods:
        def prepare(self: Any, plan: AttentionPlan, batch: StepBatch) -> Any:
            return base.prepare(self, plan, batch)

        return {"prepare": prepare}

    return _graphed(target, methods=methods)


@_FAULTS.target_fault("A graph that was just replayed is not run again.", "graph.replay.inputs@1")
def replay_leaves_old_outputs(target: Target) -> Target:
    class Lazy(Recorder):
        def __init__(self, device: Device) -> None:
            super().__init__(device)
            self._last: int | None = None

        def replay(self, key: int) -> None:
            if key != self._last:
                super().replay(key)
            self._last = key

    return _graphed(target, Lazy)


@_FAULTS.target_fault("All sizes are captured into one graph, the last one's.", "graph.capture.sizes@1")
def one_graph_for_all_sizes(target: Target) -> Target:
    class One(Recorder):
        def capture(self, key: int, step: Callable[[], None]) -> None:
            super().capture(key, step)
            self._steps = dict.fromkeys([*self._steps, key], step)

    return _graphed(target, One)


@_FAULTS.target_fault("Every replay takes memory from the allocator.", "graph.replay.no-allocation@1")
def replay_allocates(target: Target) -> Target:
    class Hoarder(Recorder):
        def __init__(self, device: Device) -> None:
            super().__init__(device)
            self._taken: list[Tensor] = []

        def start(self, allocator: DeviceAllocator) -> None:
            self._allocator = allocator

        def replay(self, key: int) -> None:
            super().replay(key)
            self._taken.append(self._allocator.empty((64,), DType.UINT8, "graphs"))

        def reset(self) -> None:
            super().reset()
            self._taken.clear()

    return _graphed(target, Hoarder)


@_FAULTS.target_fault("A graph that is not there is replayed without an error.", "graph.reset@1")
def unknown_graph_ignored(target: Target) -> Target:
    class Silent(Recorder):
        def replay(self, key: int) -> None:
            if key in self._steps:
                super().replay(key)

    return _graphed(target, Silent)


@_FAULTS.target_fault("Padding of a replay is written to block 0.", "graph.replay.padded@1")
def padding_written_by_replay(target: Target) -> Target:
    def methods(base: Any) -> Methods:
        def write_kv(self: Any, layer: int, k: Tensor, v: Tensor, kv_cache: Tensor, metadata: Any) -> None:
            base.write_kv(self, layer, k, v, kv_cache, getattr(metadata, "now", metadata))
            if getattr(metadata, "padded", False):
                kv_cache[:, 0] = 0

        def prepare(self: Any, plan: AttentionPlan, batch: StepBatch) -> Any:
            made = recorded(base)["prepare"](self, plan, batch)
            made.padded = bool((batch.slot_mapping < 0).any())
            return made

        return {"prepare": prepare, "write_kv": write_kv}

    return _graphed(target, methods=methods)


def _is_mixed(batch: StepBatch) -> bool:
    """Whether a step is padded as captured ones with prompts are: its last sequence has nothing."""
    return batch.num_seqs > 0 and batch.num_seqs != batch.num_tokens and not batch.context_lens[-1]


@_FAULTS.target_fault("No fault: steps with prompts are recorded too.", *_MIXED, *_CLAUSES, harmless=True)
def recorded_mixed_graphs(target: Target) -> Target:
    return _mixed(target)


@_FAULTS.target_fault(
    "A replay with prompts takes the metadata of the one before.", "graph.mixed.replay@1", "graph.mixed.sizes@1"
)
def mixed_replay_takes_old_metadata(target: Target) -> Target:
    def methods(base: Any) -> Methods:
        def prepare(self: Any, plan: AttentionPlan, batch: StepBatch) -> Any:
            made = recorded(base)["prepare"](self, plan, batch)
            if self._static is not None and _is_mixed(batch):
                newest = made.now
                made.now, made.newest = getattr(made, "newest", newest), newest
            return made

        return {"prepare": prepare}

    return _mixed(target, methods=methods)


@_FAULTS.target_fault("Padding of a replay with prompts is written to block 0.", "graph.mixed.padded@1")
def padding_written_by_mixed_replay(target: Target) -> Target:
    def methods(base: Any) -> Methods:
        def write_kv(self: Any, layer: int, k: Tensor, v: Tensor, kv_cache: Tensor, metadata: Any) -> None:
            base.write_kv(self, layer, k, v, kv_cache, getattr(metadata, "now", metadata))
            if getattr(metadata, "is_padded", False):
                kv_cache[:, 0] = 0

        def prepare(self: Any, plan: AttentionPlan, batch: StepBatch) -> Any:
            made = recorded(base)["prepare"](self, plan, batch)
            if self._static is None:
                return made
            made.is_padded = _is_mixed(batch) and bool((batch.slot_mapping < 0).any())
            return made

        return {"prepare": prepare, "write_kv": write_kv}

    return _mixed(target, methods=methods)


@_FAULTS.target_fault(
    "A step of decodes and one with prompts that has as many tokens are one graph.", "graph.mixed.sizes@1"
)
def one_graph_for_decodes_and_prompts(target: Target) -> Target:
    class Shared(Recorder):
        def capture(self, key: int, step: Callable[[], None]) -> None:
            super().capture(abs(key), step)

        def replay(self, key: int) -> None:
            super().replay(abs(key))

    return _mixed(target, Shared)


@_FAULTS.target_fault("Replays with prompts round up.", "graph.mixed.same-bits@1")
def mixed_replay_rounds_otherwise(target: Target) -> Target:
    def methods(base: Any) -> Methods:
        def prepare(self: Any, plan: AttentionPlan, batch: StepBatch) -> Any:
            made = recorded(base)["prepare"](self, plan, batch)
            if self._static is not None:
                made.is_mixed = _is_mixed(batch)
            return made

        def forward(
            self: Any,
            layer: int,
            q: Tensor,
            k: Tensor,
            v: Tensor,
            kv_cache: Tensor,
            metadata: Any,
            out: Tensor,
            *parts: Tensor | None,
        ) -> None:
            base.forward(self, layer, q, k, v, kv_cache, getattr(metadata, "now", metadata), out, *parts)
            if getattr(metadata, "is_mixed", False):
                out.copy_(torch.nextafter(out, torch.full_like(out, torch.inf)))

        return {"prepare": prepare, "forward": forward}

    return _mixed(target, methods=methods)


MUTANTS: Sequence[Mutant] = _FAULTS.mutants
