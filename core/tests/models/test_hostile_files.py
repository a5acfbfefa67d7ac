"""Whatever a model's JSON files say, opening and describing it is right or one typed error."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tiny_models import LLAMA4, NATIVE

from hardpoint.interfaces import DType
from hardpoint.interfaces.errors import HardpointError, ModelError
from hardpoint.models import open_model

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "eos_token_id": 2,
}
GEMMA = LLAMA | {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "query_pre_attn_scalar": 16,
    "sliding_window": 32,
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e6}},
    "final_logit_softcapping": 30.0,
}
FOREIGN = LLAMA | {"architectures": ["OlmoForCausalLM"], "model_type": "olmo"}

HOSTILE = [
    *(
        None,
        True,
        False,
        0,
        -1,
        1,
        7,
        2**31 - 1,
        2**31,
        2**63,
        2**70,
        10**400,
        0.5,
        -0.5,
        1e-45,
        1e308,
        math.nan,
        math.inf,
        -math.inf,
    ),
    *(
        "",
        "x",
        "512",
        "\ud800",
        "\0",
        [],
        [None],
        [[]],
        [2**70],
        ["x", 5],
        {},
        {"x": 1},
        {"rope_type": 5},
        {"factor": math.nan},
    ),
]


def describe(folder: Path) -> None:
    """Do what an engine does before it reads weights."""
    source = open_model(str(folder), load_format="dummy")
    dtype = source.dtype
    assert isinstance(dtype, DType)
    assert source.vocab_size > 0
    assert source.max_model_len > 0
    assert all(0 <= token < 2**31 for token in source.eos_token_ids)
    source.attention_layers()
    source.describe(dtype)


@pytest.mark.parametrize("config", [LLAMA, GEMMA, FOREIGN], ids=lambda config: config["model_type"])
def test_every_value_of_a_configuration(config: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    describe(tmp_path)
    refused = 0
    hostile = HOSTILE if config is not FOREIGN else HOSTILE[::5]  # transformers' own reading takes 50 ms
    for name in [*config, "quantization_config", "dtype", "rope_scaling", "partial_rotary_factor", "text_config"]:
        for value in hostile:
            file.unlink()  # one that is cut and not new is written to the disk at once
            file.write_text(json.dumps(config | {name: value}))
            try:
                describe(tmp_path)
            except HardpointError as error:
                str(error).encode()
                refused += 1
    assert refused > 60


OWN_SIZES: dict[str, tuple[str, dict[str, Any]]] = {
    "LfmOfBefore": ("Lfm2ForCausalLM", {**NATIVE["lfm2"][1], "full_attn_idxs": [1], "block_ff_dim": 80}),
    "Qwen3Next": ("Qwen3NextForCausalLM", NATIVE["qwen3-next"][1]),
    "GraniteHybrid": (
        "GraniteMoeHybridForCausalLM",
        {**NATIVE["granite-hybrid"][1], "mamba_n_heads": 8, "time_step_limit": [0.0, math.inf]},
    ),
    "FalconH1": ("FalconH1ForCausalLM", NATIVE["falcon-h1"][1]),
    "NemotronH": ("NemotronHForCausalLM", {**NATIVE["nemotron-h"][1], "num_hidden_layers": 4}),
    "NemotronOfBefore": ("NemotronHForCausalLM", {"hybrid_override_pattern": "M*-", "n_groups": 1}),
    "DeepseekV3": ("DeepseekV3ForCausalLM", {**NATIVE["deepseek-v3"][1], "num_nextn_predict_layers": 1}),
    "DeepseekV2": ("DeepseekV2ForCausalLM", NATIVE["deepseek-v2"][1]),
    "Llama4": ("Llama4ForCausalLM", LLAMA4),
}
"""Configurations with names of their own: architecture, and what it adds to the usual shape."""


@pytest.mark.parametrize("name", OWN_SIZES)
def test_every_value_that_a_family_has_for_itself(name: str, tmp_path: Path) -> None:
    architecture, own = OWN_SIZES[name]
    config: dict[str, Any] = {**LLAMA, "num_hidden_layers": 3, "architectures": [architecture], **own}
    if name == "LfmOfBefore":
        del config["layer_types"]
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    describe(tmp_path)
    refused = 0
    for key in own:
        for value in HOSTILE:
            file.unlink()  # one that is cut and not new is written to the disk at once
            file.write_text(json.dumps(config | {key: value}))
            try:
                describe(tmp_path)
            except HardpointError as error:
                str(error).encode()
                refused += 1
    assert refused > 20


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(
    "content", ["", "[", "5", "[]", "null", '"x"', "\x00", "[" * 100_000, '{"a": ' * 100_000, "9" * 10_000]
)
def test_files_that_are_no_objects(name: str, content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / name).write_text(content)
    with pytest.raises(ModelError):
        describe(tmp_path)


@pytest.mark.parametrize("model", ["~no_such_user_/model", "x" * 5000, "a\0b", "\ud800", "", "nowhere/\udcff"])
def test_names_that_are_no_paths(model: str) -> None:
    with pytest.raises(ModelError):
        open_model(model)


@pytest.mark.parametrize("config", [LLAMA, FOREIGN], ids=lambda config: config["model_type"])
def test_more_layers_than_any_model_has_are_refused_before_they_are_described(
    config: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3_000_000}))
    with pytest.raises(ModelError, match="num_hidden_layers"):
        describe(tmp_path)


@pytest.mark.parametrize("config", [LLAMA, FOREIGN], ids=lambda config: config["model_type"])
@pytest.mark.parametrize("value", [2**31, 1e308])
def test_billions_of_labels_are_refused_before_a_list_of_them_is_made(
    config: dict[str, Any], value: float, tmp_path: Path
) -> None:
    for entry in ({"num_labels": value}, {"text_config": {"num_labels": value}}):
        (tmp_path / "config.json").write_text(json.dumps(config | entry))
        with pytest.raises(ModelError, match=r"num_labels is .*, not at most 1048576"):
            open_model(str(tmp_path), load_format="dummy")


@pytest.mark.parametrize("config", [LLAMA, FOREIGN], ids=lambda config: config["model_type"])
def test_more_layers_than_the_checkpoint_has_tensors_are_refused_before_they_are_described(
    config: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1000, "dtype": "float32"}))
    save_file({"lm_head.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    source = open_model(str(tmp_path))
    start = time.process_time()
    with pytest.raises(ModelError, match="num_hidden_layers is 1000, not as many as the checkpoint's tensors, 1, have"):
        source.attention_layers()
    assert time.process_time() - start < 0.5


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"])
def test_a_pipe_among_a_models_files_is_refused_and_not_waited_for(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    save_file({"lm_head.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(ModelError, match=f"{name} cannot be read as a part of a model"):
        open_model(str(tmp_path))


def test_a_pipe_in_place_of_a_gguf_file_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.gguf")
    for name in (tmp_path, tmp_path / "model.gguf"):
        with pytest.raises(ModelError, match=r"model\.gguf cannot be read as a part of a model"):
            open_model(str(name))
