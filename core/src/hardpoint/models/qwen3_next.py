"""Qwen 3 Next (2025): gated delta nets (arXiv:2412.06464) in most layers, gated attention in the others, experts in all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hardpoint.interfaces.attention import Refusal
from hardpoint.layers import (
    AttentionOverCache,
    CausalConvolution,
    GatedMLP,
    LayerWithStates,
    Linear,
    MixtureOfExperts,
    RMSNorm,
    RowLinear,
    StateTensor,
    WeightShard,
)
from hardpoint.layers.activations import ACTIVATIONS
from hardpoint.layers.delta import delta_scan, delta_step
from hardpoint.layers.parallel import even_span, head_spans, length, scaled, shifted
from hardpoint.layers.states import over_sequences
from hardpoint.layers.weights import take_rows
from hardpoint.models.config import FULL, LINEAR, with_kv_heads
from hardpoint.models.decoder import CausalLM
from hardpoint.models.qwen2_moe import experts_shape, has_experts

if TYPE_CHECKING:
    from hardpoint.interfaces.capabilities import AttentionLayer
    from hardpoint.layers import ModelContext, Rope, RotaryEmbedding, Step
    from hardpoint.models.config import ModelConfig


class GatedAttention(AttentionOverCache):
    """Attention whose output is multiplied by the sigmoid of a gate, which `q_proj` has behind each head's query."""

    def __init__(
        self,
        index: int,
        layer: AttentionLayer,
        config: ModelConfig,
        rotary: RotaryEmbedding,
        context: ModelContext,
    ) -> None:
        super().__init__(index, layer, context)
        dim, bias = layer.head_dim, config.flag("attention_bias")
        q, kv = 2 * layer.num_heads * dim, layer.num_kv_heads * dim
        heads, kv_heads = head_spans(layer, context.rank)
        keys = scaled(kv_heads, dim)
        rows = None
        if context.rank.tensor_size > 1:
            rows = [scaled(heads, 2 * dim), shifted(keys, q), shifted(keys, q + kv)]
        tensors = [("q_proj", q), ("k_proj", kv), ("v_proj", kv)]
        self.qkv_proj = Linear(tensors, config.hidden_size, context, bias=bias, rows=rows)
        self.q_norm, self.k_norm = (RMSNorm(dim, config.norm_eps, context, offset=1.0) for _ in range(2))
        self.rotary = rotary
        span = scaled(heads, dim)
        self.o_proj = RowLinear("o_proj", layer.num_heads * dim, config.hidden_size, context, span=span, bias=bias)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        """Write the step's keys and values to the cache, attend, and return [T, hidden_size] of x [T, hidden_size]."""
        heads, kv_heads, dim = self.shard.num_heads, self.shard.num_kv_heads, self.shard.head_dim
        qkv = self.qkv_proj(x).view(len(x), -1, dim)
        gated, k, v = torch.split(qkv, [2 * heads, kv_heads, kv_heads], dim=1)
        q, gate = gated.reshape(len(x), heads, 2 * dim).chunk(2, dim=-1)
        q, k = self.q_norm(q), self.k_norm(k)
        self.rotary(q, k, step.positions)
        out = self.attend(q, k, v, step) * torch.sigmoid(gate)
        return self.o_proj(out.view(len(x), -1))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class DeltaShape:
    """Heads of a delta net: `values_per_key` neighbouring value heads have the query and key of one key head.

    Attributes:
        activation: of the convolution, one of `ACTIVATIONS`.
    """

    num_key_heads: int
    values_per_key: int
    key_dim: int
    value_dim: int
    activation: str


class GatedDeltaNet(LayerWithStates):
    """Linear attention by the gated delta rule, by whole key heads divided among the ranks.

    A slot holds the convolution's last inputs, and each value head's state in float32.
    """

    A_log: Tensor
    dt_bias: Tensor

    def __init__(self, index: int, shape: DeltaShape, config: ModelConfig, context: ModelContext) -> None:
        hidden, kernel = config.hidden_size, config.integer("linear_conv_kernel_dim")
        own = even_span(shape.num_key_heads, context.rank.tensor_size, context.rank.tensor_rank)
        values = scaled(own, shape.values_per_key)
        keys, all_keys = scaled(own, shape.key_dim), shape.num_key_heads * shape.key_dim
        all_values = shape.num_key_heads * shape.values_per_key
        channels = [keys, shifted(keys, all_keys), shifted(scaled(values, shape.value_dim), 2 * all_keys)]
        width = 2 * all_keys + all_values * shape.value_dim
        conv1d = CausalConvolution(width, kernel, channels, context)
        state = StateTensor((length(values), shape.key_dim, shape.value_dim), torch.float32)
        super().__init__(index, (conv1d.state, state))
        self.shape, self.conv1d = shape, conv1d
        self._num_keys, self._num_values = length(own), length(values)
        per_key = 2 * shape.key_dim + 2 * shape.values_per_key * shape.value_dim
        self.in_proj_qkvz = Linear(
            [("in_proj_qkvz", shape.num_key_heads * per_key)], hidden, context, rows=[scaled(own, per_key)]
        )
        self.in_proj_ba = Linear([("in_proj_ba", 2 * all_values)], hidden, context, rows=[scaled(values, 2)])
        for name in ("dt_bias", "A_log"):
            self.add_weight(name, take_rows([WeightShard(name, (all_values,))], [values]), dtype=torch.float32)
        self.norm = RMSNorm(shape.value_dim, config.norm_eps, context)
        span = scaled(values, shape.value_dim)
        self.out_proj = RowLinear("out_proj", all_values * shape.value_dim, hidden, context, span=span)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        """Go on with the states of the step's sequences, and return [T, hidden_size] of x [T, hidden_size]."""
        shape, tokens = self.shape, len(x)
        each, per_key = shape.values_per_key, shape.values_per_key * shape.value_dim
        q, k, v, z = torch.split(
            self.in_proj_qkvz(x).view(tokens, self._num_keys, -1),
            [shape.key_dim, shape.key_dim, per_key, per_key],
            dim=-1,
        )
        b, a = self.in_proj_ba(x).view(tokens, self._num_keys, 2, each).float().unbind(2)
        kept, state = self.read(step)
        mixed, kept = self.conv1d(torch.cat([part.flatten(1) for part in (q, k, v)], dim=-1), step, kept)
        widths = [self._num_keys * shape.key_dim] * 2 + [self._num_values * shape.value_dim]
        q, k, v = torch.split(ACTIVATIONS[shape.activation](mixed).to(x.dtype).float(), widths, dim=-1)
        q, k = (
            _unit(part.reshape(tokens, self._num_keys, shape.key_dim)).repeat_interleave(each, dim=1) for part in (q, k)
        )
        q, v = q * shape.key_dim**-0.5, v.reshape(tokens, self._num_values, shape.value_dim)
        decay = -self.A_log.exp() * functional.softplus(a.flatten(1) + self.dt_bias)
        out = over_sequences(step, delta_step, delta_scan, state, (q, k, v, decay, b.flatten(1).sigmoid()))
        self.write(step, kept, state)
        out = self.norm(out.to(x.dtype)) * functional.silu(z.reshape(out.shape).float())
        return self.out_proj(out.to(x.dtype).flatten(1))  # type: ignore[no-any-return]

    def tensor_obstacle(self, size: int) -> str | None:
        """Return why the layer cannot be divided among `size` ranks, or None."""
        count = self.shape.num_key_heads
        return None if size <= count else f"{count} key heads of a delta net are fewer than {size} ranks"


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


class Qwen3NextLayer(nn.Module):
    """Llama's equation, its first branch a delta net or gated attention; norms store their weights less 1."""

    def __init__(self, config: ModelConfig, index: int, rotary: RotaryEmbedding, context: ModelContext) -> None:
        super().__init__()
        norm = partial(RMSNorm, config.hidden_size, config.norm_eps, context, offset=1.0)
        kind = config.layer_types[index]
        number = config.layer_types[:index].count(kind)
        self.input_layernorm = norm()
        if kind == FULL:
            self.self_attn = GatedAttention(number, config.attention(), config, rotary, context)
        else:
            self.linear_attn = GatedDeltaNet(number, delta_shape(config), config, context)
        self._attends = kind == FULL
        self.post_attention_layernorm = norm()
        self.mlp: nn.Module
        if has_experts(config, index):
            shared = config.integer("shared_expert_intermediate_size")
            self.mlp = MixtureOfExperts(experts_shape(config), context, shared_size=shared)
        else:
            self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, config.activation, context)

    def forward(self, stream: Tensor, branch: Tensor | None, step: Step) -> Tensor:
        mix = self.self_attn if self._attends else self.linear_attn
        branch = mix(self.input_layernorm(stream, branch), step)
        return self.mlp(self.post_attention_layernorm(stream, branch))  # type: ignore[no-any-return]


class Qwen3Next(CausalLM):
    """Qwen 3 Next 80B-A3B."""

    layer = Qwen3NextLayer
    layer_kinds = frozenset({FULL, LINEAR})
    norm_offset = 1.0

    @classmethod
    def complete(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        defaults = {
            "head_dim": 256,
            "partial_rotary_factor": 0.25,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "num_experts": values.get("num_local_experts", 512),
            "num_experts_per_tok": 10,
            "norm_topk_prob": True,
        }
        completed = {**defaults, **with_kv_heads(values, 2)}
        count, every = values.get("num_hidden_layers"), values.get("full_attention_interval", 4)
        if values.get("layer_types") is None and isinstance(count, int) and isinstance(every, int) and every > 0:
            completed["layer_types"] = [LINEAR if (number + 1) % every else FULL for number in range(count)]
        return completed

    @classmethod
    def ropes(cls, config: ModelConfig) -> tuple[tuple[Rope, ...], tuple[int, ...]] | Refusal:
        return config.ropes(partial=True)

    @classmethod
    def refusals(cls, config: ModelConfig) -> list[str]:
        reasons = super().refusals(config)
        values, keys = config.integer("linear_num_value_heads"), config.integer("linear_num_key_heads")
        if values % keys:
            reasons.append(f"{values} value heads of its delta nets are not a multiple of {keys} key heads")
        if FULL not in config.layer_types:
            reasons.append("none of its layers has attention")
        return reasons

    @classmethod
    def unused(cls, config: ModelConfig) -> str:
        return r"mtp\."

    def norm(self, config: ModelConfig, context: ModelContext) -> RMSNorm:
        return RMSNorm(config.hidden_size, config.norm_eps, context, offset=1.0)


def delta_shape(config: ModelConfig) -> DeltaShape:
    """Return the heads of a configuration's delta nets."""
    keys = config.integer("linear_num_key_heads")
    return DeltaShape(
        num_key_heads=keys,
        values_per_key=config.integer("linear_num_value_heads") // keys,
        key_dim=config.integer("linear_key_head_dim"),
        value_dim=config.integer("linear_value_head_dim"),
        activation=config.activation_name,
    )
