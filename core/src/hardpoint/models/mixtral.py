"""Mixtral (arXiv:2401.04088): Mistral's attention, and a mixture of experts in place of the feed-forward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from hardpoint.layers import Attention, ExpertsShape, MixtureOfExperts, RMSNorm
from hardpoint.models.decoder import CausalLM

if TYPE_CHECKING:
    from torch import Tensor

    from hardpoint.layers import ModelContext, RotaryEmbedding, Step
    from hardpoint.models.config import ModelConfig


class MixtralLayer(nn.Module):
    """`x + attention(norm(x))`, then `x + experts(norm(x))`."""

    def __init__(self, config: ModelConfig, index: int, rotary: RotaryEmbedding, context: ModelContext) -> None:
        super().__init__()
        size = config.hidden_size
        layer = config.attention(sliding_window=config.sliding_window)
        self.input_layernorm = RMSNorm(size, config.norm_eps, context)
        self.self_attn = Attention(index, layer, size, rotary, context)
        self.post_attention_layernorm = RMSNorm(size, config.norm_eps, context)
        num_experts = config.integer("num_local_experts", 8)
        shape = ExpertsShape(
            num_experts=num_experts,
            top_k=config.experts_per_token(num_experts, 2),
            hidden_size=size,
            intermediate_size=config.intermediate_size,
            activation=config.activation,
            names=("w1", "w3", "w2"),
        )
        self.block_sparse_moe = MixtureOfExperts(shape, context)

    def forward(self, stream: Tensor, branch: Tensor | None, step: Step) -> Tensor:
        branch = self.self_attn(self.input_layernorm(stream, branch), step)
        return self.block_sparse_moe(self.post_attention_layernorm(stream, branch))  # type: ignore[no-any-return]


class Mixtral(CausalLM):
    """Mixtral 8x7B and 8x22B."""

    layer = MixtralLayer

    @classmethod
    def complete(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        return {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_key_value_heads": 8, **values}
