"""Every way of running a model gives transformers' tokens and logits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import (
    FALLBACK,
    LEAN,
    VARIANTS,
    Runner,
    assert_equals_transformers,
    open_and_load,
    save_tiny,
    tiny_config,
)

from hardpoint.interfaces import DType


@pytest.mark.parametrize("name", [*LEAN, *VARIANTS])
def test_lean_decoder_equals_transformers(name: str, tmp_path: Path) -> None:
    kind, options = {**LEAN, **VARIANTS}[name]
    reference = save_tiny(tmp_path, tiny_config(kind, **options))
    _, model, plan, attention = open_and_load(tmp_path)
    assert model.path == "lean"
    assert_equals_transformers(reference, Runner(model, plan, attention))


@pytest.mark.parametrize("name", FALLBACK)
def test_transformers_decoder_equals_transformers(name: str, tmp_path: Path) -> None:
    kind, options = FALLBACK[name]
    reference = save_tiny(tmp_path, tiny_config(kind, **options))
    _, model, plan, attention = open_and_load(tmp_path)
    assert model.path == "transformers"
    assert_equals_transformers(reference, Runner(model, plan, attention))


@pytest.mark.parametrize("name", ["llama", "mistral-window", "gemma2"])
def test_a_lean_family_also_runs_through_transformers(name: str, tmp_path: Path) -> None:
    kind, options = LEAN[name]
    reference = save_tiny(tmp_path, tiny_config(kind, **options))
    _, model, plan, attention = open_and_load(tmp_path, use_lean_decoder=False)
    assert model.path == "transformers"
    assert_equals_transformers(reference, Runner(model, plan, attention))


def test_feed_forward_biases_fall_back_to_transformers(tmp_path: Path) -> None:
    reference = save_tiny(tmp_path, tiny_config("llama", mlp_bias=True))
    _, model, plan, attention = open_and_load(tmp_path)
    assert model.path == "transformers"
    assert_equals_transformers(reference, Runner(model, plan, attention))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_argmax_and_hidden_agree_with_logits(name: str, tmp_path: Path) -> None:
    kind, options = {**LEAN, **FALLBACK}[name]
    reference = save_tiny(tmp_path, tiny_config(kind, **options))
    _, model, plan, attention = open_and_load(tmp_path)
    results = {
        output: Runner(model, plan, attention).step([(0, [3, 9, 27]), (1, [81, 5])], output)
        for output in ("logits", "argmax", "hidden")
    }
    assert results["argmax"].dtype == torch.int64
    assert results["argmax"].tolist() == results["logits"].argmax(dim=-1).tolist()
    head = reference.get_output_embeddings().weight.detach()
    torch.testing.assert_close(results["hidden"] @ head.T, results["logits"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_bfloat16_stays_close_to_float32(name: str, tmp_path: Path) -> None:
    kind, options = LEAN[name]
    reference = save_tiny(tmp_path, tiny_config(kind, **options))
    _, model, plan, attention = open_and_load(tmp_path, dtype=DType.BFLOAT16)
    logits = Runner(model, plan, attention).step([(0, list(range(3, 23)))])
    with torch.no_grad():
        exact = reference(input_ids=torch.tensor([list(range(3, 23))])).logits[0, -1]
        rounded = reference.bfloat16()(input_ids=torch.tensor([list(range(3, 23))])).logits[0, -1].float()
    ours, theirs = (logits[0] - exact).abs().mean(), (rounded - exact).abs().mean()
    assert ours < 1.5 * theirs
