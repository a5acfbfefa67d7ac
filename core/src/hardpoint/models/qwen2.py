"""Qwen 2 and 2.5 (arXiv:2407.10671, 2412.15115): Llama's equation, biases of queries, keys and values, windows in upper layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hardpoint.layers import Attention
from hardpoint.models.config import FULL, SLIDING, with_kv_heads
from hardpoint.models.decoder import CausalLM
from hardpoint.models.llama import LlamaLayer

if TYPE_CHECKING:
    from torch import nn

    from hardpoint.layers import ModelContext, RotaryEmbedding
    from hardpoint.models.config import ModelConfig


class Qwen2Layer(LlamaLayer):
    """Llama's, with biases into attention."""

    def attention(self, config: ModelConfig, index: int, rotary: RotaryEmbedding, context: ModelContext) -> nn.Module:
        layer = config.attention(sliding_window=config.window(index))
        return Attention(index, layer, config.hidden_size, rotary, context, qkv_bias=True)


class Qwen2(CausalLM):
    """Qwen 2 and 2.5 without experts."""

    layer = Qwen2Layer
    embeds_both_sides = True

    @classmethod
    def complete(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        return with_upper_windows(with_kv_heads(values, 32))


def with_upper_windows(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values in which the layers from `max_window_layers` on have the window, where `use_sliding_window` says so."""
    window = values.get("sliding_window", 4096) if values.get("use_sliding_window") else None
    completed = {**values, "sliding_window": window}
    count, full = values.get("num_hidden_layers"), values.get("max_window_layers", 28)
    if values.get("layer_types") is None and isinstance(count, int) and isinstance(full, int):
        completed["layer_types"] = [FULL if window is None or i < full else SLIDING for i in range(count)]
    return completed
