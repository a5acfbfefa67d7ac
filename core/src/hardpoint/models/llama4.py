"""Llama 4's language model (Meta, 2025): attention in chunks, every fourth layer without positions over all keys, and experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from hardpoint.layers import (
    AttentionOverCache,
    Experts,
    ExpertsShape,
    GatedMLP,
    Linear,
    QKVLinear,
    Ranks,
    RowLinear,
    StoredWeight,
    WeightShard,
)
from hardpoint.layers.parallel import head_spans, scaled
from hardpoint.models.config import CHUNKED, FULL
from hardpoint.models.decoder import CausalLM
from hardpoint.models.llama import LlamaLayer

if TYPE_CHECKING:
    from hardpoint.interfaces.capabilities import AttentionLayer
    from hardpoint.layers import ModelContext, RotaryEmbedding, Step
    from hardpoint.models.config import ModelConfig


class Llama4Attention(AttentionOverCache):
    """Attention whose queries and keys are rotated in pairs of neighbours and then normalised, or neither.

    Without positions, queries grow with the logarithm of their position (arXiv:2501.19399).

    Args:
        rotary: None for a layer without positions.
    """

    def __init__(
        self,
        index: int,
        layer: AttentionLayer,
        config: ModelConfig,
        rotary: RotaryEmbedding | None,
        context: ModelContext,
    ) -> None:
        super().__init__(index, layer, context)
        hidden, bias, dim = config.hidden_size, config.flag("attention_bias"), layer.head_dim
        self.rotary, self.eps = rotary, config.norm_eps
        self.normalises = config.flag("use_qk_norm", True)
        self.tunes = config.flag("attn_temperature_tuning", True)
        self.floor_scale, self.attn_scale = config.number("floor_scale"), config.number("attn_scale")
        self.qkv_proj = QKVLinear(hidden, layer, context, bias=bias)
        span = scaled(head_spans(layer, context.rank)[0], dim)
        self.o_proj = RowLinear("o_proj", layer.num_heads * dim, hidden, context, span=span, bias=bias)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        """Write the step's keys and values to the cache, attend, and return [T, hidden_size] of x [T, hidden_size]."""
        heads, kv_heads, dim = self.shard.num_heads, self.shard.num_kv_heads, self.shard.head_dim
        qkv = self.qkv_proj(x).view(len(x), -1, dim)
        q, k, v = torch.split(qkv, [heads, kv_heads, kv_heads], dim=1)
        if self.rotary is not None:
            q, k = _in_halves(q), _in_halves(k)
            self.rotary(q, k, step.positions)
            if self.normalises:
                q, k = (self._unit(each) for each in (q, k))
        elif self.tunes:
            steps = torch.floor((step.positions.float() + 1) / self.floor_scale)
            q = (q * (torch.log1p(steps) * self.attn_scale + 1)[:, None, None]).to(q.dtype)
        return self.o_proj(self.attend(q, k, v, step).view(len(x), -1))  # type: ignore[no-any-return]

    def _unit(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


def _in_halves(x: Tensor) -> Tensor:
    """Return heads [..., dim] with what is rotated together half a head apart. Queries and keys are permuted alike."""
    return x.reshape(*x.shape[:-1], -1, 2).transpose(-1, -2).flatten(-2)


class Llama4Experts(Experts):
    """Experts that are published stacked, their inputs as rows, gates before ups."""

    def stored(self, shape: ExpertsShape, context: ModelContext) -> tuple[StoredWeight, StoredWeight]:
        count, hidden, inner = shape.num_experts, shape.hidden_size, shape.intermediate_size
        (first, end), program = self.span, self.program

        def write_gate_up(stored: Tensor, row: int, values: Tensor) -> None:
            own = values.view(len(values), hidden, 2, inner)[..., first:end].permute(0, 2, 3, 1)
            program.write_gate_up(stored, row * 2 * (end - first), own.reshape(-1, hidden))

        def write_down(stored: Tensor, row: int, values: Tensor) -> None:
            program.write_down(stored, row * hidden, values[:, first:end].transpose(1, 2).flatten(0, 1))

        gate_up = WeightShard("experts.gate_up_proj", (count, hidden, 2 * inner))
        down = WeightShard("experts.down_proj", (count, inner, hidden))
        return StoredWeight((gate_up,), write_gate_up, False), StoredWeight((down,), write_down, False)


class Llama4Mixture(nn.Module):
    """`shared(x) + expert(sigmoid(logit) * x)` of the one expert with the greatest logit."""

    def __init__(self, shape: ExpertsShape, context: ModelContext) -> None:
        super().__init__()
        self.router = Linear([("router", shape.num_experts)], shape.hidden_size, context)
        self.experts = Llama4Experts(shape, context)
        # Its part is summed over the ranks together with the expert's.
        alone = replace(context, ranks=Ranks())
        self.shared_expert = GatedMLP(shape.hidden_size, shape.intermediate_size, shape.activation, alone)
        self._ranks = context.ranks.tensor

    def forward(self, x: Tensor) -> Tensor:
        """Return [T, hidden_size] of x [T, hidden_size], summed over the ranks."""
        logits = self.router(x)
        share = logits.amax(-1, keepdim=True).float().sigmoid().to(x.dtype)
        out: Tensor = self.experts(x * share, logits)
        out += self.shared_expert(x)
        if self._ranks is not None and len(out):
            self._ranks.all_reduce(out)
        return out


class Llama4Layer(LlamaLayer):
    """Llama's equation of Llama 4's parts; its second branch is called `feed_forward`."""

    def attention(self, config: ModelConfig, index: int, rotary: RotaryEmbedding, context: ModelContext) -> nn.Module:
        chunk = config.integer("attention_chunk_size") if config.layer_types[index] == CHUNKED else None
        rotates = config.integers("no_rope_layers")[index] != 0
        layer = replace(config.attention(), chunk=chunk)
        return Llama4Attention(index, layer, config, rotary if rotates else None, context)

    def feed_forward(self, config: ModelConfig, index: int, context: ModelContext) -> nn.Module:
        if index not in config.integers("moe_layers"):
            return GatedMLP(config.hidden_size, config.integer("intermediate_size_mlp"), config.activation, context)
        count, inner = config.integer("num_local_experts"), config.intermediate_size
        shape = ExpertsShape(count, config.experts_per_token(count), config.hidden_size, inner, config.activation)
        return Llama4Mixture(shape, context)


class Llama4(CausalLM):
    """The language models of Llama 4 Scout and Maverick, published by themselves."""

    layer = Llama4Layer
    layer_kinds = frozenset({FULL, CHUNKED})
    published: ClassVar = {".mlp.": ".feed_forward."}

    @classmethod
    def complete(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        defaults = {
            "head_dim": 128,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "intermediate_size_mlp": 16384,
            "num_experts_per_tok": 1,
            "num_local_experts": 16,
            "interleave_moe_layer_step": 1,
            "no_rope_layer_interval": 4,
            "attention_chunk_size": 8192,
            "floor_scale": 8192,
            "attn_scale": 0.1,
        }
        completed = {**defaults, **{name: value for name, value in values.items() if value is not None}}
        count = int(completed["num_hidden_layers"])
        every, experts_every = completed["no_rope_layer_interval"], completed["interleave_moe_layer_step"]
        if not completed.get("no_rope_layers"):
            completed["no_rope_layers"] = [int((index + 1) % every != 0) for index in range(count)]
        completed.setdefault("moe_layers", list(range(experts_every - 1, count, experts_every)))
        rotated = completed["no_rope_layers"]
        completed.setdefault("layer_types", [CHUNKED if rotates else FULL for rotates in rotated])
        if "attention_chunk_size" in values and values["attention_chunk_size"] is None:
            completed["layer_types"] = [FULL] * count
        return completed

    @classmethod
    def unused(cls, config: ModelConfig) -> str:
        return r"(vision_model|multi_modal_projector)\."

    @classmethod
    def refusals(cls, config: ModelConfig) -> list[str]:
        reasons = super().refusals(config)
        chosen = config.integer("num_experts_per_tok")
        if chosen != 1 and config.integers("moe_layers"):
            reasons.append(f"each token goes through {chosen} experts, whose inputs differ")
        if len(config.integers("no_rope_layers")) < config.num_layers:
            reasons.append("it does not say of each layer whether it has positions")
        return reasons
