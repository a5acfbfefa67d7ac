"""Qwen 1.5 and 2 with experts (arXiv:2407.10671): Qwen 2's attention, experts beside a shared one in most layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hardpoint.layers import ExpertsShape, MixtureOfExperts
from hardpoint.models.config import FULL, SLIDING, with_kv_heads
from hardpoint.models.decoder import CausalLM
from hardpoint.models.qwen2 import Qwen2Layer

if TYPE_CHECKING:
    from torch import nn

    from hardpoint.layers import ModelContext
    from hardpoint.models.config import ModelConfig


class Qwen2MoeLayer(Qwen2Layer):
    """Qwen 2's, with experts where the configuration has them."""

    def feed_forward(self, config: ModelConfig, index: int, context: ModelContext) -> nn.Module:
        if not has_experts(config, index):
            return super().feed_forward(config, index, context)
        shared = config.integer("shared_expert_intermediate_size", 5632)
        return MixtureOfExperts(experts_shape(config), context, shared_size=shared)


class Qwen2Moe(CausalLM):
    """Qwen 1.5 MoE and Qwen 2 57B-A14B."""

    layer = Qwen2MoeLayer

    @classmethod
    def refusals(cls, config: ModelConfig) -> list[str]:
        reasons = [] if config.flag("qkv_bias", True) else ["its queries, keys and values have no biases"]
        return [*super().refusals(config), *reasons]

    @classmethod
    def complete(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        sizes = {"moe_intermediate_size": 1408, "num_experts": 60, "num_experts_per_tok": 4}
        window = values.get("sliding_window", 4096) if values.get("use_sliding_window") else None
        completed = {**sizes, **with_kv_heads(values, 16), "sliding_window": window}
        count, windowed = values.get("num_hidden_layers"), values.get("max_window_layers", 28)
        if values.get("layer_types") is None and isinstance(count, int) and isinstance(windowed, int):
            # Every other one of the layers before `max_window_layers`, and not those after it as in Qwen 2.
            has_window = [window is not None and i % 2 == 0 and i < windowed for i in range(count)]
            completed["layer_types"] = [SLIDING if has else FULL for has in has_window]
        return completed


def has_experts(config: ModelConfig, index: int) -> bool:
    """Whether a layer has experts: every `decoder_sparse_step`-th one that `mlp_only_layers` does not name."""
    return (
        index not in config.integers("mlp_only_layers") and (index + 1) % config.integer("decoder_sparse_step", 1) == 0
    )


def experts_shape(config: ModelConfig) -> ExpertsShape:
    """Return what the experts of Qwen's layers compute."""
    num_experts = config.integer("num_experts")
    return ExpertsShape(
        num_experts=num_experts,
        top_k=config.experts_per_token(num_experts),
        hidden_size=config.hidden_size,
        intermediate_size=config.integer("moe_intermediate_size"),
        activation=config.activation,
        renormalise=config.flag("norm_topk_prob"),
    )
