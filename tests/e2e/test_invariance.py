"""The same tokens whatever the batch, block size, chunk size, prefix cache, preemption, order, number of threads and of forks.

The model has layers of the demo's shapes, but few. That batches of the demo model itself give the tokens of its prompts alone is in
`test_oracle.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import accumulate
from typing import Any

import pytest
import torch

from hardpoint import LLM, SamplingParams
from tests.e2e.conftest import SHALLOW

Make = Callable[..., AbstractContextManager[LLM]]


def _prompts(lengths: list[int]) -> list[dict[str, list[int]]]:
    """Return seeded prompts of different lengths; those of every third begin alike."""
    tokens = torch.randint(3, SHALLOW.vocab, (sum(lengths),), generator=torch.Generator().manual_seed(0)).tolist()
    each = [tokens[end - length : end] for length, end in zip(lengths, accumulate(lengths), strict=True)]
    return [{"prompt_token_ids": (each[2][:9] if n % 3 == 2 else []) + ids} for n, ids in enumerate(each)]


PROMPTS = _prompts([5, 9, 17, 1, 12, 8, 7, 3, 16, 20, 11, 4, 2, 33, 6, 15, 10, 13, 31, 18])


@pytest.fixture(scope="module")
def alone(make_shallow: Make, greedy: Any) -> list[list[int]]:
    """Greedy tokens of every prompt served alone, in one chunk, without prefix cache."""
    with make_shallow(enable_prefix_caching=False, max_num_seqs=1) as llm:
        expected = [list(llm.generate(prompt, greedy())[0].outputs[0].token_ids) for prompt in PROMPTS]
    assert len({token for tokens in expected for token in tokens}) > 100, "not a model that repeats one token"
    return expected


def _tokens(outputs: Any) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"max_num_seqs": 3}, id="small-batches"),
        pytest.param({"block_size": 16}, id="block-size-16"),
        pytest.param({"block_size": 64}, id="block-size-64"),
        pytest.param({"max_num_batched_tokens": 20, "max_num_seqs": 20}, id="chunks-within-20-tokens"),
        pytest.param({"enable_prefix_caching": False}, id="no-prefix-cache"),
        pytest.param({"use_fused_decoder": False}, id="modules"),
    ],
)
def test_tokens_do_not_depend_on(
    settings: dict[str, Any], make_shallow: Make, greedy: Any, alone: list[list[int]]
) -> None:
    with make_shallow(**settings) as llm:
        assert llm.info.path == ("fused" if settings.get("use_fused_decoder", True) else "modules")
        assert _tokens(llm.generate(PROMPTS, greedy())) == alone


@pytest.mark.parametrize("is_fused", [True, False], ids=["fused", "modules"])
def test_tokens_do_not_depend_on_the_number_of_threads(
    is_fused: bool, make_shallow: Make, greedy: Any, alone: list[list[int]]
) -> None:
    with make_shallow(threads=3, use_fused_decoder=is_fused) as llm:
        try:
            assert _tokens(llm.generate(PROMPTS, greedy())) == alone
            llm.sleep()
            llm.wake_up()
            assert _tokens(llm.generate(PROMPTS, greedy())) == alone
        finally:
            with make_shallow(threads=1):
                pass  # the threads are the process's


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_tokens_survive_preemption(mode: str, make_shallow: Make, greedy: Any, alone: list[list[int]]) -> None:
    with make_shallow(block_size=8, num_device_blocks=24, max_model_len=160, preemption_mode=mode) as llm:
        assert _tokens(llm.generate(PROMPTS, greedy())) == alone
        assert llm.stats().preemptions > 0


def test_tokens_of_a_cache_in_8_bits_do_not_depend_on_the_batch_and_survive_swaps(
    make_shallow: Make, greedy: Any
) -> None:
    """Without a prefix cache, with which a prompt's end is computed by another kernel, whose last bits an 8-bit number may round apart."""
    narrow = {"kv_cache_dtype": "fp8", "enable_prefix_caching": False}
    with make_shallow(max_num_seqs=1, **narrow) as llm:
        assert llm.info.path == "fused"
        expected, kv_bytes = [_tokens(llm.generate(prompt, greedy()))[0] for prompt in PROMPTS], llm.info.kv_bytes
    with make_shallow(max_num_seqs=1) as llm:
        assert llm.info.kv_bytes == 4 * kv_bytes
    tight = {"block_size": 8, "num_device_blocks": 24, "max_model_len": 160, "preemption_mode": "swap"}
    with make_shallow(**narrow, **tight) as llm:
        assert _tokens(llm.generate(PROMPTS, greedy())) == expected
        assert llm.stats().preemptions > 0


def test_tokens_do_not_depend_on_order_and_are_found_in_the_prefix_cache(
    make_shallow: Make, greedy: Any, alone: list[list[int]]
) -> None:
    with make_shallow(block_size=8) as llm:
        backwards = _tokens(llm.generate(PROMPTS[::-1], greedy()))[::-1]
        again = llm.generate(PROMPTS, greedy())
        assert backwards == alone
        assert _tokens(again) == alone
        long_prompts = [o for o in again if len(o.prompt_token_ids) > 8]
        assert long_prompts
        assert all(o.num_cached_tokens >= 8 for o in long_prompts)


def test_forks_share_the_prompt_and_give_the_same_greedy_tokens(
    make_shallow: Make, greedy: Any, alone: list[list[int]]
) -> None:
    with make_shallow(block_size=8) as llm:
        for output, expected in zip(llm.generate(PROMPTS, greedy(n=3)), alone, strict=True):
            assert [list(fork.token_ids) for fork in output.outputs] == [expected] * 3


def test_seeded_sampling_does_not_depend_on_the_batch(make_shallow: Make) -> None:
    params = SamplingParams(temperature=0.8, top_p=0.95, top_k=50, seed=7, max_tokens=16, ignore_eos=True, n=2)
    with make_shallow() as llm:
        together = llm.generate(PROMPTS, params)
        alone = [llm.generate(prompt, params)[0] for prompt in PROMPTS]
    assert [[o.token_ids for o in out.outputs] for out in together] == [
        [o.token_ids for o in out.outputs] for out in alone
    ]
    assert any(out.outputs[0].token_ids != out.outputs[1].token_ids for out in together), "forks draw for themselves"


def test_log_probabilities_are_the_same_bits_alone_and_in_a_batch(make_shallow: Make, greedy: Any) -> None:
    with make_shallow(dtype="bfloat16", enable_prefix_caching=False) as llm:
        together = llm.generate(PROMPTS, greedy(8, logprobs=3))
        alone = [llm.generate(prompt, greedy(8, logprobs=3))[0] for prompt in PROMPTS]
    for one, many in zip(alone, together, strict=True):
        assert one.outputs[0].logprobs == many.outputs[0].logprobs
