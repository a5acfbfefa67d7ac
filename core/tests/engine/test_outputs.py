"""Results as users read them."""

from __future__ import annotations

import dataclasses
import pickle

import pytest

from hardpoint.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput


def test_times_are_counted_from_arrival_and_from_the_first_token() -> None:
    metrics = RequestMetrics(arrival_time=10.0, first_token_time=10.5, finished_time=12.0)
    assert metrics.time_to_first_token == 0.5
    assert metrics.decode_time == 1.5


def test_times_that_have_not_come_are_none() -> None:
    metrics = RequestMetrics(arrival_time=10.0)
    assert metrics.time_to_first_token is None
    assert metrics.decode_time is None
    assert dataclasses.replace(metrics, first_token_time=11.0).decode_time is None


def test_a_completion_is_finished_when_it_has_a_reason() -> None:
    assert not CompletionOutput(0, "a", [1]).finished
    assert CompletionOutput(0, "a", [1], finish_reason="length").finished


def test_results_cannot_be_changed_and_cross_processes() -> None:
    output = RequestOutput("r", "p", [1], [CompletionOutput(0, "a", [2])], True, RequestMetrics(1.0))
    with pytest.raises(dataclasses.FrozenInstanceError):
        output.finished = False  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(output)) == output
