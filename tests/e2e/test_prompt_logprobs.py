"""Log probabilities of a prompt's tokens equal transformers', however the prompt is computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

from hardpoint import LLM, SamplingParams
from hardpoint.engine.outputs import RequestOutput
from hardpoint_conformance.tiny_model import Model
from tests.e2e.conftest import SHALLOW, Oracle
from tests.e2e.test_invariance import PROMPTS

Make = Callable[..., AbstractContextManager[LLM]]

BEST = 3
BOUND = 1e-4
LONG = [*PROMPTS, {"prompt_token_ids": torch.arange(3, 203).tolist()}]


@pytest.fixture(scope="module")
def oracle(shallow: Model) -> Oracle:
    return Oracle.of(shallow)


@pytest.fixture(scope="module")
def expected(oracle: Oracle) -> list[torch.Tensor]:
    """Log probabilities float32[tokens - 1, vocab] of each prompt: row i is of token i + 1."""
    ids = [prompt["prompt_token_ids"] for prompt in LONG]
    return [oracle.logits(one, 1).log_softmax(-1) if len(one) > 1 else torch.empty(0, SHALLOW.vocab) for one in ids]


def check(outputs: Sequence[RequestOutput], expected: list[torch.Tensor], best: int = BEST) -> None:
    for output, reference in zip(outputs, expected, strict=True):
        assert output.prompt_logprobs is not None
        first, *others = output.prompt_logprobs
        assert first is None
        assert len(others) == len(reference) == len(output.prompt_token_ids) - 1
        for token, entry, row in zip(output.prompt_token_ids[1:], others, reference, strict=True):
            assert entry is not None
            assert next(iter(entry)) == token
            assert all(abs(one.logprob - float(row[each])) < BOUND for each, one in entry.items())
            assert abs(entry[token].rank - 1 - int((row > row[token]).sum())) <= 1
            best_of_row = row.topk(best).values if best else torch.empty(0)
            found = sorted((one.logprob for one in entry.values()), reverse=True)[:best]
            assert torch.allclose(torch.tensor(found), best_of_row, atol=BOUND)
            assert best <= len(entry) <= best + 1


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="whole"),
        pytest.param({"max_num_batched_tokens": 20, "max_num_seqs": 20}, id="chunks-within-20-tokens"),
        pytest.param({"max_num_seqs": 3, "use_fused_decoder": False}, id="modules"),
        pytest.param({"engine_process": True, "max_num_batched_tokens": 64, "max_num_seqs": 8}, id="engine-process"),
    ],
)
def test_they_equal_the_oracles(
    settings: dict[str, Any], make_shallow: Make, greedy: Any, expected: list[torch.Tensor]
) -> None:
    with make_shallow(**settings) as llm:
        check(llm.generate(LONG, greedy(2, prompt_logprobs=BEST)), expected)


def test_whatever_the_prefix_cache_holds(make_shallow: Make, greedy: Any, expected: list[torch.Tensor]) -> None:
    with make_shallow(block_size=8) as llm:
        plain = llm.generate(LONG, greedy(4))
        scored = llm.generate(LONG, greedy(4, prompt_logprobs=0))
        check(scored, expected, best=0)
        assert all(output.num_cached_tokens == 0 for output in scored)
        assert [o.outputs[0].token_ids for o in scored] == [o.outputs[0].token_ids for o in plain]
        assert all(output.prompt_logprobs is None for output in plain)
        # What they leave in the cache serves others.
        assert llm.generate(LONG[-1], greedy(4))[0].num_cached_tokens >= 8


@pytest.mark.parametrize("flat", [False, True], ids=["mappings", "flat"])
def test_from_a_position_on_with_what_the_prefix_cache_has_before_it(
    flat: bool, make_shallow: Make, greedy: Any, expected: list[torch.Tensor]
) -> None:
    prompt, start = LONG[-1], 150
    with make_shallow(block_size=8, max_num_batched_tokens=64, max_num_seqs=8) as llm:
        for cached in (0, 144):  # whole blocks of the 149 tokens that nothing is asked of
            (output,) = llm.generate(
                prompt, greedy(2, prompt_logprobs=0, prompt_logprobs_start=start, flat_logprobs=flat)
            )
            assert output.num_cached_tokens == cached
            found = output.prompt_logprobs
            assert found is not None
            assert not any(found[position] for position in range(start))
            values = [next(iter(found[position].values())).logprob for position in range(start, len(found))]
            rows = expected[-1][start - 1 :]
            reference = rows.gather(1, torch.tensor(prompt["prompt_token_ids"][start:])[:, None])[:, 0]
            assert torch.allclose(torch.tensor(values), reference, atol=BOUND)
        (output,) = llm.generate(prompt, greedy(2, prompt_logprobs=0, prompt_logprobs_start=999))
        assert output.prompt_logprobs == [None] * len(prompt["prompt_token_ids"])


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_preempted_prompts_and_forks(mode: str, make_shallow: Make, greedy: Any, expected: list[torch.Tensor]) -> None:
    small = {"max_num_batched_tokens": 24, "max_num_seqs": 24}
    with make_shallow(block_size=8, num_device_blocks=28, max_model_len=216, preemption_mode=mode, **small) as llm:
        check(llm.generate(LONG, greedy(24, n=2, prompt_logprobs=BEST)), expected)
        assert llm.stats().preemptions > 0


def test_a_prompt_whose_cache_was_lost_between_its_chunks(
    make_shallow: Make, greedy: Any, expected: list[torch.Tensor]
) -> None:
    with make_shallow(max_num_batched_tokens=64, max_num_seqs=8) as llm:
        llm.engine.add_request("long", LONG[-1], greedy(2, prompt_logprobs=BEST))
        llm.engine.step()
        llm.sleep(level=1, mode="keep")
        llm.wake_up()
        outputs: list[Any] = []
        while llm.engine.has_unfinished_requests():
            outputs = llm.engine.step() or outputs
        check(outputs[-1:], expected[-1:])


def test_of_different_counts_in_one_step(make_shallow: Make, greedy: Any, expected: list[torch.Tensor]) -> None:
    counts = [number % 3 for number in range(len(LONG))]
    with make_shallow(max_num_seqs=8) as llm:
        outputs = llm.generate(LONG, [greedy(2, prompt_logprobs=count) for count in counts])
    for output, reference, count in zip(outputs, expected, counts, strict=True):
        check([output], [reference], best=count)


def test_beside_requests_that_are_not_scored(make_shallow: Make, greedy: Any, expected: list[torch.Tensor]) -> None:
    with make_shallow(max_num_batched_tokens=64, max_num_seqs=8, enable_prefix_caching=False) as llm:
        params = [greedy(6, prompt_logprobs=BEST) if n % 2 else greedy(6, logprobs=2) for n in range(len(LONG))]
        together = llm.generate(LONG, params)
        check(together[1::2], expected[1::2])
        alone = llm.generate(LONG, greedy(6))
        assert [o.outputs[0].token_ids for o in together] == [o.outputs[0].token_ids for o in alone]


def test_texts_of_the_demo_model(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    (output,) = llm.generate(["The capital of France is Paris"], params)
    assert output.prompt_logprobs is not None
    last = output.prompt_logprobs[-1]
    assert last is not None
    assert [one.decoded_token for one in last.values()] == [" Paris"]
    assert next(iter(last.values())).rank == 1
