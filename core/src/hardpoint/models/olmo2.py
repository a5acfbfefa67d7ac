"""OLMo 2 (arXiv:2501.00656): norms after attention and feed-forward instead of before, and over all query and all key heads at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from hardpoint.layers import Attention, GatedMLP, HeadsNorm, RMSNorm
from hardpoint.models.decoder import CausalLM

if TYPE_CHECKING:
    from torch import Tensor

    from hardpoint.layers import ModelContext, RotaryEmbedding, Step
    from hardpoint.models.config import ModelConfig


class Olmo2Layer(nn.Module):
    """`x + norm(attention(x))`, then `x + norm(mlp(x))`."""

    def __init__(self, config: ModelConfig, index: int, rotary: RotaryEmbedding, context: ModelContext) -> None:
        super().__init__()
        layer, bias, eps = config.attention(), config.flag("attention_bias"), config.norm_eps
        self.self_attn = Attention(
            index,
            layer,
            config.hidden_size,
            rotary,
            context,
            qkv_bias=bias,
            output_bias=bias,
            q_norm=HeadsNorm(layer, eps, context),
            k_norm=HeadsNorm(layer, eps, context, of_keys=True),
        )
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps, context)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, config.activation, context)
        self.post_feedforward_layernorm = RMSNorm(config.hidden_size, eps, context)

    def forward(self, stream: Tensor, branch: Tensor | None, step: Step) -> Tensor:
        if branch is not None:
            stream += branch
        stream += self.post_attention_layernorm(self.self_attn(stream, step))
        return self.post_feedforward_layernorm(self.mlp(stream))  # type: ignore[no-any-return]


class Olmo2(CausalLM):
    """OLMo 2 of all sizes."""

    layer = Olmo2Layer

    @classmethod
    def complete(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        return {"rms_norm_eps": 1e-5, **values}
