"""Every way of running a model gives transformers' tokens and logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import (
    ALTERNATING,
    FALLBACK,
    HYBRIDS,
    NATIVE,
    PICTURES,
    VARIANTS,
    Runner,
    assert_equals_transformers,
    edit_config,
    open_and_load,
    save_tiny,
    tiny_config,
)
from transformers import AutoConfig, AutoModelForCausalLM

from hardpoint.interfaces import DType, Refusal
from hardpoint.interfaces.errors import UnsupportedArchitecture
from hardpoint.models import ModelSource


@pytest.mark.parametrize("name", [*NATIVE, *VARIANTS])
def test_lean_decoder_equals_transformers(name: str, tmp_path: Path) -> None:
    kind, options = {**NATIVE, **VARIANTS}[name]
    reference = save_tiny(tmp_path, tiny_config(kind, **options))
    _, model, plan, attention = open_and_load(tmp_path)
    assert model.path == "modules"
    assert_equals_transformers(reference, Runner(model, plan, attention))


@pytest.mark.parametrize("name", HYBRIDS)
def test_mixers_have_the_activation_that_the_configuration_says(name: str, tmp_path: Path) -> None:
    kind, options = NATIVE[name]
    setting = "mamba_hidden_act" if name == "nemotron-h" else "hidden_act"
    reference = save_tiny(tmp_path, tiny_config(kind, **{**options, setting: "gelu_new"}))
    _, model, plan, attention = open_and_load(tmp_path)
    assert_equals_transformers(reference, Runner(model, plan, attention), steps=2)


def test_nemotron_h_has_a_head_of_its_own_whatever_it_says(tmp_path: Path) -> None:
    kind, options = NATIVE["nemotron-h"]
    reference = save_tiny(tmp_path, tiny_config(kind, **{**options, "tie_word_embeddings": True}))
    _, model, plan, attention = open_and_load(tmp_path)
    assert_equals_transformers(reference, Runner(model, plan, attention), steps=2)


@pytest.mark.parametrize("types", [ALTERNATING, ["full_attention"] * 3])
def test_a_mistral_whose_layers_differ_is_transformers_ministral(types: list[str], tmp_path: Path) -> None:
    save_tiny(tmp_path, tiny_config("mistral", sliding_window=6))
    edit_config(tmp_path, layer_types=types)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    _, model, plan, attention = open_and_load(tmp_path)
    windows = [layer.sliding_window for layer in plan.request.layers]
    assert windows == [6 if kind == "sliding_attention" else None for kind in types]
    assert_equals_transformers(reference.eval(), Runner(model, plan, attention))


LINEAR = {"rope_type": "linear", "factor": 3.0}
OTHER_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    ("name", "change"),
    [
        pytest.param("llama", {"hidden_activation": "gelu_new"}, id="activation-is-hidden-act"),
        pytest.param("gemma", {"hidden_activation": "silu"}, id="gemma-activation-is-hidden-act"),
        pytest.param("gemma3", {"attn_logit_softcapping": 1.0}, id="gemma3-caps-no-scores"),
        pytest.param("llama", {"rope_scaling": LINEAR, "rope_theta": 5e3}, id="rope-scaling-before-rope-parameters"),
        pytest.param("gpt-oss", {"rope_parameters": {}}, id="empty-rope-parameters-scale-nothing"),
        pytest.param(
            "gemma3",
            {
                "rope_parameters": {"full_attention": OTHER_YARN, "sliding_attention": {"rope_type": "default"}},
                "original_max_position_embeddings": 40,
            },
            id="types-of-layers-have-their-own-original-length",
        ),
        pytest.param("deepseek-v2", {"rope_interleave": False}, id="deepseek-v2-rotates-neighbours"),
        pytest.param("deepseek-v2", {"topk_group": 1}, id="experts-outside-the-best-groups-count-nothing"),
        pytest.param("deepseek-v3", {"rope_interleave": None}, id="null-is-false-to-deepseek-v3"),
        pytest.param("falcon-h1", {"mamba_norm_before_gate": None}, id="null-is-false-to-falcon-h1"),
    ],
)
def test_settings_count_where_transformers_reads_them(name: str, change: dict[str, Any], tmp_path: Path) -> None:
    kind, options = NATIVE[name]
    save_tiny(tmp_path, tiny_config(kind, **options))
    edit_config(tmp_path, **change)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    _, model, plan, attention = open_and_load(tmp_path)
    assert model.path == "modules"
    assert_equals_transformers(reference.eval(), Runner(model, plan, attention))


@pytest.mark.parametrize("name", ["llama", "olmo"])
def test_attention_to_both_sides_is_never_computed_as_causal(name: str, tmp_path: Path) -> None:
    kind, options = {**NATIVE, **FALLBACK}[name]
    save_tiny(tmp_path, tiny_config(kind, **options))
    edit_config(tmp_path, is_causal=False)
    with pytest.raises(UnsupportedArchitecture, match="its attention is not causal"):
        open_and_load(tmp_path)


@pytest.mark.parametrize("name", FALLBACK)
def test_transformers_decoder_equals_transformers(name: str, tmp_path: Path) -> None:
    kind, options = FALLBACK[name]
    reference = save_tiny(tmp_path, tiny_config(kind, **options))
    _, model, plan, attention = open_and_load(tmp_path)
    assert model.path == "transformers"
    assert_equals_transformers(reference, Runner(model, plan, attention))


@pytest.mark.parametrize("kind", PICTURES)
def test_of_a_model_that_takes_pictures_transformers_code_runs_the_language_model(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reference = save_tiny(tmp_path, AutoConfig.for_model(kind, **PICTURES[kind]))
    _, model, plan, attention = open_and_load(tmp_path)
    assert model.path == "transformers"
    assert "runs on text alone" in caplog.text
    assert_equals_transformers(reference, Runner(model, plan, attention))


@pytest.mark.parametrize("name", ["llama", "mistral-window", "gemma2"])
def test_a_native_family_also_runs_through_transformers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ModelSource, "describe", lambda source, dtype: Refusal(("as of no family",)))
    kind, options = NATIVE[name]
    reference = save_tiny(tmp_path, tiny_config(kind, **options))
    _, model, plan, attention = open_and_load(tmp_path)
    assert model.path == "transformers"
    assert_equals_transformers(reference, Runner(model, plan, attention))


def test_feed_forward_biases_fall_back_to_transformers(tmp_path: Path) -> None:
    reference = save_tiny(tmp_path, tiny_config("llama", mlp_bias=True))
    _, model, plan, attention = open_and_load(tmp_path)
    assert model.path == "transformers"
    assert_equals_transformers(reference, Runner(model, plan, attention))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_argmax_and_hidden_agree_with_logits(name: str, tmp_path: Path) -> None:
    kind, options = {**NATIVE, **FALLBACK}[name]
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
    kind, options = NATIVE[name]
    reference = save_tiny(tmp_path, tiny_config(kind, **options))
    _, model, plan, attention = open_and_load(tmp_path, dtype=DType.BFLOAT16)
    logits = Runner(model, plan, attention).step([(0, list(range(3, 23)))])
    with torch.no_grad():
        exact = reference(input_ids=torch.tensor([list(range(3, 23))])).logits[0, -1]
        rounded = reference.bfloat16()(input_ids=torch.tensor([list(range(3, 23))])).logits[0, -1].float()
    ours, theirs = (logits[0] - exact).abs().mean(), (rounded - exact).abs().mean()
    assert ours < 1.5 * theirs
