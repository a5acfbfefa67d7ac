"""Granite 4 (IBM, 2025): Mamba 2 in most layers, attention without positions in the others, experts beside a shared feed-forward."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn

from hardpoint.layers import (
    Attention,
    Experts,
    ExpertsShape,
    GatedMLP,
    Linear,
    Mamba2,
    MambaShape,
    RMSNorm,
    StoredWeight,
    WeightShard,
)
from hardpoint.models.config import FULL, LINEAR
from hardpoint.models.granite import Granite

if TYPE_CHECKING:
    from torch import Tensor

    from hardpoint.layers import ModelContext, RotaryEmbedding, Step
    from hardpoint.models.config import ModelConfig


class GraniteExperts(Experts):
    """Experts that are published stacked, gates above ups."""

    def stored(self, shape: ExpertsShape, context: ModelContext) -> tuple[StoredWeight, StoredWeight]:
        count, hidden, inner = shape.num_experts, shape.hidden_size, shape.intermediate_size
        (first, end), program = self.span, self.program

        def write_gate_up(stored: Tensor, row: int, values: Tensor) -> None:
            own = values.view(len(values), 2, inner, hidden)[:, :, first:end]
            program.write_gate_up(stored, row * 2 * (end - first), own.reshape(-1, hidden))

        def write_down(stored: Tensor, row: int, values: Tensor) -> None:
            program.write_down(stored, row * hidden, values[:, :, first:end].reshape(-1, end - first))

        gate_up = WeightShard("input_linear.weight", (count, 2 * inner, hidden))
        down = WeightShard("output_linear.weight", (count, hidden, inner))
        return StoredWeight((gate_up,), write_gate_up, False), StoredWeight((down,), write_down, False)


class GraniteMixture(nn.Module):
    """Router and experts."""

    def __init__(self, shape: ExpertsShape, context: ModelContext) -> None:
        super().__init__()
        self.router = Linear([("router.layer", shape.num_experts)], shape.hidden_size, context)
        self.experts = GraniteExperts(shape, context)
        self._ranks = context.ranks.tensor

    def forward(self, x: Tensor) -> Tensor:
        """Return [T, hidden_size] of x [T, hidden_size], summed over the ranks."""
        out: Tensor = self.experts(x, self.router(x))
        if self._ranks is not None and len(out):
            self._ranks.all_reduce(out)
        return out


class GraniteHybridLayer(nn.Module):
    """`x + r * mix(norm(x))`, then `x + r * (experts(norm(x)) + mlp(norm(x)))`."""

    def __init__(self, config: ModelConfig, index: int, rotary: RotaryEmbedding, context: ModelContext) -> None:
        super().__init__()
        kind, hidden = config.layer_types[index], config.hidden_size
        number = config.layer_types[:index].count(kind)
        self.residual_multiplier = config.number("residual_multiplier", 1.0)
        self.input_layernorm = RMSNorm(hidden, config.norm_eps, context)
        if kind == FULL:
            layer, bias = (
                config.attention(scale=config.number("attention_multiplier", 1.0)),
                config.flag("attention_bias"),
            )
            rotates = config.values.get("position_embedding_type") == "rope"
            self.self_attn = Attention(
                number, layer, hidden, rotary if rotates else None, context, qkv_bias=bias, output_bias=bias
            )
        else:
            self.mamba = Mamba2(number, mamba_shape(config), hidden, context)
        self._attends = kind == FULL
        self.post_attention_layernorm = RMSNorm(hidden, config.norm_eps, context)
        self.block_sparse_moe: GraniteMixture | None = None
        if count := config.integer("num_local_experts", least=0):
            inner, chosen = config.intermediate_size, config.experts_per_token(count)
            self.block_sparse_moe = GraniteMixture(
                ExpertsShape(count, chosen, hidden, inner, config.activation), context
            )
        self.shared_mlp = GatedMLP(
            hidden, config.integer("shared_intermediate_size"), config.activation, context, names=("gate_up_proj",)
        )

    def forward(self, stream: Tensor, branch: Tensor | None, step: Step) -> Tensor:
        mix = self.self_attn if self._attends else self.mamba
        branch = mix(self.input_layernorm(stream, branch), step) * self.residual_multiplier
        x = self.post_attention_layernorm(stream, branch)
        out = self.shared_mlp(x)
        if self.block_sparse_moe is not None:
            out = out + self.block_sparse_moe(x)
        return out * self.residual_multiplier  # type: ignore[no-any-return]


class GraniteMoeHybrid(Granite):
    """Granite 4: the hybrids, with and without experts, and what is published of its architecture with attention alone."""

    layer = GraniteHybridLayer
    layer_kinds = frozenset({FULL, LINEAR})
    published: ClassVar = {
        ".shared_mlp.gate_up_proj.": ".shared_mlp.input_linear.",
        ".shared_mlp.down_proj.": ".shared_mlp.output_linear.",
    }

    @classmethod
    def complete(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        defaults = {
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 1024,
            "mamba_n_heads": 128,
            "mamba_n_groups": 1,
            "mamba_d_state": 256,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_conv_bias": True,
        }
        completed = {**defaults, **values}
        kinds = values.get("layer_types") or values.get("layers_block_type")
        if kinds is None:
            kinds = [LINEAR] * int(values.get("num_hidden_layers") or 0)
        completed["layer_types"] = [_KINDS.get(kind, kind) for kind in kinds]
        return completed

    @classmethod
    def refusals(cls, config: ModelConfig) -> list[str]:
        reasons = super().refusals(config)
        if FULL not in config.layer_types:
            reasons.append("none of its layers has attention")
        if config.values.get("position_embedding_type") not in (None, "nope", "rope"):
            reasons.append(f"its positions are embedded as {config.values['position_embedding_type']!r}")
        return [*reasons, *mamba_refusals(config)]


_KINDS = {"mamba": LINEAR, "attention": FULL}
"""What published configurations call the types of layers."""


def mamba_shape(config: ModelConfig, width: int | None = None, **more: Any) -> MambaShape:
    """Return what the mixers of a configuration with Mamba's usual names compute.

    Args:
        width: of all heads; None for `mamba_expand` times the hidden size.
        more: settings of `MambaShape` beside the sizes.
    """
    heads = config.integer("mamba_n_heads")
    width = config.integer("mamba_expand") * config.hidden_size if width is None else width
    return MambaShape(
        num_heads=heads,
        head_dim=width // heads,
        num_groups=config.integer("mamba_n_groups"),
        state_size=config.integer("mamba_d_state"),
        kernel=config.integer("mamba_d_conv", least=2),
        conv_bias=config.flag("mamba_conv_bias"),
        activation=config.activation_name,
        bias=config.flag("mamba_proj_bias"),
        **{"output_bias": config.flag("mamba_proj_bias"), "eps": config.norm_eps, **more},
    )


def mamba_refusals(config: ModelConfig, width: int | None = None) -> list[str]:
    """Return why such mixers cannot be run."""
    shape = mamba_shape(config, width)
    width = config.integer("mamba_expand") * config.hidden_size if width is None else width
    reasons = []
    if shape.width != width or shape.num_heads % shape.num_groups:
        reasons.append(f"a mixer of {width} elements does not divide into {shape.num_heads} heads of whole groups")
    limits = config.values.get("time_step_limit")
    # JSON has no infinity: transformers writes it as an object.
    none = (None, [0.0, math.inf], (0.0, math.inf), [0.0, {"__float__": "Infinity"}])
    if limits not in none:
        reasons.append(f"its time steps are limited to {limits}")
    return reasons
