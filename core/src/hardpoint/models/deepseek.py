"""DeepSeek V2 (arXiv:2405.04434) and V3 (arXiv:2412.19437): latent attention, and experts beside shared ones but in the first layers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn

from hardpoint.layers import (
    Experts,
    ExpertsShape,
    GatedMLP,
    GroupedRouter,
    LatentAttention,
    LatentShape,
    Ranks,
    Routing,
)
from hardpoint.models.decoder import CausalLM
from hardpoint.models.llama import LlamaLayer

if TYPE_CHECKING:
    from torch import Tensor

    from hardpoint.layers import ModelContext, RotaryEmbedding
    from hardpoint.models.config import ModelConfig


_LATENT_SIZES = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
"""What both versions have where a configuration does not say it."""


class DeepseekMixture(nn.Module):
    """The experts that the router chooses, and the shared ones, which are one feed-forward of their common width."""

    def __init__(self, routing: Routing, shape: ExpertsShape, shared_size: int, context: ModelContext) -> None:
        super().__init__()
        self.gate = GroupedRouter(routing, shape.hidden_size, context)
        self.experts = Experts(shape, context)
        self.shared_experts: GatedMLP | None = None
        if shared_size:
            # Its part is summed over the ranks together with the experts'.
            alone = replace(context, ranks=Ranks())
            self.shared_experts = GatedMLP(shape.hidden_size, shared_size, shape.activation, alone)
        self._ranks = context.ranks.tensor

    def forward(self, x: Tensor) -> Tensor:
        """Return [T, hidden_size] of x [T, hidden_size], summed over the ranks."""
        logits, sums = self.gate(x)
        out: Tensor = (self.experts(x, logits) * sums).to(x.dtype)
        if self.shared_experts is not None:
            out += self.shared_experts(x)
        if self._ranks is not None and len(out):
            self._ranks.all_reduce(out)
        return out


class DeepseekV3Layer(LlamaLayer):
    """Llama's equation of DeepSeek's parts."""

    def attention(self, config: ModelConfig, index: int, rotary: RotaryEmbedding, context: ModelContext) -> nn.Module:
        shape = LatentShape(
            num_heads=config.num_heads,
            query_rank=None if config.values.get("q_lora_rank") is None else config.integer("q_lora_rank"),
            kv_rank=config.integer("kv_lora_rank"),
            nope_dim=config.integer("qk_nope_head_dim"),
            rope_dim=config.integer("qk_rope_head_dim"),
            value_dim=config.integer("v_head_dim"),
            interleaved=config.flag("rope_interleave"),
        )
        scale, bias = shape.key_dim**-0.5 * _magnitude(config) ** 2, config.flag("attention_bias")
        return LatentAttention(index, shape, scale, config.hidden_size, rotary, context, bias=bias)

    def feed_forward(self, config: ModelConfig, index: int, context: ModelContext) -> nn.Module:
        if index < config.integer("first_k_dense_replace", least=0):
            return GatedMLP(config.hidden_size, config.intermediate_size, config.activation, context)
        inner, routing = config.integer("moe_intermediate_size"), self.routing(config)
        shape = ExpertsShape(routing.num_experts, routing.top_k, config.hidden_size, inner, config.activation)
        return DeepseekMixture(routing, shape, inner * config.integer("n_shared_experts", 0, least=0), context)

    def routing(self, config: ModelConfig) -> Routing:
        """Return how experts are chosen and weighed."""
        return Routing(
            *_sizes(config),
            groups=config.integer("n_group"),
            top_groups=config.integer("topk_group"),
            sigmoid=True,
            correction=True,
            renormalise=config.flag("norm_topk_prob"),
            scale=config.number("routed_scaling_factor"),
        )


class DeepseekV3(CausalLM):
    """DeepSeek V3 and R1, in dense weights."""

    layer = DeepseekV3Layer
    least_of_group: ClassVar[int] = 2
    """Experts by whose scores a group is chosen; see `Routing`."""
    others_count: ClassVar[bool] = True
    """Experts outside the chosen groups have weights where those groups have too few."""

    @classmethod
    def complete(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        defaults = {
            **_LATENT_SIZES,
            "moe_intermediate_size": 2048,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "n_group": 8,
            "topk_group": 4,
            "first_k_dense_replace": 3,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "rope_interleave": True,
        }
        return with_rotated_part({**defaults, **values})

    @classmethod
    def refusals(cls, config: ModelConfig) -> list[str]:
        reasons = super().refusals(config)
        if config.integer("moe_layer_freq", 1) != 1:
            reasons.append("not every layer after the first ones has experts")
        groups, experts = config.integer("n_group", 1), config.integer("n_routed_experts")
        chosen = config.integer("topk_group", 1)
        if experts % groups or chosen > groups:
            reasons.append(f"{experts} experts do not form {groups} groups of which as many are chosen as it says")
        elif chosen < groups and experts // groups < cls.least_of_group:
            reasons.append(f"its {groups} groups of 1 expert are chosen by the best {cls.least_of_group} of each")
        elif cls.others_count and (left := chosen * (experts // groups)) < config.experts_per_token(experts):
            reasons.append(f"each token goes through more experts than its {chosen} best groups have, which are {left}")
        return reasons

    @classmethod
    def unused(cls, config: ModelConfig) -> str:
        # Layers that predict several tokens at once follow the decoder's.
        count = config.integer("num_nextn_predict_layers", 0, least=0)
        extra = "|".join(str(config.num_layers + number) for number in range(count))
        return rf"model\.layers\.({extra})\." if extra else ""


class DeepseekV2Layer(DeepseekV3Layer):
    """V3's equation, with experts scored by their softmax."""

    def routing(self, config: ModelConfig) -> Routing:
        limited = config.values.get("topk_method") == "group_limited_greedy"
        return Routing(
            *_sizes(config),
            groups=config.integer("n_group", 1) if limited else 1,
            top_groups=config.integer("topk_group", 1) if limited else 1,
            scale=config.number("routed_scaling_factor"),
        )


class DeepseekV2(DeepseekV3):
    """DeepSeek V2, V2.5 and the Lite models."""

    layer = DeepseekV2Layer
    least_of_group = 1
    others_count = False

    @classmethod
    def complete(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        defaults = {
            **_LATENT_SIZES,
            "moe_intermediate_size": 1407,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "topk_method": "greedy",
            "first_k_dense_replace": 0,
            "routed_scaling_factor": 1.0,
        }
        return with_rotated_part({**defaults, **values, "rope_interleave": True})

    @classmethod
    def refusals(cls, config: ModelConfig) -> list[str]:
        reasons = super().refusals(config)
        method = config.values.get("topk_method")
        if method not in ("greedy", "group_limited_greedy"):
            reasons.append(f"its experts are chosen by topk_method {method!r}")
        if config.flag("mlp_bias"):
            reasons.append("its feed-forward has biases")
        return reasons


def with_rotated_part(values: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration whose heads are as long as their rotated part, for which the rotary table is made."""
    return {**values, "head_dim": values["qk_rope_head_dim"], "num_key_value_heads": values.get("num_attention_heads")}


def _sizes(config: ModelConfig) -> tuple[int, int]:
    count = config.integer("n_routed_experts")
    return count, config.experts_per_token(count)


def _magnitude(config: ModelConfig) -> float:
    """Return YaRN's factor of queries and keys: `0.1 * mscale_all_dim * ln(factor) + 1`."""
    given = config.positions
    kind = given.values.get("rope_type") or given.values.get("type") or "default"
    weight = given.values.get("mscale_all_dim")
    if kind == "default" or not weight or given.number("factor") <= 1:
        return 1.0
    return 0.1 * given.number("mscale_all_dim") * math.log(given.number("factor")) + 1.0
