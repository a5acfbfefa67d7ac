"""The same tokens whatever the batch, block size, chunk size, prefix cache, preemption, order and number of forks."""

from __future__ import annotations

from typing import Any

import pytest


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
    ],
)
def test_tokens_do_not_depend_on(
    settings: dict[str, Any], make_engine: Any, greedy: Any, prompts: list[str], reference_tokens: list[list[int]]
) -> None:
    with make_engine(**settings) as llm:
        assert _tokens(llm.generate(prompts, greedy())) == reference_tokens


def test_lean_modules_give_the_tokens_of_the_fused_decoder(
    make_engine: Any, greedy: Any, prompts: list[str], reference_tokens: list[list[int]]
) -> None:
    with make_engine(use_fused_decoder=False) as llm:
        assert llm.info.path == "lean"
        assert _tokens(llm.generate(prompts[:8], greedy(12))) == [tokens[:12] for tokens in reference_tokens[:8]]


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_tokens_survive_preemption(
    mode: str, make_engine: Any, greedy: Any, prompts: list[str], reference_tokens: list[list[int]]
) -> None:
    with make_engine(block_size=8, num_device_blocks=24, max_model_len=160, preemption_mode=mode) as llm:
        assert _tokens(llm.generate(prompts, greedy())) == reference_tokens
        assert llm.stats().preemptions > 0


def test_tokens_do_not_depend_on_order_and_are_found_in_the_prefix_cache(
    make_engine: Any, greedy: Any, prompts: list[str], reference_tokens: list[list[int]]
) -> None:
    with make_engine(block_size=8) as llm:
        backwards = _tokens(llm.generate(prompts[::-1], greedy()))[::-1]
        again = llm.generate(prompts, greedy())
        assert backwards == reference_tokens
        assert _tokens(again) == reference_tokens
        long_prompts = [o for o in again if len(o.prompt_token_ids) > 8]
        assert long_prompts
        assert all(o.num_cached_tokens >= 8 for o in long_prompts)


def test_forks_share_the_prompt_and_give_the_same_greedy_tokens(
    make_engine: Any, greedy: Any, prompts: list[str], reference_tokens: list[list[int]]
) -> None:
    with make_engine(block_size=8) as llm:
        for output, expected in zip(llm.generate(prompts[:6], greedy(n=3)), reference_tokens, strict=False):
            assert [list(fork.token_ids) for fork in output.outputs] == [expected] * 3


def test_seeded_sampling_does_not_depend_on_the_batch(make_engine: Any, prompts: list[str]) -> None:
    from hardpoint import SamplingParams

    params = SamplingParams(temperature=0.8, top_p=0.95, top_k=50, seed=7, max_tokens=16, ignore_eos=True, n=2)
    with make_engine() as llm:
        together = llm.generate(prompts[:6], params)
        alone = [llm.generate(prompt, params)[0] for prompt in prompts[:6]]
    assert [[o.token_ids for o in out.outputs] for out in together] == [
        [o.token_ids for o in out.outputs] for out in alone
    ]
    assert any(out.outputs[0].token_ids != out.outputs[1].token_ids for out in together), "forks draw for themselves"


def test_log_probabilities_are_the_same_bits_alone_and_in_a_batch(
    make_engine: Any, greedy: Any, prompts: list[str]
) -> None:
    with make_engine(dtype="bfloat16", enable_prefix_caching=False) as llm:
        together = llm.generate(prompts[:8], greedy(8, logprobs=3))
        alone = [llm.generate(prompt, greedy(8, logprobs=3))[0] for prompt in prompts[:8]]
    for one, many in zip(alone, together, strict=True):
        assert one.outputs[0].logprobs == many.outputs[0].logprobs
