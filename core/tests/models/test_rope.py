"""Rotary tables are those that transformers computes, for every scaling variant."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import describe, tiny_config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hardpoint.interfaces.attention import Refusal
from hardpoint.layers.rope import Rope, rope_from_config

THETA = {"rope_theta": 5e5}
ORIGINAL = {"original_max_position_embeddings": 2048}
VARIANTS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **ORIGINAL},
    "yarn": {"rope_type": "yarn", "factor": 4.0, **ORIGINAL},
    "yarn-betas": {
        "rope_type": "yarn",
        "factor": 8.0,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "truncate": False,
        **ORIGINAL,
    },
    "yarn-attention-factor": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 0.7, **ORIGINAL},
    "yarn-mscale": {"rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.707, **ORIGINAL},
    "longrope": {
        "rope_type": "longrope",
        "short_factor": [1.0 + i / 10 for i in range(32)],
        "long_factor": [2.0 + i for i in range(32)],
        **ORIGINAL,
    },
}


def _config(parameters: dict[str, Any]) -> Any:
    return tiny_config("llama", head_dim=64, max_position_embeddings=8192, rope_parameters={**THETA, **parameters})


def _rope(config: Any, divisors: list[float] | None = None) -> Rope:
    rope = rope_from_config(config.rope_parameters, 64, config.max_position_embeddings, divisors)
    assert isinstance(rope, Rope)
    return rope


def _ropes(architecture: str, config: Any) -> list[Rope]:
    """Return the tables of a model, in the order of their first use."""
    described = describe(architecture, config)
    assert not isinstance(described, Refusal), described
    return [module.rope for module in described.whole.model.rotary]


def _table(config: Any, max_context: int) -> tuple[torch.Tensor, torch.Tensor]:
    (rope,) = _ropes("LlamaForCausalLM", config)
    return rope.table(max_context)


def _expected(frequencies: torch.Tensor, factor: float, max_context: int) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.arange(max_context).float()[:, None] * frequencies
    return angles.cos() * factor, angles.sin() * factor


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("max_context", [1500, 8192, 12000])
def test_scaled_table_equals_transformers(variant: str, max_context: int) -> None:
    config = _config(VARIANTS[variant])
    init = ROPE_INIT_FUNCTIONS[VARIANTS[variant]["rope_type"]]
    frequencies, factor = init(config, torch.device("cpu"), seq_len=max_context)
    for ours, theirs in zip(_table(config, max_context), _expected(frequencies, factor, max_context), strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-3 if max_context > 10000 else 1e-3)
    torch.testing.assert_close(_rope(config).frequencies(max_context)[0], frequencies, rtol=1e-6, atol=0)


def test_default_table_equals_transformers() -> None:
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = _config({"rope_type": "default"})
    positions = torch.arange(300)[None]
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions)
    ours = _table(config, 300)
    torch.testing.assert_close(ours[0], cos[0, :, :32], rtol=0, atol=1e-6)
    torch.testing.assert_close(ours[1], sin[0, :, :32], rtol=0, atol=1e-6)


def test_layer_types_with_their_own_parameters_get_their_own_tables() -> None:
    config = tiny_config("gemma3_text", layer_types=["sliding_attention", "full_attention", "sliding_attention"])
    described = describe("Gemma3ForCausalLM", config)
    assert not isinstance(described, Refusal)
    first, second = described.whole.model.rotary
    assert [layer.self_attn.rotary for layer in described.whole.model.layers.values()] == [first, second, first]
    assert [table.rope.theta for table in (first, second)] == [10_000.0, 1_000_000.0]


def test_partial_rotary_table_has_half_the_rotated_width() -> None:
    rope = {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.25}
    (found,) = _ropes("Phi3ForCausalLM", tiny_config("phi3", head_dim=16, rope_parameters=rope))
    assert found.rotary_dim == 4
    assert found.table(10)[0].shape == (10, 2)


def test_frequency_divisors_of_a_gguf_file_divide() -> None:
    config = _config({"rope_type": "default"})
    plain, divided = _rope(config), _rope(config, [float(i + 1) for i in range(32)])
    torch.testing.assert_close(divided.frequencies(10)[0] * torch.arange(1, 33), plain.frequencies(10)[0])


def test_unknown_variant_is_refused_by_name() -> None:
    config = _config({"rope_type": "default"})
    config.rope_parameters = {"rope_type": "spiral", "rope_theta": 1e4}
    refusal = describe("LlamaForCausalLM", config)
    assert isinstance(refusal, Refusal)
    assert "spiral" in refusal.reasons[0]
