"""Gemma 3's language model (arXiv:2503.19786): Gemma 2 with norms of query and key heads, and another rotary table for windowed layers.

EmbeddingGemma (arXiv:2509.20354) is the same with attention to both sides.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hardpoint.interfaces.batch import Pooling
from hardpoint.layers import Attention
from hardpoint.models.config import FULL, SLIDING, with_kv_heads
from hardpoint.models.gemma import Gemma, gemma_norm
from hardpoint.models.gemma2 import Gemma2, Gemma2Layer, with_activation, with_layer_types

if TYPE_CHECKING:
    from hardpoint.layers import ModelContext, RotaryEmbedding
    from hardpoint.models.config import ModelConfig

_THETA = {FULL: 1e6, SLIDING: 1e4}


class Gemma3Layer(Gemma2Layer):
    """Gemma 2's, with a norm of each query and key head before rotary embedding."""

    def attention(
        self, config: ModelConfig, index: int, rotary: RotaryEmbedding, context: ModelContext, **norms: Any
    ) -> Attention:
        norms = {name: gemma_norm(config.head_dim, config, context) for name in ("q_norm", "k_norm")}
        return super().attention(config, index, rotary, context, **norms)


class Gemma3(Gemma2):
    """Gemma 3, text only."""

    layer = Gemma3Layer

    @classmethod
    def complete(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        completed = with_activation({"sliding_window": 4096, **Gemma.complete(with_kv_heads(values, 4))})
        # Configurations have the name of Gemma 2's cap, and the model has none.
        completed["attn_logit_softcapping"] = None
        every = values.get("sliding_window_pattern", 6)
        completed = with_layer_types(completed, every if isinstance(every, int) and every > 0 else 6)
        window = completed["sliding_window"]
        if completed.get("use_bidirectional_attention") and isinstance(window, int):
            # A token sees half of these on each side, and itself.
            completed["sliding_window"] = window // 2 + 1
        rope = completed.get("rope_parameters")
        if not isinstance(rope, Mapping) or not any(isinstance(rope.get(kind), Mapping) for kind in _THETA):
            # Files of before transformers 5 scale the layers without a window.
            scaling = completed.pop("rope_scaling", None)
            rope = {FULL: dict(scaling) if isinstance(scaling, Mapping) else {}, SLIDING: {}}
        bases = {FULL: values.get("rope_theta"), SLIDING: values.get("rope_local_base_freq")}
        completed["rope_parameters"] = {
            kind: {"rope_theta": bases[kind] or _THETA[kind], **(rope.get(kind) or {})} for kind in _THETA
        }
        return completed

    @classmethod
    def may_see_both_sides(cls, config: ModelConfig) -> bool:
        return config.is_bare

    @classmethod
    def pooling_of(cls, config: ModelConfig) -> Pooling:
        if config.flag("use_bidirectional_attention") and not config.num_labels:
            return Pooling.MEAN
        return super().pooling_of(config)
