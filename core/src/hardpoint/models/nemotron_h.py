"""Nemotron H (arXiv:2504.03624): each layer is one of a Mamba 2 mixer, attention without positions, and a feed-forward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn

from hardpoint.layers import Attention, ColumnLinear, Mamba2, MambaShape, RMSNorm, RowLinear
from hardpoint.layers.activations import ACTIVATIONS
from hardpoint.layers.parallel import aligned_obstacle, aligned_spans
from hardpoint.models.config import FULL, LINEAR
from hardpoint.models.decoder import CausalLM

if TYPE_CHECKING:
    from torch import Tensor

    from hardpoint.layers import ModelContext, RotaryEmbedding, Step
    from hardpoint.models.config import ModelConfig

MLP = "mlp"
_PATTERN = {"M": LINEAR, "*": FULL, "-": MLP, "E": "moe"}
"""Layers as published configurations write them, a letter for each."""


class SquaredMLP(nn.Module):
    """`down(relu(up(x))²)`, its inner elements divided among the ranks."""

    def __init__(self, config: ModelConfig, context: ModelContext) -> None:
        super().__init__()
        hidden, self.intermediate_size, bias = config.hidden_size, config.intermediate_size, config.flag("mlp_bias")
        span = aligned_spans(self.intermediate_size, context.rank.tensor_size)[context.rank.tensor_rank]
        self.up_proj = ColumnLinear("up_proj", hidden, self.intermediate_size, context, span=span, bias=bias)
        self.down_proj = RowLinear("down_proj", self.intermediate_size, hidden, context, span=span, bias=bias)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        """Return [T, hidden_size] of x [T, hidden_size]."""
        return self.down_proj(self.up_proj(x).relu().square())  # type: ignore[no-any-return]

    def tensor_obstacle(self, size: int) -> str | None:
        """Return why the layer cannot be divided among `size` ranks, or None."""
        return aligned_obstacle(self.intermediate_size, "intermediate size", size)


class NemotronHLayer(nn.Module):
    """`x + mix(norm(x))`."""

    def __init__(self, config: ModelConfig, index: int, rotary: RotaryEmbedding, context: ModelContext) -> None:
        super().__init__()
        kind, hidden = config.layer_types[index], config.hidden_size
        number = config.layer_types[:index].count(kind)
        self.norm = RMSNorm(hidden, config.norm_eps, context)
        self.mixer: nn.Module
        if kind == FULL:
            self.mixer = Attention(number, config.attention(), hidden, None, context)
        elif kind == LINEAR:
            self.mixer = Mamba2(number, _mamba_shape(config), hidden, context)
        else:
            self.mixer = SquaredMLP(config, context)

    def forward(self, stream: Tensor, branch: Tensor | None, step: Step) -> Tensor:
        return self.mixer(self.norm(stream, branch), step)  # type: ignore[no-any-return]


class NemotronH(CausalLM):
    """Nemotron H and Nemotron Nano 2, without experts."""

    layer = NemotronHLayer
    layer_kinds = frozenset({FULL, LINEAR, MLP})
    published: ClassVar = {
        "model.embed_tokens.": "backbone.embeddings.",
        "model.norm.": "backbone.norm_f.",
        "model.layers.": "backbone.layers.",
    }

    @classmethod
    def complete(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        defaults = {
            "head_dim": 128,
            "num_key_value_heads": 8,
            "layer_norm_epsilon": 1e-5,
            "mlp_hidden_act": "relu2",
            "mamba_hidden_act": "silu",
            "ssm_state_size": 128,
            "mamba_num_heads": 128,
            "mamba_head_dim": 64,
            "n_groups": 8,
            "conv_kernel": 4,
            "use_conv_bias": True,
        }
        completed = {**defaults, **values}
        kinds = values.get("layers_block_type") or values.get("layer_types")
        pattern = values.get("hybrid_override_pattern")
        if kinds is None and isinstance(pattern, str):
            kinds = [_PATTERN.get(letter, letter) for letter in pattern]
        completed["rms_norm_eps"] = completed["layer_norm_epsilon"]
        # Whatever the configuration says.
        completed["tie_word_embeddings"] = False
        if kinds is not None:
            completed["layer_types"] = list(kinds)
        return completed

    @classmethod
    def refusals(cls, config: ModelConfig) -> list[str]:
        reasons = super().refusals(config)
        if config.values["mlp_hidden_act"] != "relu2":
            reasons.append(f"its feed-forward's activation is {config.values['mlp_hidden_act']}")
        if str(config.values["mamba_hidden_act"]) not in ACTIVATIONS:
            reasons.append(f"its mixers' activation is {config.values['mamba_hidden_act']}")
        if FULL not in config.layer_types:
            reasons.append("none of its layers has attention")
        if config.integer("mamba_num_heads") % config.integer("n_groups"):
            reasons.append("its mixers' heads do not divide into whole groups")
        if config.flag("attention_bias") or config.flag("use_bias"):
            reasons.append("its projections have biases")
        return reasons

    @classmethod
    def unused(cls, config: ModelConfig) -> str:
        return r"mtp\."


def _mamba_shape(config: ModelConfig) -> MambaShape:
    return MambaShape(
        num_heads=config.integer("mamba_num_heads"),
        head_dim=config.integer("mamba_head_dim"),
        num_groups=config.integer("n_groups"),
        state_size=config.integer("ssm_state_size"),
        kernel=config.integer("conv_kernel", least=2),
        conv_bias=config.flag("use_conv_bias"),
        activation=str(config.values["mamba_hidden_act"]),
        # In every step: transformers has it where a prompt is computed, and not where a token is.
        least_time=config.number("time_step_min", 0.001),
        eps=config.norm_eps,
    )
