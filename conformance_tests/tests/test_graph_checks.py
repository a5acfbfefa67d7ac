"""The suite's tests of captured graphs pass a right implementation, and find the faults of wrong ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from conformance_tests.tests.recorded_graphs import (
    DeafRecorder,
    GraphedAttention,
    HostArguments,
    MixedAttention,
    Recorder,
    StaleAttention,
    UpdatedRecorder,
    graphed,
)
from hardpoint.interfaces import Device, GraphLevel
from hardpoint.interfaces.errors import CapabilityRefused
from hardpoint_conformance.plugin import Quality
from hardpoint_conformance.suite import test_l6_graphs as suite


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


@pytest.fixture
def make() -> Iterator[Callable[..., suite.Captured]]:
    """Return what captures a step with the given parts."""
    made: list[suite.Captured] = []

    def capture(**parts: type) -> suite.Captured:
        target = graphed(**parts)
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
    target = graphed()
    suite.test_graphs_of_several_sizes(target, target.claims, np.random.default_rng(0), Quality())


def test_right_graphs_of_steps_with_prompts_pass() -> None:
    target = graphed(MixedAttention)

    def capture() -> suite.Captured:
        return suite.Captured(target, target.claims, np.random.default_rng(0), num_tokens=(suite.TOKENS,))

    suite.test_replay_of_steps_with_prompts(capture(), Quality())
    for mix in suite.MIXES:
        suite.test_padding_of_steps_with_prompts(capture(), mix, Quality())
    suite.test_replays_with_prompts_have_the_bits_of_eager_steps(capture(), target.claims)
    suite.test_graphs_with_prompts_beside_those_of_decodes(target, target.claims, np.random.default_rng(0), Quality())


def test_graphs_with_prompts_that_are_claimed_and_not_planned_are_found() -> None:
    target = graphed()
    with pytest.raises(AssertionError, match="claimed and not planned"):
        suite.Captured(target, target.claims, np.random.default_rng(0), num_tokens=(suite.TOKENS,))


def test_stale_metadata_is_found(make: Callable[..., suite.Captured]) -> None:
    with pytest.raises(AssertionError):
        suite.test_replay_takes_the_metadata_of_now(make(attention=StaleAttention), Quality())


def test_replays_get_what_operators_take_from_the_host(make: Callable[..., suite.Captured]) -> None:
    for test in (suite.test_replay_takes_the_metadata_of_now, suite.test_replay_after_sleep_and_wake):
        test(make(attention=HostArguments, runner=UpdatedRecorder), Quality())
    with pytest.raises(AssertionError):
        suite.test_replay_takes_the_metadata_of_now(make(attention=HostArguments, runner=DeafRecorder), Quality())
    with pytest.raises(CapabilityRefused, match="Recorder cannot write them into a graph"):
        suite.test_replay_takes_the_metadata_of_now(make(attention=HostArguments), Quality())


def test_attention_that_replays_nothing_is_found(make: Callable[..., suite.Captured]) -> None:
    class Never(GraphedAttention):
        def can_replay(self, plan: Any, batch: Any, num_seqs: int, num_blocks: int) -> bool:
            return False

    with pytest.raises(AssertionError, match="plain decodes not replayed"):
        suite.test_replay_reads_the_inputs_of_now(make(attention=Never), Quality())


def test_growing_graphs_are_found(make: Callable[..., suite.Captured]) -> None:
    with pytest.raises(AssertionError):
        suite.test_replay_allocates_nothing(make(runner=Hoarder), Quality())
    with pytest.raises(AssertionError):
        suite.test_unknown_graphs(make(runner=Hoarder), Quality())


def test_graphs_that_nobody_claimed_are_found() -> None:
    target = graphed()
    honest = replace(target.claims, attention=replace(target.claims.attention, graph_level=GraphLevel.NONE))
    with pytest.raises(AssertionError):
        suite.test_no_graphs_where_none_are_claimed(target, honest)
