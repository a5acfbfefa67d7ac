"""Falcon H1 (arXiv:2507.22448): attention and Mamba 2 beside each other in every layer, with a multiplier at each of their ends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn

from hardpoint.layers import Attention, GatedMLP, LMHead, Mamba2, RMSNorm, VocabEmbedding
from hardpoint.models.config import FULL
from hardpoint.models.decoder import CausalLM
from hardpoint.models.granite_hybrid import mamba_refusals, mamba_shape

if TYPE_CHECKING:
    from torch import Tensor

    from hardpoint.layers import ModelContext, RotaryEmbedding, Step
    from hardpoint.models.config import ModelConfig


class FalconMLP(GatedMLP):
    """A gated feed-forward with multipliers of its gate and its output."""

    def __init__(self, config: ModelConfig, context: ModelContext) -> None:
        super().__init__(config.hidden_size, config.intermediate_size, config.activation, context)
        self.gate_multiplier, self.down_multiplier = config.values["mlp_multipliers"]

    def forward(self, x: Tensor) -> Tensor:
        """Return [rows, hidden_size] of x [rows, hidden_size]."""
        both = self.gate_up_proj(x)
        both[..., : both.shape[-1] // 2] *= self.gate_multiplier
        return self.down_proj(self._operators.gated_activation(both, self.activation)) * self.down_multiplier  # type: ignore[no-any-return]


class FalconH1Layer(nn.Module):
    """`x + attention(norm(x)) + mamba(norm(x))`, then `x + mlp(norm(x))`."""

    def __init__(self, config: ModelConfig, index: int, rotary: RotaryEmbedding, context: ModelContext) -> None:
        super().__init__()
        hidden, bias = config.hidden_size, config.flag("attention_bias")
        self.input_layernorm = RMSNorm(hidden, config.norm_eps, context)
        # Rotation is linear: a factor of the keys is one of the scores.
        layer = config.attention(scale=config.head_dim**-0.5 * config.number("key_multiplier"))
        self.self_attn = Attention(index, layer, hidden, rotary, context, qkv_bias=bias, output_bias=bias)
        more = {
            "output_bias": config.flag("projectors_bias"),
            "eps": config.norm_eps if config.flag("mamba_rms_norm") else None,
            "norm_first": config.flag("mamba_norm_before_gate"),
            "factors": tuple(config.values["ssm_multipliers"]),
        }
        self.mamba = Mamba2(index, mamba_shape(config, config.integer("mamba_d_ssm"), **more), hidden, context)
        self.attention_multipliers, self.ssm_multipliers = (
            tuple(config.number(f"{name}_{end}_multiplier") for end in ("in", "out")) for name in ("attention", "ssm")
        )
        self.pre_ff_layernorm = RMSNorm(hidden, config.norm_eps, context)
        self.feed_forward = FalconMLP(config, context)

    def forward(self, stream: Tensor, branch: Tensor | None, step: Step) -> Tensor:
        x = self.input_layernorm(stream, branch)
        into, out_of = self.ssm_multipliers
        mixed = self.mamba(x * into, step) * out_of
        into, out_of = self.attention_multipliers
        mixed = mixed + self.self_attn(x * into, step) * out_of
        return self.feed_forward(self.pre_ff_layernorm(stream, mixed))  # type: ignore[no-any-return]


class FalconH1(CausalLM):
    """Falcon H1, 0.5B to 34B."""

    layer = FalconH1Layer
    published: ClassVar = {"model.norm.": "model.final_layernorm."}

    @classmethod
    def complete(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        ones = (
            "key_multiplier",
            "attention_in_multiplier",
            "attention_out_multiplier",
            "ssm_in_multiplier",
            "ssm_out_multiplier",
            "embedding_multiplier",
            "lm_head_multiplier",
        )
        defaults = {
            **dict.fromkeys(ones, 1.0),
            "rms_norm_eps": 1e-5,
            "num_key_value_heads": 8,
            "mamba_d_ssm": 1024,
            "mamba_n_heads": 128,
            "mamba_n_groups": 1,
            "mamba_d_state": 256,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_conv_bias": True,
            "mamba_norm_before_gate": True,
        }
        completed = {**defaults, **values}
        if completed["mamba_d_ssm"] is None:
            completed["mamba_d_ssm"] = completed["mamba_expand"] * completed["hidden_size"]
        for name, count in (("mlp_multipliers", 2), ("ssm_multipliers", 5)):
            given = completed.get(name)
            completed[name] = [1.0] * count if given is None else [float(one) for one in given]
            if len(completed[name]) != count:
                raise ValueError(f"{name} are {count} numbers, not {len(completed[name])}")
        # Each has both, which transformers calls otherwise.
        completed["layer_types"] = [FULL] * int(values.get("num_hidden_layers") or 0)
        return completed

    @classmethod
    def refusals(cls, config: ModelConfig) -> list[str]:
        biases = ["its feed-forward has biases"] if config.flag("mlp_bias") else []
        return [*super().refusals(config), *biases, *mamba_refusals(config, config.integer("mamba_d_ssm"))]

    def embedding(self, config: ModelConfig, context: ModelContext) -> VocabEmbedding:
        scale = config.number("embedding_multiplier")
        return VocabEmbedding(config.vocab_size, config.hidden_size, context, scale=scale)

    def head(self, config: ModelConfig, context: ModelContext, tied: VocabEmbedding | None) -> LMHead:
        divisor = 1.0 / config.number("lm_head_multiplier")
        return LMHead(config.vocab_size, config.hidden_size, context, tied=tied, divisor=divisor)
