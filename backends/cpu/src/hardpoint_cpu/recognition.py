"""Which models the native decoder can run: the core's modules, looked at one by one.

A class that is not known exactly, or a family's equation that is not one of the two that the decoder has, is a refusal: such a model
runs as modules.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from hardpoint.interfaces import BlockFormat, Refusal
from hardpoint.layers import Attention, GatedMLP, Linear, LMHead, RMSNorm, Rope, VocabEmbedding
from hardpoint.models.decoder import CausalLM, Decoder
from hardpoint.models.gemma2 import Gemma2Layer
from hardpoint.models.llama import LlamaLayer
from hardpoint.quantization import DENSE, Blocks
from hardpoint_cpu.decoder import DecoderSpec


@dataclass(frozen=True)
class Recognised:
    """A model as the native decoder runs it.

    Attributes:
        ropes: the rotary tables that `spec.rope_tables` counts.
        names: the spec's name of each of the model's parameters.
        blocks: the formats of weights in blocks, by the spec's names.
    """

    spec: DecoderSpec
    ropes: tuple[Rope, ...]
    names: dict[str, str]
    blocks: dict[str, BlockFormat]


_PRE_NORM = {
    "input_layernorm": "input_norm",
    "self_attn.qkv_proj": "qkv",
    "self_attn.q_norm": "q_norm",
    "self_attn.k_norm": "k_norm",
    "self_attn.o_proj": "o",
    "post_attention_layernorm": "mlp_norm",
    "mlp.gate_up_proj": "gate_up",
    "mlp.down_proj": "down",
}
_SANDWICH = {
    **_PRE_NORM,
    "post_attention_layernorm": "attention_out_norm",
    "pre_feedforward_layernorm": "mlp_norm",
    "post_feedforward_layernorm": "mlp_out_norm",
}
_EQUATIONS: dict[Any, dict[str, str]] = {LlamaLayer.forward: _PRE_NORM, Gemma2Layer.forward: _SANDWICH}
"""The spec's names of a layer's modules, by the layer's equation."""


def recognise(model: nn.Module) -> Recognised | Refusal:
    """Return how the native decoder runs a model, or why it does not."""
    reasons = list(dict.fromkeys(_unknown(model)))
    if reasons:
        return Refusal(tuple(reasons))
    assert isinstance(model, CausalLM)
    decoder = model.model
    layers: list[Any] = list(decoder.layers.values())
    embedding, attention, mlps = decoder.embed_tokens, [layer.self_attn for layer in layers], [x.mlp for x in layers]
    assert isinstance(embedding, VocabEmbedding)
    tables: list[Any] = list(decoder.rotary)
    head, first = model.lm_head, attention[0]
    sandwich = _EQUATIONS[type(layers[0]).forward] is _SANDWICH
    differing = [
        name
        for name, values in (
            ("equations", [type(layer).forward for layer in layers]),
            ("intermediate sizes", [mlp.intermediate_size for mlp in mlps]),
            ("activations", [mlp.activation for mlp in mlps]),
            ("epsilons of norms", [norm.eps for norm in model.modules() if isinstance(norm, RMSNorm)]),
            ("biases", [(a.qkv_proj.bias is None, a.o_proj.bias is None, a.q_norm is None) for a in attention]),
        )
        if len(set(values)) > 1
    ]
    if differing:
        return Refusal(tuple(f"its layers have different {what}" for what in differing))
    spec = DecoderSpec(
        vocab_size=embedding.vocab_size,
        hidden_size=decoder.hidden_size,
        intermediate_size=mlps[0].intermediate_size,
        attention=tuple(module.layer for module in attention),
        rope_tables=tuple(tables.index(module.rotary) for module in attention),
        rotary_dim=tables[0].rope.rotary_dim,
        norm_eps=layers[0].input_layernorm.eps,
        activation=mlps[0].activation,
        # A bare model is never asked for logits.
        tied=head is None or head.is_tied,
        qkv_bias=first.qkv_proj.bias is not None,
        o_bias=first.o_proj.bias is not None,
        qk_norm=first.q_norm is not None,
        sandwich_norms=sandwich,
        embed_scale=embedding.scale,
        logit_soft_cap=None if head is None else head.soft_cap,
    )
    ropes = tuple(module.rope for module in tables)
    names = dict(_names(model, layers, spec))
    blocks = {
        names[name]: stored.blocks for name, stored in model.stored_weights().items() if stored.blocks is not None
    }
    return Recognised(spec, ropes, names, blocks)


def _names(model: CausalLM, layers: Sequence[nn.Module], spec: DecoderSpec) -> Iterator[tuple[str, str]]:
    shapes = spec.weight_shapes()
    yield "model.embed_tokens.weight", "embed"
    for number, layer in enumerate(layers):
        for module, name in _EQUATIONS[type(layer).forward].items():
            path = f"model.layers.{number}.{module}"
            for weight, kind in ((f"layers.{number}.{name}", "weight"), (f"layers.{number}.{name}_bias", "bias")):
                if weight in shapes:
                    yield f"{path}.{kind}", weight
    yield "model.norm.weight", "final_norm"
    if not spec.tied:
        yield "lm_head.weight", "head"


def _unknown(model: nn.Module) -> Iterator[str]:
    """Yield what the native decoder does not know of a model."""
    if not isinstance(model, CausalLM) or type(model.model) is not Decoder:
        yield f"{type(model).__name__} is no decoder of the core"
        return
    for call in ("forward", "logits", "argmax"):
        if getattr(type(model), call) is not getattr(CausalLM, call):
            yield f"{type(model).__name__} computes its {call} in a way of its own"
    parts: list[tuple[str, object, type]] = [
        ("embedding", model.model.embed_tokens, VocabEmbedding),
        ("final norm", model.model.norm, RMSNorm),
    ]
    if model.lm_head is not None:
        parts.append(("head", model.lm_head, LMHead))
        if model.lm_head.divisor != 1.0:
            yield "its logits are divided"
    if model.score is not None:
        yield "it has a head that classifies"
    if model.dense_modules:
        yield "it has dense layers after the pooling"
    for layer in model.model.layers.values():
        equation = _EQUATIONS.get(type(layer).forward)
        if equation is None:
            yield f"the equation of {type(layer).__name__} is not known"
            continue
        for path in equation:
            owner, _, leaf = path.rpartition(".")
            if owner in ("", "self_attn") and leaf.endswith("norm"):
                norm = getattr(layer.get_submodule(owner), leaf, None)
                if norm is not None or not owner:
                    parts.append((leaf, norm, RMSNorm))
        parts += [("attention", layer.self_attn, Attention), ("feed-forward", layer.mlp, GatedMLP)]
        yield from _unknown_of_attention(layer.self_attn)
    for what, part, known in parts:
        if type(part) is not known:
            yield f"its {what} is {type(part).__name__}"
    for module in model.modules():
        if isinstance(module, Linear) and module.method is not DENSE and not isinstance(module.method, Blocks):
            yield f"its weights are stored by {type(module.method).__name__}"


def _unknown_of_attention(attention: object) -> Iterator[str]:
    if not isinstance(attention, Attention):
        return
    if attention.rotary is None:
        yield "some of its layers have no rotary embedding"
    if not attention.layer.causal:
        yield "its attention is not causal"
    if attention.layer.sinks or attention.layer.alibi:
        yield "attention sinks and ALiBi are not supported"
    dim = attention.layer.head_dim
    for norm in (attention.q_norm, attention.k_norm):
        if isinstance(norm, RMSNorm) and tuple(norm.weight.shape) != (dim,):
            yield "its norms of queries and keys are over more than a head"
