"""Granite 3 (IBM, 2024): Llama's equation with four multipliers, of the embedding, the scores, the branches and the logits."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from hardpoint.layers import Attention, LMHead, VocabEmbedding
from hardpoint.models.llama import Llama, LlamaLayer

if TYPE_CHECKING:
    from torch import Tensor, nn

    from hardpoint.layers import ModelContext, RotaryEmbedding, Step
    from hardpoint.models.config import ModelConfig
    from hardpoint.models.decoder import MakesLayer


class GraniteLayer(LlamaLayer):
    """`x + r * attention(norm(x))`, then `x + r * mlp(norm(x))`."""

    def __init__(self, config: ModelConfig, index: int, rotary: RotaryEmbedding, context: ModelContext) -> None:
        super().__init__(config, index, rotary, context)
        self.residual_multiplier = config.number("residual_multiplier", 1.0)

    def forward(self, stream: Tensor, branch: Tensor | None, step: Step) -> Tensor:
        branch = self.self_attn(self.input_layernorm(stream, branch), step) * self.residual_multiplier
        return self.mlp(self.post_attention_layernorm(stream, branch)) * self.residual_multiplier  # type: ignore[no-any-return]

    def attention(self, config: ModelConfig, index: int, rotary: RotaryEmbedding, context: ModelContext) -> nn.Module:
        bias = config.flag("attention_bias")
        layer = config.attention(scale=config.number("attention_multiplier", 1.0))
        return Attention(index, layer, config.hidden_size, rotary, context, qkv_bias=bias, output_bias=bias)


class Granite(Llama):
    """Granite 3 without experts."""

    layer: ClassVar[MakesLayer] = GraniteLayer

    def embedding(self, config: ModelConfig, context: ModelContext) -> VocabEmbedding:
        scale = config.number("embedding_multiplier", 1.0)
        return VocabEmbedding(config.vocab_size, config.hidden_size, context, scale=scale)

    def head(self, config: ModelConfig, context: ModelContext, tied: VocabEmbedding | None) -> LMHead:
        divisor = config.number("logits_scaling", 1.0)
        return LMHead(config.vocab_size, config.hidden_size, context, tied=tied, divisor=divisor)
