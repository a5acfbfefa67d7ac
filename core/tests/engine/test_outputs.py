"""Results as users read them."""

from __future__ import annotations

import dataclasses
import pickle

import numpy as np
import pytest

from hardpoint.engine.outputs import (
    CompletionOutput,
    Logprob,
    RequestMetrics,
    RequestOutput,
    best_completions,
    position_logprobs,
)
from hardpoint.interfaces.batch import TokenLogprobs


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
    assert not CompletionOutput(0, "a", [1]).finished()
    assert CompletionOutput(0, "a", [1], finish_reason="length").finished()


def test_results_cannot_be_changed_and_cross_processes() -> None:
    output = RequestOutput("r", "p", [1], [CompletionOutput(0, "a", [2])], True, RequestMetrics(1.0))
    with pytest.raises(dataclasses.FrozenInstanceError):
        output.finished = False  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(output)) == output


def test_log_probabilities_are_by_token_the_sampled_one_first_with_its_rank() -> None:
    entry = TokenLogprobs(np.array([7, 3, 5]), np.array([-4.0, -0.5, -1.0], np.float32), rank=9)
    shown = position_logprobs(entry, ["g", "c", "e"])
    assert list(shown.items()) == [(7, Logprob(-4.0, 9, "g")), (3, Logprob(-0.5, 1, "c")), (5, Logprob(-1.0, 2, "e"))]


def test_a_sampled_token_among_the_best_is_shown_once() -> None:
    entry = TokenLogprobs(np.array([5, 3, 5]), np.array([-1.0, -0.5, -1.0], np.float32), rank=2)
    assert position_logprobs(entry, ["e", "c", "e"]) == {5: Logprob(-1.0, 2, "e"), 3: Logprob(-0.5, 1, "c")}


def test_the_best_completions_have_the_highest_log_probability_per_token() -> None:
    completions = [
        CompletionOutput(0, "long", [1, 2, 3, 4], cumulative_logprob=-4.0),
        CompletionOutput(1, "bad", [1], cumulative_logprob=-3.0),
        CompletionOutput(2, "short", [1, 2], cumulative_logprob=-1.0),
    ]
    assert [(c.index, c.text) for c in best_completions(completions, 2)] == [(0, "short"), (1, "long")]
    with pytest.raises(ValueError, match="completion 1"):
        best_completions([completions[0], CompletionOutput(1, "?", [1])], 1)
