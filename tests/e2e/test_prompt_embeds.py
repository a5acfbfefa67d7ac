"""Prompts of embeddings: where they are those of tokens, the answers are those of the tokens, in whatever way they are computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from hardpoint import LLM, BeamSearchParams, PoolingParams, SamplingParams
from hardpoint.interfaces.errors import EmptyPrompt, InvalidRequest, InvalidSamplingParams, PromptTooLong
from hardpoint_conformance.tiny_model import Model

PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
TOKENS = [[5, 9, 22, 7] * 11, [3, 8, 1], [17] * 20 + [4]]


@pytest.fixture(scope="module")
def embedding(shallow: Model) -> torch.Tensor:
    return shallow.weights["model.embed_tokens.weight"].float()


@pytest.fixture(scope="module")
def llm(make_shallow: Callable[..., LLM]) -> Iterator[LLM]:
    with make_shallow(enable_prompt_embeds=True, max_num_batched_tokens=16, max_num_seqs=8) as made:
        yield made


def tokens(llm: LLM, prompts: list[Any], params: SamplingParams = PARAMS) -> list[list[list[int]]]:
    return [[list(one.token_ids) for one in output.outputs] for output in llm.generate(prompts, params)]


def test_embeddings_of_tokens_are_answered_as_the_tokens_alone_and_in_a_batch(
    llm: LLM, embedding: torch.Tensor
) -> None:
    ids = [{"prompt_token_ids": one} for one in TOKENS]
    rows: list[Any] = [{"prompt_embeds": embedding[one]} for one in TOKENS]
    expected = tokens(llm, ids)
    assert [tokens(llm, [one])[0] for one in rows] == expected
    assert tokens(llm, [*rows, *ids]) == expected * 2
    assert tokens(llm, [{"prompt_embeds": rows[0]["prompt_embeds"][None].numpy()}]) == expected[:1]
    found = llm.beam_search([*rows, *ids], BeamSearchParams(beam_width=2, max_tokens=4))
    beams = [[one.tokens[-4:] for one in output.sequences] for output in found]
    assert beams[:3] == beams[3:]


def test_equal_embeddings_share_a_prefix_and_others_do_not(llm: LLM, embedding: torch.Tensor) -> None:
    llm.reset_prefix_cache()
    rows = embedding[TOKENS[0] * 6].clone()
    (first,) = llm.generate({"prompt_embeds": rows}, PARAMS)
    (same,) = llm.generate({"prompt_embeds": rows.clone()}, PARAMS)
    (other,) = llm.generate({"prompt_embeds": rows + 1}, PARAMS)
    (ids,) = llm.generate({"prompt_token_ids": [0] * len(rows)}, PARAMS)
    (salted,) = llm.generate({"prompt_embeds": rows, "cache_salt": "a"}, PARAMS)
    assert [one.num_cached_tokens for one in (first, other, ids, salted)] == [0] * 4
    assert same.num_cached_tokens >= 128
    assert same.outputs[0].token_ids == first.outputs[0].token_ids


def test_a_request_keeps_the_embeddings_that_it_was_made_with(llm: LLM, embedding: torch.Tensor) -> None:
    rows = embedding[TOKENS[1]].clone()
    expected = tokens(llm, [{"prompt_embeds": rows}])
    llm.engine.add_request("a", {"prompt_embeds": rows}, PARAMS)
    rows.zero_()
    outputs = [one for _ in range(20) for one in llm.engine.step() if one.finished]
    assert [list(outputs[0].outputs[0].token_ids)] == expected[0]


def test_preempted_and_forked_requests_and_those_of_another_process_have_the_same_answers(
    make_shallow: Callable[..., LLM], llm: LLM, embedding: torch.Tensor
) -> None:
    params = SamplingParams(temperature=1, seed=4, n=2, max_tokens=40, ignore_eos=True)
    rows: list[Any] = [{"prompt_embeds": embedding[one]} for one in TOKENS]
    expected = tokens(llm, rows, params)
    with make_shallow(enable_prompt_embeds=True, num_device_blocks=12, swap_space=0, engine_process=True) as small:
        assert tokens(small, rows, params) == expected
        assert small.stats().preemptions > 0


@pytest.mark.parametrize(
    ("given", "error", "told"),
    [
        (torch.zeros(4, 3), InvalidRequest, "must be a tensor"),
        (torch.zeros(2, 4, 576), InvalidRequest, "must be a tensor"),
        ("text", InvalidRequest, "must be a tensor"),
        (torch.zeros(0, 576), EmptyPrompt, "at least one row"),
        (torch.zeros(1, 576).expand(1 << 40, 576), PromptTooLong, "embeddings"),
        (torch.zeros(4, 576, dtype=torch.int64), InvalidRequest, "floating-point"),
        (torch.zeros(4, 576).to_sparse(), InvalidRequest, "dense"),
        (torch.zeros(4, 576, device="meta"), InvalidRequest, "cannot be read"),
        (torch.full((4, 576), torch.nan), InvalidRequest, "no finite numbers"),
        (np.full((4, 576), "x"), InvalidRequest, "cannot be read"),
    ],
)
def test_what_is_no_embedding_of_the_model_is_one_typed_error(
    llm: LLM, embedding: torch.Tensor, given: Any, error: type[Exception], told: str
) -> None:
    assert embedding.shape[1] == 576
    with pytest.raises(error, match=told):
        llm.generate({"prompt_embeds": given}, PARAMS)


def test_what_embeddings_do_not_have_is_refused(
    llm: LLM, make_shallow: Callable[..., LLM], embedding: torch.Tensor
) -> None:
    rows = {"prompt_embeds": embedding[TOKENS[1]]}
    with pytest.raises(InvalidSamplingParams, match="prompt_logprobs with prompt_embeds"):
        llm.generate(rows, SamplingParams(prompt_logprobs=1))
    with pytest.raises(InvalidRequest, match="is not cut"):
        llm.generate(rows, SamplingParams(truncate_prompt_tokens=2))
    with pytest.raises(InvalidRequest, match="pooled are text"):
        llm.embed(rows, PoolingParams())
    with pytest.raises(InvalidRequest, match="Give one of"):
        llm.generate({**rows, "prompt_token_ids": [1]}, PARAMS)
    with make_shallow() as other, pytest.raises(InvalidRequest, match="enable_prompt_embeds=True"):
        other.generate(rows, PARAMS)
