"""A configuration is checked value by value, and two models are the same where they differ in their weights alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_models import NATIVE, describe, tiny_config
from transformers import AutoConfig

from hardpoint.interfaces import DType
from hardpoint.interfaces.errors import ModelError
from hardpoint.models import open_model
from hardpoint.models.config import ModelConfig
from hardpoint.models.description import ModelDescription
from hardpoint.models.registry import ARCHITECTURES as ARCHITECTURES_OF_THE_CORE
from hardpoint.models.registry import ENCODERS, family_of

ARCHITECTURES = {"llama": "Llama", "gemma2": "Gemma2", "granite": "Granite", "mistral-window": "Mistral"}


def description(name: str, **changes: Any) -> ModelDescription:
    kind, options = NATIVE[name]
    found = describe(f"{ARCHITECTURES[name]}ForCausalLM", tiny_config(kind, **{**options, **changes}))
    assert isinstance(found, ModelDescription), found
    return found


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("llama", {"rms_norm_eps": 1e-3}),
        ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"attention_bias": True}),
        ("llama", {"num_hidden_layers": 2}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}),
        ("mistral-window", {"sliding_window": 8}),
        ("gemma2", {"query_pre_attn_scalar": 25}),
        ("gemma2", {"final_logit_softcapping": 5.0}),
        ("gemma2", {"attn_logit_softcapping": 4.0}),
        ("granite", {"residual_multiplier": 0.8}),
        ("granite", {"embedding_multiplier": 2.0}),
        ("granite", {"logits_scaling": 3.0}),
        ("granite", {"attention_multiplier": 0.25}),
    ],
)
def test_models_that_compute_something_else_are_not_the_same(name: str, change: dict[str, Any]) -> None:
    model = description(name)
    assert model.computes_the_same(description(name))
    assert not model.computes_the_same(description(name, **change))


def test_numbers_in_single_precision_are_the_same() -> None:
    assert description("llama", rms_norm_eps=1e-5).computes_the_same(description("llama", rms_norm_eps=9.99999974e-6))


SIZES = {
    "vocab_size": 128,
    "hidden_size": 256,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 64,
    "max_position_embeddings": 64,
}
FAMILIES = {
    "Llama": "llama",
    "Llama4": "llama4_text",
    "Mistral": "mistral",
    "Mixtral": "mixtral",
    "Qwen2": "qwen2",
    "Qwen3": "qwen3",
    "Qwen2Moe": "qwen2_moe",
    "Qwen3Moe": "qwen3_moe",
    "Qwen3Next": "qwen3_next",
    "Qwen2_5_VL": "qwen2_5_vl_text",
    "GptOss": "gpt_oss",
    "DeepseekV2": "deepseek_v2",
    "DeepseekV3": "deepseek_v3",
    "Phi3": "phi3",
    "Olmo2": "olmo2",
    "Granite": "granite",
    "GraniteMoeHybrid": "granitemoehybrid",
    "FalconH1": "falcon_h1",
    "Lfm2": "lfm2",
    "NemotronH": "nemotron_h",
    "Gemma": "gemma",
    "Gemma2": "gemma2",
    "Gemma3": "gemma3_text",
}
NEEDED: dict[str, dict[str, Any]] = {
    "DeepseekV2": {"num_experts_per_tok": 2},
    "GraniteMoeHybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "NemotronH": {"layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"]},
    "Qwen2_5_VL": {"hidden_size": 8192},
}
BESIDE = {"Qwen2_5_VL": {"vision_config": {"out_hidden_size": 8192, "depth": 1}}}


@pytest.mark.parametrize("name", FAMILIES)
def test_what_a_configuration_leaves_out_is_as_transformers_has_it(name: str) -> None:
    sizes, beside = SIZES | NEEDED.get(name, {}), BESIDE.get(name, {})
    architecture = f"{name}For{'ConditionalGeneration' if beside else 'CausalLM'}"
    family = family_of(architecture)
    assert family is not None
    completed = AutoConfig.for_model(FAMILIES[name], **sizes).to_dict()
    ours, theirs = (
        ModelDescription.of(ModelConfig(architecture, family.complete(values | beside)), DType.FLOAT32)
        for values in (sizes, completed)
    )
    assert isinstance(ours, ModelDescription)
    assert isinstance(theirs, ModelDescription)
    assert ours.computes_the_same(theirs)


def test_a_mistral_has_a_window_unless_it_says_that_it_has_none() -> None:
    for changes, window in (({}, 4096), ({"sliding_window": None}, None), ({"sliding_window": 9}, 9)):
        family = family_of("MistralForCausalLM")
        assert family is not None
        config = ModelConfig("MistralForCausalLM", family.complete(SIZES | changes))
        described = ModelDescription.of(config, DType.FLOAT32)
        assert isinstance(described, ModelDescription)
        assert {layer.sliding_window for layer in described.whole.attention_layers()} == {window}


@pytest.mark.parametrize(
    ("kind", "architecture"),
    [("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration"), ("smolvlm", "SmolVLMForConditionalGeneration")],
)
@pytest.mark.parametrize("of_text", [{}, {"tie_word_embeddings": True}, {"tie_word_embeddings": False}])
@pytest.mark.parametrize("of_all", [{}, {"tie_word_embeddings": True}, {"tie_word_embeddings": False}])
def test_a_head_is_tied_where_transformers_reads_it_of_a_model_that_takes_pictures(
    kind: str, architecture: str, of_text: dict[str, Any], of_all: dict[str, Any], tmp_path: Path
) -> None:
    text = {**SIZES, "model_type": "qwen2_5_vl_text" if kind == "qwen2_5_vl" else "llama", **of_text}
    written = {"model_type": kind, "architectures": [architecture], "text_config": text, **of_all}
    (tmp_path / "config.json").write_text(json.dumps(written))
    theirs = AutoConfig.from_pretrained(tmp_path)
    assert open_model(str(tmp_path), load_format="dummy").model_config.tied is theirs.tie_word_embeddings


@pytest.mark.parametrize(
    "change",
    [
        {"num_hidden_layers": 0},
        {"hidden_size": "512"},
        {"hidden_size": 2**40},
        {"vocab_size": None},
        {"num_attention_heads": True},
        {"num_key_value_heads": 4},
        {"num_key_value_heads": -1},
        {"intermediate_size": 1.5},
        {"rms_norm_eps": float("nan")},
        {"rms_norm_eps": -1},
        {"head_dim": []},
        {"layer_types": ["full_attention"]},
        {"layer_types": "full_attention"},
        {"max_position_embeddings": float("inf")},
    ],
)
def test_impossible_values_are_model_errors_when_a_model_is_opened(tmp_path: Path, change: dict[str, Any]) -> None:
    tiny_config("llama").save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    written = {**json.loads(file.read_text()), "architectures": ["LlamaForCausalLM"], **change}
    file.write_text(json.dumps(written))
    with pytest.raises(ModelError, match=next(iter(change))):
        open_model(str(tmp_path), load_format="dummy")


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}


@pytest.mark.parametrize(
    "change",
    [
        {"sliding_window": "wide"},
        {"rope_parameters": "default"},
        {"rope_parameters": {"rope_type": "default", "rope_theta": "big"}},
        {"rope_parameters": {"rope_type": "llama3"}},
        *({"rope_parameters": {**YARN, name: "4"}} for name in (*YARN, "beta_fast", "mscale", "attention_factor")),
        {"rope_parameters": {**YARN, "beta_slow": -1}},
        {"rope_parameters": {**YARN, "rope_theta": 1}},
        {"rope_parameters": {**YARN, "rope_type": "llama3", "low_freq_factor": 0, "high_freq_factor": 4}},
        {"rope_parameters": {**LONG, "original_max_position_embeddings": 1}},
        {"rope_parameters": {**LONG, "factor": float("inf")}},
        {"tie_word_embeddings": "yes"},
        {"attention_bias": 3},
        {"original_max_position_embeddings": [1]},
    ],
)
def test_impossible_values_of_a_family_are_refused_before_anything_is_built(change: dict[str, Any]) -> None:
    values = {**tiny_config("mistral").to_dict(), **change}
    config = ModelConfig("LlamaForCausalLM", values)
    try:
        found = ModelDescription.of(config, DType.FLOAT32)
    except ModelError:
        return
    assert isinstance(found, ModelDescription) is ("sliding_window" in change)


RESULTS = {
    "id2label": {"0": "low", "1": "high"},
    "problem_type": "regression",
    "sentence_transformers": {"activation_fn": "torch.nn.Tanh"},
    "is_matryoshka": True,
    "matryoshka_dimensions": [4, 8],
    "use_sep_token": False,
    "classifier_from_token": ["no", "yes"],
    "method": "no_post_processing",
}
"""What `ModelSource.pooling_defaults` reads, which asks no family."""


@pytest.mark.parametrize("architecture", [*ARCHITECTURES_OF_THE_CORE, *ENCODERS])
@pytest.mark.parametrize("said", [{}, RESULTS], ids=["nothing", "all"])
def test_what_is_said_of_results_is_nothing_that_a_family_completes(architecture: str, said: dict[str, Any]) -> None:
    family = family_of(architecture)
    assert family is not None
    given = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64, "vocab_size": 99} | said
    completed = family.complete(given)
    names = [*RESULTS, "num_labels", "sbert_ce_default_activation_function", "hidden_size", "vocab_size"]
    assert {name: completed.get(name) for name in names} == {name: given.get(name) for name in names}
