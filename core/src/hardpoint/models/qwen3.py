"""Qwen 3 (arXiv:2505.09388): Llama's equation, with queries and keys normalised head by head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hardpoint.layers import Attention, RMSNorm
from hardpoint.models.config import with_kv_heads
from hardpoint.models.decoder import CausalLM
from hardpoint.models.llama import LlamaLayer
from hardpoint.models.qwen2 import with_upper_windows

if TYPE_CHECKING:
    from torch import nn

    from hardpoint.layers import ModelContext, RotaryEmbedding
    from hardpoint.models.config import ModelConfig


class Qwen3Layer(LlamaLayer):
    """Llama's, with a norm of each query and key head before rotary embedding."""

    def attention(self, config: ModelConfig, index: int, rotary: RotaryEmbedding, context: ModelContext) -> nn.Module:
        bias = config.flag("attention_bias")
        return Attention(
            index,
            config.attention(sliding_window=config.window(index)),
            config.hidden_size,
            rotary,
            context,
            qkv_bias=bias,
            output_bias=bias,
            q_norm=RMSNorm(config.head_dim, config.norm_eps, context),
            k_norm=RMSNorm(config.head_dim, config.norm_eps, context),
        )


class Qwen3(CausalLM):
    """Qwen 3 without experts."""

    layer = Qwen3Layer
    embeds_both_sides = True

    @classmethod
    def complete(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        return with_upper_windows({"head_dim": 128, **with_kv_heads(values, 32)})
