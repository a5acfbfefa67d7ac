"""Gemma (arXiv:2403.08295): Llama's equation, norms stored as `weight - 1`, the embedding scaled by the root of its size."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from hardpoint.layers import RMSNorm, VocabEmbedding
from hardpoint.models.config import with_kv_heads
from hardpoint.models.decoder import CausalLM, MakesLayer
from hardpoint.models.llama import LlamaLayer

if TYPE_CHECKING:
    from torch import nn

    from hardpoint.layers import ModelContext
    from hardpoint.models.config import ModelConfig


def gemma_norm(size: int, config: ModelConfig, context: ModelContext) -> RMSNorm:
    """Return a norm whose stored weight counts from 1."""
    return RMSNorm(size, config.norm_eps, context, offset=1.0)


class GemmaLayer(LlamaLayer):
    """Llama's, with Gemma's norms."""

    def norm(self, config: ModelConfig, context: ModelContext) -> nn.Module:
        return gemma_norm(config.hidden_size, config, context)


class Gemma(CausalLM):
    """Gemma 1."""

    layer: ClassVar[MakesLayer] = GemmaLayer
    norm_offset: ClassVar[float] = 1.0

    @classmethod
    def complete(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        defaults = {"tie_word_embeddings": True, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh"}
        completed = {**defaults, **with_kv_heads(values, 16)}
        # The first releases say "gelu" and mean its approximation.
        if completed["hidden_act"] in ("gelu", None):
            completed["hidden_act"] = "gelu_pytorch_tanh"
        return completed

    @classmethod
    def refusals(cls, config: ModelConfig) -> list[str]:
        both_ways = config.flag("use_bidirectional_attention") and not cls.may_see_both_sides(config)
        return [*super().refusals(config), *(["its attention is not causal"] if both_ways else [])]

    @classmethod
    def may_see_both_sides(cls, config: ModelConfig) -> bool:
        """Whether the family runs a model whose attention is not causal."""
        return False

    def embedding(self, config: ModelConfig, context: ModelContext) -> VocabEmbedding:
        # The published models round it to their dtype.
        scale = float(torch.tensor(math.sqrt(config.hidden_size), dtype=context.dtype))
        return VocabEmbedding(config.vocab_size, config.hidden_size, context, scale=scale)

    def norm(self, config: ModelConfig, context: ModelContext) -> RMSNorm:
        return gemma_norm(config.hidden_size, config, context)
