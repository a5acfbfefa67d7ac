"""What SamplingParams accepts, refuses, and hands to the worker."""

from __future__ import annotations

import copy
import math
import pickle
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from hardpoint.interfaces.errors import InvalidRequest, InvalidSamplingParams
from hardpoint.sampling import RequestOutputKind, SamplingParams


def test_defaults_are_vllms() -> None:
    params = SamplingParams()
    assert (params.n, params.best_of, params.temperature, params.max_tokens) == (1, None, 1.0, 16)
    assert (params.top_p, params.top_k, params.min_p) == (1.0, 0, 0.0)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.0, 0.0, 1.0)
    assert params.output_kind is RequestOutputKind.CUMULATIVE
    assert params.detokenize
    assert params.skip_special_tokens


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ({"temperature": -0.1}, ["temperature", "-0.1", "[0, infinity)"]),
        ({"temperature": math.nan}, ["temperature", "nan"]),
        ({"temperature": math.inf}, ["temperature", "inf"]),
        ({"temperature": "hot"}, ["temperature", "'hot'"]),
        ({"top_p": 0.0}, ["top_p", "0.0", "(0, 1]"]),
        ({"top_p": 1.01}, ["top_p", "1.01", "(0, 1]"]),
        ({"top_p": math.nan}, ["top_p", "nan"]),
        ({"top_k": -2}, ["top_k", "-2", "at least 0", "-1"]),
        ({"top_k": 1.5}, ["top_k", "1.5"]),
        ({"min_p": -0.01}, ["min_p", "-0.01", "[0, 1]"]),
        ({"min_p": 1.5}, ["min_p", "1.5"]),
        ({"presence_penalty": 2.5}, ["presence_penalty", "2.5", "[-2, 2]"]),
        ({"frequency_penalty": -2.5}, ["frequency_penalty", "-2.5", "[-2, 2]"]),
        ({"repetition_penalty": 0.0}, ["repetition_penalty", "0.0", "(0, infinity)"]),
        ({"repetition_penalty": -1.0}, ["repetition_penalty", "-1.0"]),
        ({"n": 0}, ["n ", "0", "at least 1"]),
        ({"n": True}, ["n ", "True"]),
        ({"n": 3, "best_of": 2}, ["n=3", "best_of=2"]),
        ({"best_of": 2, "temperature": 0}, ["best_of=2", "temperature"]),
        ({"best_of": 2, "output_kind": RequestOutputKind.DELTA}, ["best_of", "DELTA"]),
        ({"max_tokens": 0}, ["max_tokens", "0", "at least 1"]),
        ({"min_tokens": -1}, ["min_tokens", "-1"]),
        ({"min_tokens": 17}, ["min_tokens=17", "max_tokens=16"]),
        ({"prompt_logprobs": 101}, ["prompt_logprobs", "101", "100"]),
        ({"bad_words": [" "]}, ["bad_words", "empty"]),
        ({"bad_words": ["x"] * 10_001}, ["bad_words", "at most 10000 texts", "10001 texts of 10001 characters"]),
        ({"bad_words": ["x" * 300_000]}, ["bad_words", "262144 characters", "1 text of 300000 characters"]),
        ({"stop": ["ab"] * 10_001}, ["stop must", "at most 10000 texts", "10001 texts of 20002 characters"]),
        ({"stop": "x" * 300_000}, ["stop must", "262144 characters", "1 text of 300000 characters"]),
        ({"logprobs": -2}, ["logprobs", "-1"]),
        ({"truncate_prompt_tokens": -2}, ["truncate_prompt_tokens", "-1"]),
        ({"logits_processors": [len, 5]}, ["logits_processors[1]", "a function", "5"]),
        ({"logits_processors": len}, ["logits_processors", "a list"]),
        ({"stop": ["x", ""]}, ["stop", "empty"]),
        ({"stop": [1]}, ["stop[0]", "text", "1"]),
        ({"stop": 1}, ["stop", "a text", "a list", "None"]),
        ({"bad_words": "no"}, ["bad_words", "a list", "'no'"]),
        ({"stop_token_ids": [5, 2**31]}, ["stop_token_ids[1]", "2147483648", "at most 2147483647"]),
        ({"stop_token_ids": 5}, ["stop_token_ids", "a list"]),
        ({"logit_bias": [(1, 2.0)]}, ["logit_bias", "a mapping"]),
        ({"logit_bias": {"1": 2.0}}, ["a key of logit_bias", "an integer", "'1'"]),
        ({"logit_bias": {1: "2"}}, ["logit_bias[1]", "a number", "'2'"]),
        ({"logit_bias": {10**5000: 1.0}}, ["a key of logit_bias", "at most 2147483647"]),
        ({"skip_special_tokens": None}, ["skip_special_tokens", "True or False"]),
        ({"detokenize": 1}, ["detokenize", "True or False"]),
        ({"ignore_eos": "yes"}, ["ignore_eos", "True or False"]),
        ({"max_tokens": 2**70}, ["max_tokens", "at most 2147483647"]),
        ({"top_k": 2**70}, ["top_k", "at most 2147483647"]),
        ({"temperature": 1e308}, ["temperature", "1e+308", "at most 3.4"]),
        ({"temperature": 10**400}, ["temperature", "a number"]),
        ({"repetition_penalty": 1e-45}, ["repetition_penalty", "1e-45", "at least 1.18e-38"]),
        ({"repetition_penalty": 1e39}, ["repetition_penalty", "at most 3.4"]),
        ({"top_p": 1e-46}, ["top_p", "1e-46", "at least 1.18e-38"]),
        ({"seed": 2**63}, ["seed", "9223372036854775808", "in -9223372036854775808..9223372036854775807"]),
        ({"seed": -(2**63) - 1}, ["seed", "-9223372036854775809", "in -9223372036854775808..9223372036854775807"]),
        ({"seed": "5"}, ["seed", "an integer", "'5'"]),
        ({"temprature": 1.0}, ["'temprature'", "not a sampling parameter", "Did you mean 'temperature'?"]),
        ({"stop": "x", "detokenize": False}, ["stop", "detokenize", "stop_token_ids"]),
        ({"stop_token_ids": [-1]}, ["stop_token_ids", "-1"]),
        ({"allowed_token_ids": []}, ["allowed_token_ids", "at least one"]),
        ({"logit_bias": {1: math.nan}}, ["logit_bias[1]", "nan", "[-100, 100]"]),
        ({"logit_bias": {-3: 1.0}}, ["logit_bias", "-3"]),
        ({"seed": 1.5}, ["seed", "1.5"]),
        ({"output_kind": "delta"}, ["output_kind", "'delta'"]),
    ],
)
def test_illegal_values_are_refused_with_name_value_and_range(values: dict[str, Any], names: list[str]) -> None:
    with pytest.raises(InvalidSamplingParams) as refusal:
        SamplingParams(**values)
    assert all(name in str(refusal.value) for name in names), str(refusal.value)
    assert isinstance(refusal.value, InvalidRequest)
    assert isinstance(refusal.value, ValueError)


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": 0},
        {"top_p": 1},
        {"top_k": -1},
        {"n": 2, "best_of": 3},
        {"n": 3, "temperature": 0},
        {"max_tokens": None, "min_tokens": 1000},
        {"stop": "\n", "stop_token_ids": None, "logit_bias": None, "bad_words": None},
        {"seed": -7},
        {"seed": 2**63 - 1},
        {"seed": -(2**63)},
        {
            "stop_token_ids": np.array([5, 6]),
            "temperature": np.float32(0.5),
            "top_k": np.int64(5),
            "ignore_eos": np.True_,
        },
        {"allowed_token_ids": range(3), "logit_bias": MappingProxyType({np.int32(3): 1})},
        {"output_kind": 2},
        {"stop": ["x"] * 10_000, "bad_words": [*["x"] * 9_999, "y" * 250_000]},
    ],
)
def test_legal_edges_are_accepted(values: dict[str, Any]) -> None:
    SamplingParams(**values)


def test_values_are_kept_as_pythons_own() -> None:
    params = SamplingParams(
        temperature=1, stop_token_ids=np.array([5, 6]), stop=["a"], logit_bias=None, top_k=np.int64(5)
    )
    assert (params.temperature, params.stop_token_ids, params.stop, params.logit_bias, params.top_k) == (
        1.0,
        [5, 6],
        ["a"],
        {},
        5,
    )
    assert [type(value) for value in (params.temperature, params.stop_token_ids, params.top_k)] == [float, list, int]
    assert pickle.loads(pickle.dumps(params)) == params


def test_one_stop_text_may_be_given_as_a_string() -> None:
    assert SamplingParams(stop="END").stop_texts == ("END",)
    assert SamplingParams(stop=["a", "b"]).stop_texts == ("a", "b")
    assert SamplingParams(stop=None).stop_texts == ()


def test_lists_are_lists_as_vllms_users_know_them() -> None:
    params = SamplingParams()
    assert (params.stop, params.stop_token_ids, params.bad_words, params.allowed_token_ids) == ([], [], [], None)
    for given in (("a", "b"), ["a", "b"]):
        params = SamplingParams(stop=given, bad_words=given, stop_token_ids=(3, 2), allowed_token_ids=(9, 7, 9))
        assert (params.stop, params.bad_words) == (["a", "b"], ["a", "b"])
        assert (params.stop_token_ids, params.allowed_token_ids) == ([3, 2], [7, 9])
    assert SamplingParams(stop="a").stop == ["a"]
    params.stop = None
    assert params.stop == []


def test_clone_changes_only_what_it_is_told_and_checks_it() -> None:
    params = SamplingParams(temperature=0.5, stop="x", seed=3)
    changed = params.clone(max_tokens=99)
    assert changed.max_tokens == 99
    assert changed.clone(max_tokens=16) == params
    with pytest.raises(InvalidSamplingParams, match="top_p"):
        params.clone(top_p=2.0)
    same = params.clone(seed=3)
    same.seed = 4
    assert (params.seed, same.clone(seed=3)) == (3, params)
    with pytest.raises(InvalidSamplingParams, match="tempature"):
        params.clone(tempature=0.5)


def test_a_clone_shares_nothing_that_can_change_and_is_checked_where_something_has_changed() -> None:
    bias = {3: 1.0}
    params = SamplingParams(logit_bias=bias)
    copy = params.clone()
    assert copy == params
    params.logit_bias[3] = 1000.0
    assert copy.logit_bias == {3: 1.0}
    with pytest.raises(InvalidSamplingParams, match="logit_bias"):
        params.clone()


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("stop", []),
        ("stop", ["x"]),
        ("bad_words", []),
        ("bad_words", ["x"]),
        ("stop_token_ids", []),
        ("stop_token_ids", [3]),
        ("allowed_token_ids", [3]),
    ],
)
def test_a_clone_shares_no_list_and_is_checked_where_one_has_changed(name: str, given: list[Any]) -> None:
    params = SamplingParams(**{name: given})
    copy = params.clone()
    given.append(None)
    assert copy == params == params.clone()
    getattr(params, name).append(None)
    assert copy == SamplingParams(**{name: given[:-1]})
    with pytest.raises(InvalidSamplingParams, match=name):
        params.clone()


@pytest.mark.parametrize(
    "values",
    [{"stop_token_ids": [100]}, {"logit_bias": {100: 1.0}}, {"allowed_token_ids": [3, 100]}, {"logprobs": 101}],
)
def test_vocabulary_bounds_are_checked_when_it_is_known(values: dict[str, Any]) -> None:
    params = SamplingParams(**values)
    params.check_vocab(101)
    with pytest.raises(InvalidSamplingParams, match="100"):
        params.check_vocab(100)


def test_many_ids_outside_the_vocabulary_are_a_short_error() -> None:
    with pytest.raises(InvalidSamplingParams, match=r"tokens in 0\.\.99") as caught:
        SamplingParams(stop_token_ids=range(100, 100_000)).check_vocab(100)
    assert len(str(caught.value)) < 1000


def test_stop_tokens_are_the_requests_own_and_the_models_unless_ignored() -> None:
    assert SamplingParams(stop_token_ids=[7]).all_stop_token_ids([2]) == {2, 7}
    assert SamplingParams(stop_token_ids=[7], ignore_eos=True).all_stop_token_ids([2]) == {7}


def test_forks_have_distinct_seeds_that_follow_from_the_requests() -> None:
    params = SamplingParams(n=50, seed=1234)
    seeds = [params.to_sequence_sampling(i, [1], i, 0, []).seed for i in range(50)]
    assert len(set(seeds)) == 50
    assert seeds == [params.to_sequence_sampling(9, [1], i, 77, []).seed for i in range(50)]
    assert seeds[0] == SamplingParams(seed=1234).to_sequence_sampling(0, [1], 0, 0, []).seed


def test_the_default_seed_counts_only_where_none_is_given() -> None:
    seeds = {SamplingParams().to_sequence_sampling(0, [1], 0, default, []).seed for default in range(10)}
    assert len(seeds) == 10


def test_temperatures_too_small_to_divide_by_are_greedy() -> None:
    assert SamplingParams(temperature=1e-6).to_sequence_sampling(0, [1], 0, 0, []).is_pure_greedy
    assert not SamplingParams(temperature=1e-4).to_sequence_sampling(0, [1], 0, 0, []).is_pure_greedy


def test_best_of_asks_for_the_log_probabilities_it_ranks_by() -> None:
    assert SamplingParams(n=1, best_of=3).to_sequence_sampling(0, [1], 0, 0, []).logprobs == 0
    assert SamplingParams(n=3, best_of=3).to_sequence_sampling(0, [1], 0, 0, []).logprobs is None


def test_allowing_only_stop_tokens_contradicts_min_tokens() -> None:
    params = SamplingParams(allowed_token_ids=[2], min_tokens=1)
    params.to_sequence_sampling(0, [1], 0, 0, [])
    with pytest.raises(InvalidSamplingParams, match="min_tokens=1"):
        params.to_sequence_sampling(0, [1], 0, 0, [2])


def test_allowing_only_bad_words_is_a_contradiction() -> None:
    params = SamplingParams(allowed_token_ids=[2, 7], min_tokens=1)
    params.to_sequence_sampling(0, [1], 0, 0, [], bad_words=[(7,), (2, 3)])
    with pytest.raises(InvalidSamplingParams, match="bad words"):
        params.to_sequence_sampling(0, [1], 0, 0, [], bad_words=[(7,), (2,)])
    with pytest.raises(InvalidSamplingParams, match="min_tokens=1"):
        params.to_sequence_sampling(0, [1], 0, 0, [2], bad_words=[(7,)])


def test_a_parameter_that_is_set_is_checked_and_a_refused_one_changes_nothing() -> None:
    params = SamplingParams(stop="a", min_tokens=2)
    params.max_tokens = 5
    params.stop = "b"
    params.logit_bias = None
    assert params == SamplingParams(stop=["b"], min_tokens=2, max_tokens=5)
    for name, value in {"max_tokens": 1, "temperature": -1, "top_k": "x", "max_token": 3}.items():
        with pytest.raises(InvalidSamplingParams, match="max_tokens" if "max" in name else name):
            setattr(params, name, value)
    assert (
        pickle.loads(pickle.dumps(params)) == copy.copy(params) == SamplingParams(stop="b", min_tokens=2, max_tokens=5)
    )
