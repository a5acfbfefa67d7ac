"""Greedy tokens of the demo model equal transformers'.

The oracle runs over the prompt and our tokens in one pass: that each of our tokens is the argmax of the oracle's logits before it
is, by induction, the same as equality with its own greedy decoding.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hardpoint import LLM

Generated = list[tuple[list[int], int]]
"""For each prompt its tokens and those that were generated, and how many are the prompt's."""


def _generate(llm: LLM, greedy: Any, prompts: list[str]) -> Generated:
    outputs = llm.generate(prompts, greedy(64))
    return [([*o.prompt_token_ids, *o.outputs[0].token_ids], len(o.prompt_token_ids)) for o in outputs]


@pytest.fixture(scope="module")
def in_float32(llm: LLM, greedy: Any, prompts: list[str]) -> Generated:
    return _generate(llm, greedy, prompts)


def test_float32_tokens_equal_the_oracles_on_20_prompts_of_64_tokens(
    in_float32: Generated, oracle_float32: Any
) -> None:
    assert len(in_float32) == 20
    for tokens, prompt_len in in_float32:
        assert len(tokens) - prompt_len == 64
        expected = oracle_float32.logits(tokens, prompt_len).argmax(dim=-1).tolist()
        assert tokens[prompt_len:] == expected


def test_bfloat16_tokens_equal_the_oracles_wherever_its_margin_exceeds_its_own_rounding_error(
    in_float32: Generated, make_engine: Any, greedy: Any, prompts: list[str], oracle_float32: Any, oracle_bfloat16: Any
) -> None:
    """The logit-margin rule.

    A token may differ from the float32 oracle's argmax only where the oracle prefers its own by less than twice the error that plain
    bfloat16 inference (transformers) makes at that position. Tokens that equal those of the test before are the oracle's own.
    """
    with make_engine(dtype="bfloat16") as llm:
        generated = _generate(llm, greedy, prompts)
    for (tokens, prompt_len), (known, _) in zip(generated, in_float32, strict=True):
        if tokens == known:
            continue
        exact = oracle_float32.logits(tokens, prompt_len)
        chosen = exact.gather(1, torch.tensor(tokens[prompt_len:])[:, None])[:, 0]
        margin = exact.max(dim=-1).values - chosen
        assert int((margin > 0).sum()) <= 8, "most tokens are the oracle's own"
        # What follows the last token that differs is within any bound, and plain bfloat16 inference takes seconds on a CPU.
        end = int(margin.nonzero().max()) + 1
        rounded = oracle_bfloat16.logits(tokens[: prompt_len + end], prompt_len)
        bound = 2 * (rounded - exact[:end]).abs().max(dim=-1).values
        assert bool((margin[:end] <= bound).all())
