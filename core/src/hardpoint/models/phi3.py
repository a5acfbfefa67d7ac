"""Phi-3 and Phi-4-mini (arXiv:2404.14219, 2503.01743): Llama's equation from merged checkpoint tensors, a part of each head rotated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hardpoint.interfaces.attention import Refusal
from hardpoint.layers import Attention, GatedMLP, Rope
from hardpoint.models.decoder import CausalLM
from hardpoint.models.llama import LlamaLayer

if TYPE_CHECKING:
    from torch import nn

    from hardpoint.layers import ModelContext, RotaryEmbedding
    from hardpoint.models.config import ModelConfig


class Phi3Layer(LlamaLayer):
    """Llama's, stored as `qkv_proj` and `gate_up_proj`, with a window where the configuration has one."""

    def attention(self, config: ModelConfig, index: int, rotary: RotaryEmbedding, context: ModelContext) -> nn.Module:
        layer = config.attention(sliding_window=config.sliding_window)
        return Attention(index, layer, config.hidden_size, rotary, context, names=("qkv_proj",))

    def feed_forward(self, config: ModelConfig, index: int, context: ModelContext) -> nn.Module:
        return GatedMLP(
            config.hidden_size, config.intermediate_size, config.activation, context, names=("gate_up_proj",)
        )


class Phi3(CausalLM):
    """Phi-3 mini to medium, Phi-4 and Phi-4-mini."""

    layer = Phi3Layer

    @classmethod
    def complete(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        completed = {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096, **values}
        for name in ("rope_parameters", "rope_scaling"):
            rope = completed.get(name)
            # Files of the first releases say "su" or "yarn" for what is LongRoPE.
            if isinstance(rope, Mapping) and (rope.get("rope_type") or rope.get("type")) in ("su", "yarn"):
                completed[name] = {**rope, "rope_type": "longrope"}
        return completed

    @classmethod
    def ropes(cls, config: ModelConfig) -> tuple[tuple[Rope, ...], tuple[int, ...]] | Refusal:
        return config.ropes(partial=True)
