"""LFM2 (Liquid AI, 2025): short gated convolutions in most layers, attention with norms of queries and keys in the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn

from hardpoint.layers import Attention, CausalConvolution, GatedMLP, LayerWithStates, Linear, RMSNorm, RowLinear
from hardpoint.layers.parallel import even_span, shifted
from hardpoint.models.config import FULL
from hardpoint.models.decoder import CausalLM

if TYPE_CHECKING:
    from torch import Tensor

    from hardpoint.layers import ModelContext, RotaryEmbedding, Step
    from hardpoint.models.config import ModelConfig

CONV = "conv"


class ShortConvolution(LayerWithStates):
    """`out(c * convolution(b * x))` of three projections b, c and x; a slot holds the convolution's last inputs."""

    def __init__(self, index: int, config: ModelConfig, context: ModelContext) -> None:
        hidden, bias, rank = config.hidden_size, config.flag("conv_bias"), context.rank
        span = even_span(hidden, rank.tensor_size, rank.tensor_rank)
        conv = CausalConvolution(hidden, config.integer("conv_L_cache", least=2), [span], context, bias=bias)
        super().__init__(index, (conv.state,))
        self.conv = conv
        rows = [shifted(span, part * hidden) for part in range(3)]
        self.in_proj = Linear([("in_proj", 3 * hidden)], hidden, context, bias=bias, rows=rows)
        self.out_proj = RowLinear("out_proj", hidden, hidden, context, span=span, bias=bias)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        """Go on with the states of the step's sequences, and return [T, hidden_size] of x [T, hidden_size]."""
        b, c, inner = self.in_proj(x).chunk(3, dim=-1)
        (kept,) = self.read(step)
        mixed, kept = self.conv(b * inner, step, kept)
        self.write(step, kept)
        return self.out_proj(c * mixed.to(x.dtype))  # type: ignore[no-any-return]


class Lfm2Layer(nn.Module):
    """Llama's equation, its first branch attention or a convolution."""

    def __init__(self, config: ModelConfig, index: int, rotary: RotaryEmbedding, context: ModelContext) -> None:
        super().__init__()
        kind, hidden, eps = config.layer_types[index], config.hidden_size, config.norm_eps
        number = config.layer_types[:index].count(kind)
        self.operator_norm = RMSNorm(hidden, eps, context)
        if kind == FULL:
            q_norm, k_norm = (RMSNorm(config.head_dim, eps, context) for _ in range(2))
            self.self_attn = Attention(
                number, config.attention(), hidden, rotary, context, q_norm=q_norm, k_norm=k_norm
            )
        else:
            self.conv = ShortConvolution(number, config, context)
        self._attends = kind == FULL
        self.ffn_norm = RMSNorm(hidden, eps, context)
        self.feed_forward = GatedMLP(hidden, config.intermediate_size, config.activation, context)

    def forward(self, stream: Tensor, branch: Tensor | None, step: Step) -> Tensor:
        mix = self.self_attn if self._attends else self.conv
        branch = mix(self.operator_norm(stream, branch), step)
        return self.feed_forward(self.ffn_norm(stream, branch))  # type: ignore[no-any-return]


class Lfm2(CausalLM):
    """LFM2, 350M to 2.6B."""

    layer = Lfm2Layer
    layer_kinds = frozenset({FULL, CONV})
    published: ClassVar = {
        "model.norm.": "model.embedding_norm.",
        ".self_attn.o_proj.": ".self_attn.out_proj.",
        ".self_attn.q_norm.": ".self_attn.q_layernorm.",
        ".self_attn.k_norm.": ".self_attn.k_layernorm.",
        ".feed_forward.gate_proj.": ".feed_forward.w1.",
        ".feed_forward.up_proj.": ".feed_forward.w3.",
        ".feed_forward.down_proj.": ".feed_forward.w2.",
    }

    @classmethod
    def complete(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        defaults = {
            "num_key_value_heads": 8,
            "conv_L_cache": 3,
            "norm_eps": 1e-5,
            "rope_theta": 1e6,
            "block_multiple_of": 256,
            "block_ffn_dim_multiplier": 1.0,
            "block_auto_adjust_ff_dim": True,
        }
        completed = {**defaults, **values}
        tied = values.get("tie_word_embeddings", True)
        inner = values.get("block_ff_dim", values.get("intermediate_size", 12288))
        if completed["block_auto_adjust_ff_dim"]:
            inner = int(2 * inner / 3)
            if completed["block_ffn_dim_multiplier"] is not None:
                multiple = completed["block_multiple_of"]
                inner = -(-int(completed["block_ffn_dim_multiplier"] * inner) // multiple) * multiple
        completed |= {
            "intermediate_size": inner,
            "rms_norm_eps": completed["norm_eps"],
            "tie_word_embeddings": values.get("tie_embedding", tied),
            # Whatever the configuration calls it.
            "hidden_act": "silu",
        }
        count, attending = values.get("num_hidden_layers"), values.get("full_attn_idxs")
        if values.get("layer_types") is None and isinstance(count, int):
            some = range(count) if attending is None else attending
            completed["layer_types"] = [FULL if index in some else CONV for index in range(count)]
        return completed

    @classmethod
    def refusals(cls, config: ModelConfig) -> list[str]:
        reasons = [] if FULL in config.layer_types else ["none of its layers has attention"]
        return [*super().refusals(config), *reasons]
