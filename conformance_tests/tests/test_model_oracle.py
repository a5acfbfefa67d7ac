"""The oracle of whole models agrees with transformers, and its judgement finds wrong tokens and log probabilities."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from hardpoint.interfaces import DType, TokenLogprobs
from hardpoint_conformance.reference import hidden_states, judge, logits
from hardpoint_conformance.tiny_model import Shape, tiny_model

TEXT = [5, 99, 42, 7, 81, 3, 200, 18, 18, 64, 150, 11, 0, 255]
PROMPT = 9


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tied": True},
        {"window": 5},
        {"head_dim": 24, "heads": 6, "kv_heads": 3, "hidden": 48},
        {"heads": 2, "kv_heads": 2},
    ],
    ids=lambda changes: ",".join(changes) or "plain",
)
def test_the_oracle_agrees_with_transformers(changes: dict[str, Any]) -> None:
    from transformers import AutoModelForCausalLM

    model = tiny_model(Shape(**changes))
    theirs = AutoModelForCausalLM.from_pretrained(model.path, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        output = theirs(torch.tensor([TEXT]), output_hidden_states=True)
    (ours,) = logits(model, TEXT, torch.float64)
    torch.testing.assert_close(ours, output.logits[0].double(), rtol=0, atol=1e-4)
    torch.testing.assert_close(
        hidden_states(model, TEXT, torch.float64)[0], output.hidden_states[-1][0].double(), rtol=0, atol=1e-4
    )


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16])
def test_a_token_that_rounding_does_not_explain_is_found(dtype: DType) -> None:
    model = tiny_model(Shape())
    text = TEXT[:PROMPT]
    for _ in range(8):
        text.append(int(logits(model, text, dtype.to_torch())[0][-1].argmax()))
    judged = judge(model, text, PROMPT, dtype)
    assert judged.check() <= 1
    assert judged.decided > 0
    at = int((judged.exact.topk(2).values.diff().abs()[:, 0] > judged.margin).nonzero()[0])
    text[PROMPT + at] = int(judged.exact[at].topk(2).indices[1])
    with pytest.raises(AssertionError, match=f"token {at} is"):
        judge(model, text, PROMPT, dtype).check()


def test_tokens_outside_the_vocabulary_are_found() -> None:
    with pytest.raises(AssertionError, match="vocabulary"):
        judge(tiny_model(Shape()), [*TEXT, 256], PROMPT, DType.FLOAT32)


def test_wrong_log_probabilities_are_found() -> None:
    model = tiny_model(Shape())
    best = int(logits(model, TEXT, torch.float64)[0][-1].argmax())
    judged = judge(model, [*TEXT, best], len(TEXT), DType.FLOAT32)
    value = float(judged.exact[0].log_softmax(dim=-1)[best])

    def given(number: float) -> list[TokenLogprobs]:
        return [TokenLogprobs(np.array([best]), np.array([number], np.float32), 1)]

    assert judged.check_logprobs(given(value)) <= 1
    for wrong in (value + 1e-3, float("nan")):
        with pytest.raises(AssertionError):
            judged.check_logprobs(given(wrong))
