"""The suite's tests of captured graphs pass a right implementation, and find the faults of wrong ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from hardpoint.interfaces import AttentionPlan, Capabilities, Device, DeviceAllocator, GraphLevel, GraphRunner, Refusal
from hardpoint_conformance.plugin import Quality
from hardpoint_conformance.suite import test_l6_graphs as suite
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
    """Runs the recorded call again."""

    def __init__(self, device: Device) -> None:
        self._steps: dict[int, Callable[[], None]] = {}

    def start(self, allocator: DeviceAllocator) -> None:
        """The recorded call takes no memory of its own."""

    def capture(self, key: int, step: Callable[[], None]) -> None:
        step()
        self._steps[key] = step

    def replay(self, key: int) -> None:
        self._steps[key]()

    def resident_bytes(self) -> int:
        return 100 * len(self._steps)

    def reset(self) -> None:
        self._steps.clear()


class Hoarder(Recorder):
    """Takes memory with every replay, and gives none back."""

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self._held = 0

    def replay(self, key: int) -> None:
        super().replay(key)
        self._held += 64

    def resident_bytes(self) -> int:
        return self._held


def _target(attention: type = GraphedAttention, runner: type = Recorder) -> Target:
    found = Target.find("cpu")
    inner = found.descriptor.capabilities

    def claims(device: Device) -> Capabilities:
        honest = inner(device)
        return replace(honest, attention=replace(honest.attention, graph_level=GraphLevel.UNIFORM_DECODE))

    return found.with_descriptor(capabilities=claims, attention=lambda: attention, graph_runner=lambda: runner)


@pytest.fixture
def make() -> Iterator[Callable[..., suite.Captured]]:
    """Return what captures a step with the given parts."""
    made: list[suite.Captured] = []

    def capture(**parts: type) -> suite.Captured:
        target = _target(**parts)
        made.append(suite.Captured(target, target.claims, np.random.default_rng(0)))
        return made[-1]

    yield capture
    for captured in made:
        captured.close()


def test_right_graphs_pass(make: Callable[..., suite.Captured]) -> None:
    for test in (
        suite.test_replay_reads_the_inputs_of_now,
        suite.test_replay_takes_the_metadata_of_now,
        suite.test_replay_allocates_nothing,
        suite.test_replay_after_sleep_and_wake,
        suite.test_unknown_graphs,
    ):
        test(make(), Quality())
    for live in (1, 2, 3):
        suite.test_replay_of_a_smaller_batch(make(), live, Quality())
    target = _target()
    suite.test_graphs_of_several_sizes(target, target.claims, np.random.default_rng(0), Quality())


def test_stale_metadata_is_found(make: Callable[..., suite.Captured]) -> None:
    with pytest.raises(AssertionError):
        suite.test_replay_takes_the_metadata_of_now(make(attention=StaleAttention), Quality())


def test_growing_graphs_are_found(make: Callable[..., suite.Captured]) -> None:
    with pytest.raises(AssertionError):
        suite.test_replay_allocates_nothing(make(runner=Hoarder), Quality())
    with pytest.raises(AssertionError):
        suite.test_unknown_graphs(make(runner=Hoarder), Quality())


def test_graphs_that_nobody_claimed_are_found() -> None:
    target = _target()
    honest = replace(target.claims, attention=replace(target.claims.attention, graph_level=GraphLevel.NONE))
    with pytest.raises(AssertionError):
        suite.test_no_graphs_where_none_are_claimed(target, honest)
