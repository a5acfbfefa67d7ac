"""GPT-OSS (arXiv:2508.10925): attention with sinks, a window in every other layer, and experts with biases and a clamped activation.

Of the published checkpoints only those with dense weights are read; MXFP4 is refused where the configuration is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from hardpoint.interfaces.kernels import Activation
from hardpoint.layers import Attention, Experts, ExpertsShape, Linear, MixtureOfExperts, StoredWeight, WeightShard
from hardpoint.models.config import FULL, SLIDING, with_kv_heads
from hardpoint.models.decoder import CausalLM
from hardpoint.models.llama import LlamaLayer

if TYPE_CHECKING:
    from torch import Tensor, nn

    from hardpoint.layers import ModelContext, RotaryEmbedding
    from hardpoint.layers.parallel import Span
    from hardpoint.models.config import ModelConfig

_ALPHA, _LIMIT = 1.702, 7.0
"""Of the activation, which kernels have as constants."""
_ROPE = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}
"""Where a configuration does not say otherwise."""


class GptOssExperts(Experts):
    """Experts that are published stacked, their inputs as rows, and a gate's and an up's column in turn."""

    def stored(self, shape: ExpertsShape, context: ModelContext) -> tuple[StoredWeight, StoredWeight]:
        count, hidden, inner = shape.num_experts, shape.hidden_size, shape.intermediate_size
        first, end = self.span
        program = self.program

        def write_gate_up(stored: Tensor, row: int, values: Tensor) -> None:
            rows = _halves(values, self.span).transpose(1, 2).flatten(0, 1)
            program.write_gate_up(stored, row * 2 * (end - first), rows)

        def write_down(stored: Tensor, row: int, values: Tensor) -> None:
            program.write_down(stored, row * hidden, values[:, first:end].transpose(1, 2).flatten(0, 1))

        gate_up = WeightShard("experts.gate_up_proj", (count, hidden, 2 * inner))
        down = WeightShard("experts.down_proj", (count, inner, hidden))
        return StoredWeight((gate_up,), write_gate_up, False), StoredWeight((down,), write_down, False)

    def add_biases(self, shape: ExpertsShape, context: ModelContext) -> None:
        count, (first, end) = shape.num_experts, self.span
        gate_up = WeightShard("experts.gate_up_proj_bias", (count, 2 * shape.intermediate_size))
        stored = StoredWeight((gate_up,), partial(_write_halves, self.span), False)
        size = (count, 2 * (end - first))
        self.add_stored("gate_up_bias", stored, torch.empty(size, dtype=context.dtype, device="meta"))
        if context.rank.tensor_rank == 0:
            down = WeightShard("experts.down_proj_bias", (count, shape.hidden_size))
            self.add_weight("down_bias", [down], dtype=context.dtype)
        else:
            # All ranks' parts are summed, so that only one adds the bias.
            self.down_bias = None


def _halves(values: Tensor, span: Span) -> Tensor:
    """Return gates and then ups [..., 2 * length] of a rank, of columns [..., 2 * inner] in turn."""
    first, end = span
    return torch.cat((values[..., 2 * first : 2 * end : 2], values[..., 2 * first + 1 : 2 * end : 2]), dim=-1)


def _write_halves(span: Span, stored: Tensor, row: int, values: Tensor) -> None:
    stored[row : row + len(values)].copy_(_halves(values, span))


class GptOssMixture(MixtureOfExperts):
    """A router with biases, and the experts."""

    def router(self, shape: ExpertsShape, context: ModelContext) -> Linear:
        return Linear([("router", shape.num_experts)], shape.hidden_size, context, bias=True)

    def all_experts(self, shape: ExpertsShape, context: ModelContext) -> Experts:
        return GptOssExperts(shape, context)


class GptOssLayer(LlamaLayer):
    """Llama's equation of GPT-OSS's parts."""

    def attention(self, config: ModelConfig, index: int, rotary: RotaryEmbedding, context: ModelContext) -> nn.Module:
        layer = replace(config.attention(sliding_window=config.window(index)), sinks=True)
        bias = config.flag("attention_bias", True)
        return Attention(index, layer, config.hidden_size, rotary, context, qkv_bias=bias, output_bias=bias)

    def feed_forward(self, config: ModelConfig, index: int, context: ModelContext) -> nn.Module:
        num_experts = config.integer("num_local_experts")
        shape = ExpertsShape(
            num_experts=num_experts,
            top_k=config.experts_per_token(num_experts),
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            activation=Activation.CLAMPED_SWIGLU,
        )
        return GptOssMixture(shape, context)


class GptOss(CausalLM):
    """GPT-OSS 20B and 120B, dequantised."""

    layer = GptOssLayer

    @classmethod
    def complete(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        sizes = {"head_dim": 64, "num_local_experts": 128, "num_experts_per_tok": 4, "sliding_window": 128}
        completed = {**sizes, "rms_norm_eps": 1e-5, "rope_theta": 150000.0, **with_kv_heads(values, 8)}
        if values.get("rope_parameters") is None and not values.get("rope_scaling"):
            completed["rope_parameters"] = _ROPE
        count = values.get("num_hidden_layers")
        if values.get("layer_types") is None and isinstance(count, int):
            completed["layer_types"] = [FULL if index % 2 else SLIDING for index in range(count)]
        return completed

    @classmethod
    def refusals(cls, config: ModelConfig) -> list[str]:
        given = config.number("swiglu_alpha", _ALPHA), config.number("swiglu_limit", _LIMIT)
        known = given == (_ALPHA, _LIMIT)
        reasons = [] if known else [f"its activation has swiglu_alpha {given[0]} and swiglu_limit {given[1]}"]
        return [*super().refusals(config), *reasons]
