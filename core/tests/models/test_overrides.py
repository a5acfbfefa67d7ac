"""`hf_overrides` reach what reads a configuration, whatever form it was written in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_models import LLAMA4, edit_config, save_tiny, tiny_config

from hardpoint.interfaces import DType
from hardpoint.interfaces.errors import ConfigError, ModelError
from hardpoint.layers import RotaryEmbedding
from hardpoint.models import open_model
from hardpoint.models.description import ModelDescription

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
ROPES: dict[str, tuple[dict[str, Any], tuple[str, float, float | None]]] = {
    "base": ({"rope_theta": 100.0}, ("default", 100.0, None)),
    "scaling": ({"rope_scaling": YARN}, ("yarn", 5e5, 4.0)),
    "old-name-of-the-kind": ({"rope_scaling": {"type": "linear", "factor": 2.0}}, ("linear", 5e5, 2.0)),
    "both": ({"rope_scaling": YARN, "rope_theta": 100.0}, ("yarn", 100.0, 4.0)),
    "parameters": ({"rope_parameters": {**YARN, "rope_theta": 100.0}}, ("yarn", 100.0, 4.0)),
    "parameters-of-layers": ({"rope_parameters": {"full_attention": YARN}}, ("yarn", 5e5, 4.0)),
}


def ropes(folder: Path, overrides: dict[str, Any]) -> list[tuple[str, float, float | None]]:
    """Return the kind, base and factor of each of a model's rotary tables."""
    described = open_model(str(folder), hf_overrides=overrides).describe(DType.FLOAT32)
    assert isinstance(described, ModelDescription)
    found = [module.rope for module in described.whole.modules() if isinstance(module, RotaryEmbedding)]
    return [(rope.kind, rope.theta, rope.parameters.get("factor")) for rope in found]


@pytest.mark.parametrize("name", [name for name in ROPES if name != "parameters-of-layers"])
@pytest.mark.parametrize("form", ["rope_parameters", "rope_theta", "rope_scaling"])
def test_rotary_parameters_are_overridden_in_each_form(name: str, form: str, tmp_path: Path) -> None:
    overrides, expected = ROPES[name]
    save_tiny(tmp_path, tiny_config("llama", rope_parameters={"rope_type": "default", "rope_theta": 5e5}))
    if form != "rope_parameters":
        edit_config(tmp_path, "rope_parameters", rope_theta=5e5)
    if form == "rope_scaling":
        edit_config(tmp_path, rope_scaling={"rope_type": "default"})
    assert ropes(tmp_path, overrides) == [expected]


@pytest.mark.parametrize("name", ROPES)
def test_layers_without_a_window_have_what_is_overridden_where_types_of_layers_differ(
    name: str, tmp_path: Path
) -> None:
    overrides, expected = ROPES[name]
    each = {
        "full_attention": {"rope_type": "default", "rope_theta": 5e5},
        "sliding_attention": {"rope_type": "default"},
    }
    save_tiny(tmp_path, tiny_config("gemma3_text", num_hidden_layers=6, rope_parameters=each))
    assert sorted(ropes(tmp_path, overrides)) == sorted([expected, ("default", 1e4, None)])


def test_a_scaling_can_be_taken_out(tmp_path: Path) -> None:
    save_tiny(tmp_path, tiny_config("llama", rope_parameters={**YARN, "rope_theta": 500.0}))
    assert open_model(str(tmp_path)).max_model_len == 128
    assert open_model(str(tmp_path), hf_overrides={"rope_scaling": None}).max_model_len == 64
    with pytest.raises(ModelError, match="rope_parameters is 5"):
        ropes(tmp_path, {"rope_scaling": 5})


def test_an_override_reaches_the_language_model_of_a_whole_one(tmp_path: Path) -> None:
    save_tiny(tmp_path, tiny_config("llama4_text", **LLAMA4))
    text = json.loads((tmp_path / "config.json").read_text())
    whole = {"architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    changes = {"max_position_embeddings": 32, "rope_theta": 100.0}
    for overrides in (changes, {"text_config": changes}):
        source = open_model(str(tmp_path), hf_overrides=overrides)
        assert source.max_model_len == 32
        assert source.values["rope_parameters"]["rope_theta"] == 100.0
    with pytest.raises(ConfigError, match="Did you mean 'num_hidden_layers'"):
        open_model(str(tmp_path), hf_overrides={"text_config": {"num_hiden_layers": 1}})
    with pytest.raises(ConfigError, match=r"which nothing reads.*Known: ") as refused:
        open_model(str(tmp_path), hf_overrides={"zzzz": 1})
    known = str(refused.value).partition("Known: ")[2].split(", ")
    assert len(known) == len(set(known))
