"""Results as users read them."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from hardpoint.engine.outputs import (
    CompletionOutput,
    FlatLogprobs,
    Logprob,
    PoolingOutput,
    PoolingRequestOutput,
    PromptPositions,
    RequestMetrics,
    RequestOutput,
    best_completions,
    position_logprobs,
)
from hardpoint.engine.pooling import cosine_score
from hardpoint.interfaces.batch import PromptLogprobs, TokenLogprobs

TEXTS = {3: "c", 5: "e", 7: "g"}.get


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
    shown = position_logprobs(entry, TEXTS)
    assert list(shown.items()) == [(7, Logprob(-4.0, 9, "g")), (3, Logprob(-0.5, 1, "c")), (5, Logprob(-1.0, 2, "e"))]


def test_a_sampled_token_among_the_best_is_shown_once() -> None:
    entry = TokenLogprobs(np.array([5, 3, 5]), np.array([-1.0, -0.5, -1.0], np.float32), rank=2)
    assert position_logprobs(entry, TEXTS) == {5: Logprob(-1.0, 2, "e"), 3: Logprob(-0.5, 1, "c")}


def scored(*, flat: bool, asked: list[int]) -> RequestOutput:
    """Return the output of a prompt of four tokens, computed in two chunks; `asked` takes the tokens whose texts are made."""

    def text_of(token_id: int) -> str | None:
        asked.append(token_id)
        return TEXTS(token_id)

    positions = PromptPositions(1, text_of, flat=flat)
    ids, values = np.array([[7, 3, 5], [5, 3, 5]]), np.array([[-4.0, -0.5, -1.0], [-1.0, -0.5, -1.0]], np.float32)
    positions.add(PromptLogprobs(ids, values, np.array([9, 2])))
    positions.add(PromptLogprobs(ids[1:], values[1:], np.array([2])))
    return RequestOutput("r", None, [1, 7, 5, 5], [], True, prompt_logprobs=positions)  # type: ignore[arg-type]


AT_SEVEN = {7: Logprob(-4.0, 9, "g"), 3: Logprob(-0.5, 1, "c"), 5: Logprob(-1.0, 2, "e")}
AT_FIVE = {5: Logprob(-1.0, 2, "e"), 3: Logprob(-0.5, 1, "c")}


def test_log_probabilities_of_a_prompt_are_a_list_of_mappings() -> None:
    output = scored(flat=False, asked=[])
    assert output.prompt_logprobs == [None, AT_SEVEN, AT_FIVE, AT_FIVE]
    assert type(output.prompt_logprobs) is list
    assert type(output.prompt_logprobs[1]) is dict
    assert list(output.prompt_logprobs[1]) == [7, 3, 5]
    assert output.prompt_logprobs is output.prompt_logprobs
    output.prompt_logprobs.append(None)
    assert len(output.prompt_logprobs) == 5


def test_a_result_with_log_probabilities_of_its_prompt_is_copied_compared_and_shown_like_others() -> None:
    output = scored(flat=False, asked=[])
    plain = dataclasses.replace(output, prompt_logprobs=[None, AT_SEVEN, AT_FIVE, AT_FIVE])
    assert pickle.loads(pickle.dumps(scored(flat=False, asked=[]))) == plain
    assert copy.deepcopy(scored(flat=False, asked=[])) == plain
    assert dataclasses.asdict(scored(flat=False, asked=[])) == dataclasses.asdict(plain)
    assert scored(flat=False, asked=[]) == plain
    assert scored(flat=False, asked=[]) != dataclasses.replace(plain, prompt_logprobs=None)
    assert repr(scored(flat=False, asked=[])) == repr(plain)
    with pytest.raises(dataclasses.FrozenInstanceError):
        output.prompt_logprobs = None  # type: ignore[misc]


def test_flat_log_probabilities_of_a_prompt() -> None:
    found = scored(flat=True, asked=[]).prompt_logprobs
    assert isinstance(found, FlatLogprobs)
    assert list(found) == [{}, AT_SEVEN, AT_FIVE, AT_FIVE]
    assert (found.start_indices, found.end_indices) == ([0, 0, 3, 5], [0, 3, 5, 7])
    assert all(type(one) is int for one in (*found.token_ids, *found.ranks, *found.start_indices, *found.end_indices))
    assert all(type(one) is float for one in found.logprobs)
    assert list(found[1:3]) == [AT_SEVEN, AT_FIVE]


@pytest.mark.parametrize("flat", [False, True])
def test_texts_of_a_prompts_tokens_are_made_when_its_log_probabilities_are_read(flat: bool) -> None:
    asked: list[int] = []
    output = scored(flat=flat, asked=asked)
    assert (output.prompt_token_ids, asked) == ([1, 7, 5, 5], [])
    first = output.prompt_logprobs
    count = len(asked)
    assert count == 7
    assert output.prompt_logprobs is first
    assert len(asked) == count


def test_several_threads_that_read_one_result_see_the_same() -> None:
    for _ in range(20):
        output = scored(flat=False, asked=[])
        with ThreadPoolExecutor(4) as pool:
            read = list(pool.map(lambda _, o=output: o.prompt_logprobs, range(4)))
        assert all(one is read[0] for one in read)
        assert len(read[0]) == 4


def test_the_best_completions_have_the_highest_log_probability_per_token() -> None:
    completions = [
        CompletionOutput(0, "long", [1, 2, 3, 4], cumulative_logprob=-4.0),
        CompletionOutput(1, "bad", [1], cumulative_logprob=-3.0),
        CompletionOutput(2, "short", [1, 2], cumulative_logprob=-1.0),
    ]
    assert [(c.index, c.text) for c in best_completions(completions, 2)] == [(0, "short"), (1, "long")]
    with pytest.raises(ValueError, match="completion 1"):
        best_completions([completions[0], CompletionOutput(1, "?", [1])], 1)


def test_cosines_are_within_their_bounds() -> None:
    """Rounding alone would take every fifth of these beyond."""
    random = np.random.default_rng(0)
    for _ in range(200):
        values = random.standard_normal(64, dtype=np.float32)
        one, other = (PoolingRequestOutput("a", PoolingOutput(data), [1]) for data in (values, -values))
        assert 0.9999 < cosine_score(one, one, ()).outputs.score <= 1
        assert -0.9999 > cosine_score(one, other, ()).outputs.score >= -1
