"""Gemma 2 (arXiv:2408.00118): norms before and after each block, soft caps, a window in every other layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from hardpoint.layers import Attention, GatedMLP, LMHead
from hardpoint.models.config import FULL, SLIDING, with_kv_heads
from hardpoint.models.gemma import Gemma, gemma_norm

if TYPE_CHECKING:
    from torch import Tensor

    from hardpoint.layers import ModelContext, RotaryEmbedding, Step, VocabEmbedding
    from hardpoint.models.config import ModelConfig


class Gemma2Layer(nn.Module):
    """`x + norm(attention(norm(x)))`, then `x + norm(mlp(norm(x)))`."""

    def __init__(self, config: ModelConfig, index: int, rotary: RotaryEmbedding, context: ModelContext) -> None:
        super().__init__()
        size = config.hidden_size
        self.input_layernorm = gemma_norm(size, config, context)
        self.self_attn = self.attention(config, index, rotary, context)
        self.post_attention_layernorm = gemma_norm(size, config, context)
        self.pre_feedforward_layernorm = gemma_norm(size, config, context)
        self.mlp = GatedMLP(size, config.intermediate_size, config.activation, context)
        self.post_feedforward_layernorm = gemma_norm(size, config, context)

    def forward(self, stream: Tensor, branch: Tensor | None, step: Step) -> Tensor:
        attended = self.self_attn(self.input_layernorm(stream, branch), step)
        branch = self.post_attention_layernorm(attended)
        output = self.mlp(self.pre_feedforward_layernorm(stream, branch))
        return self.post_feedforward_layernorm(output)  # type: ignore[no-any-return]

    def attention(
        self, config: ModelConfig, index: int, rotary: RotaryEmbedding, context: ModelContext, **norms: Any
    ) -> Attention:
        """Return the layer's attention."""
        layer = config.attention(
            sliding_window=config.window(index),
            scale=config.number("query_pre_attn_scalar", 256) ** -0.5,
            soft_cap=config.optional_number("attn_logit_softcapping"),
            causal=not config.flag("use_bidirectional_attention"),
        )
        bias = config.flag("attention_bias")
        return Attention(index, layer, config.hidden_size, rotary, context, qkv_bias=bias, output_bias=bias, **norms)


class Gemma2(Gemma):
    """Gemma 2."""

    layer = Gemma2Layer

    @classmethod
    def complete(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
        completed = {"sliding_window": 4096, **caps, **super().complete(with_kv_heads(values, 4))}
        return with_layer_types(with_activation(completed), every=2)

    def head(self, config: ModelConfig, context: ModelContext, tied: VocabEmbedding | None) -> LMHead:
        cap = config.optional_number("final_logit_softcapping")
        return LMHead(config.vocab_size, config.hidden_size, context, tied=tied, soft_cap=cap)


def with_activation(values: dict[str, Any]) -> dict[str, Any]:
    """Return values with the activation under the usual name, of which Gemma 2 and 3 have another."""
    return {**values, "hidden_act": values.get("hidden_activation") or "gelu_pytorch_tanh"}


def with_layer_types(values: dict[str, Any], every: int) -> dict[str, Any]:
    """Return values in which every n-th layer is without a window, where they name no layer types."""
    count = values.get("num_hidden_layers")
    if values.get("layer_types") is None and isinstance(count, int):
        values["layer_types"] = [SLIDING if (index + 1) % every else FULL for index in range(count)]
    return values
