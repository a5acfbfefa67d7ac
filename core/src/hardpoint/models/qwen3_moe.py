"""Qwen 3 with experts (arXiv:2505.09388): Qwen 3's attention, a mixture of experts in most layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hardpoint.layers import MixtureOfExperts
from hardpoint.models.config import SLIDING, with_kv_heads
from hardpoint.models.decoder import CausalLM
from hardpoint.models.qwen2_moe import experts_shape, has_experts
from hardpoint.models.qwen3 import Qwen3Layer

if TYPE_CHECKING:
    from torch import nn

    from hardpoint.layers import ModelContext
    from hardpoint.models.config import ModelConfig


class Qwen3MoeLayer(Qwen3Layer):
    """Qwen 3's, with experts where the configuration has them."""

    def feed_forward(self, config: ModelConfig, index: int, context: ModelContext) -> nn.Module:
        if not has_experts(config, index):
            return super().feed_forward(config, index, context)
        return MixtureOfExperts(experts_shape(config), context)


class Qwen3Moe(CausalLM):
    """Qwen 3 30B-A3B and 235B-A22B."""

    layer = Qwen3MoeLayer

    @classmethod
    def complete(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        # transformers 5 writes the number of experts under the other name.
        sizes = {
            "moe_intermediate_size": 768,
            "num_experts": values.get("num_local_experts", 128),
            "num_experts_per_tok": 8,
        }
        window = values.get("sliding_window", 4096) if values.get("use_sliding_window") else None
        completed = {**sizes, **with_kv_heads(values, 4), "sliding_window": window}
        if window is not None and isinstance(values.get("num_hidden_layers"), int):
            completed["layer_types"] = [SLIDING] * values["num_hidden_layers"]
        return completed
