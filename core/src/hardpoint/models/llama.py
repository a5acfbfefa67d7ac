"""Llama (arXiv:2302.13971, 2307.09288, 2407.21783) and Mistral (arXiv:2310.06825): pre-normalised attention and gated feed-forward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn

from hardpoint.layers import Attention, GatedMLP, RMSNorm
from hardpoint.models.config import FULL, SLIDING, with_kv_heads
from hardpoint.models.decoder import CausalLM

if TYPE_CHECKING:
    from torch import Tensor

    from hardpoint.layers import ModelContext, RotaryEmbedding, Step
    from hardpoint.models.config import ModelConfig
    from hardpoint.models.decoder import MakesLayer


class LlamaLayer(nn.Module):
    """`x + attention(norm(x))`, then `x + mlp(norm(x))`. Families of the same equation derive from it and make other parts."""

    def __init__(self, config: ModelConfig, index: int, rotary: RotaryEmbedding, context: ModelContext) -> None:
        super().__init__()
        self.input_layernorm = self.norm(config, context)
        self.self_attn = self.attention(config, index, rotary, context)
        self.post_attention_layernorm = self.norm(config, context)
        self.mlp = self.feed_forward(config, index, context)

    def forward(self, stream: Tensor, branch: Tensor | None, step: Step) -> Tensor:
        branch = self.self_attn(self.input_layernorm(stream, branch), step)
        return self.mlp(self.post_attention_layernorm(stream, branch))  # type: ignore[no-any-return]

    def norm(self, config: ModelConfig, context: ModelContext) -> nn.Module:
        """Return a norm of the residual stream."""
        return RMSNorm(config.hidden_size, config.norm_eps, context)

    def attention(self, config: ModelConfig, index: int, rotary: RotaryEmbedding, context: ModelContext) -> nn.Module:
        """Return the layer's attention."""
        bias = config.flag("attention_bias")
        layer = config.attention()
        return Attention(index, layer, config.hidden_size, rotary, context, qkv_bias=bias, output_bias=bias)

    def feed_forward(self, config: ModelConfig, index: int, context: ModelContext) -> nn.Module:
        """Return the layer's feed-forward."""
        return GatedMLP(config.hidden_size, config.intermediate_size, config.activation, context)


class Llama(CausalLM):
    """Llama 1 to 3, and what is published under its architecture."""

    layer: ClassVar[MakesLayer] = LlamaLayer
    embeds_both_sides = True

    @classmethod
    def refusals(cls, config: ModelConfig) -> list[str]:
        biases = ["its feed-forward has biases"] if config.flag("mlp_bias") else []
        return [*super().refusals(config), *biases]


class MistralLayer(LlamaLayer):
    """Llama's, with windows."""

    def attention(self, config: ModelConfig, index: int, rotary: RotaryEmbedding, context: ModelContext) -> nn.Module:
        layer = config.attention(sliding_window=config.window(index))
        return Attention(index, layer, config.hidden_size, rotary, context)


class Mistral(CausalLM):
    """Mistral 7B and Nemo, with a window in every layer or in none, and Ministral 8B, whose layers differ."""

    layer = MistralLayer
    embeds_both_sides = True

    @classmethod
    def complete(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        completed = {"sliding_window": 4096, **with_kv_heads(values, 8)}
        count, window = values.get("num_hidden_layers"), completed["sliding_window"]
        if values.get("layer_types") is None and isinstance(count, int):
            completed["layer_types"] = [FULL if window is None else SLIDING] * count
        return completed
