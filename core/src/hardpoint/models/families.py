"""The lean decoder family: which published architectures are one decoder with switches, and with which switches.

A family maps a configuration to a `DecoderSpec` (or says why that configuration is not expressible, in which case
the model runs through transformers' own code) and each of the decoder's weights to the checkpoint tensors it is made of.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from hardpoint.interfaces.attention import Refusal
from hardpoint.interfaces.capabilities import AttentionLayer
from hardpoint.interfaces.dtypes import DType
from hardpoint.interfaces.kernels import Activation, DecoderSpec
from hardpoint.models.kv_scales import NO_SCALES, ScalesInUse
from hardpoint.models.rope import Rope, rope_from_config

if TYPE_CHECKING:
    from torch import Tensor

_ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "gelu_new": Activation.GELU_TANH,
}


@dataclass(frozen=True)
class Piece:
    """The part of a checkpoint tensor that some rows of a weight are made of.

    Attributes:
        name: of the tensor.
        shape: of the whole tensor.
        rows, columns: (first, end) of the part; None for all.
    """

    name: str
    shape: tuple[int, ...]
    rows: tuple[int, int] | None = None
    columns: tuple[int, int] | None = None

    @property
    def first_row(self) -> int:
        """The first row of the part."""
        return self.rows[0] if self.rows else 0

    @property
    def end_row(self) -> int:
        """The row after the part."""
        return self.rows[1] if self.rows else self.shape[0]

    @property
    def num_rows(self) -> int:
        """Rows of the weight that it fills."""
        return self.end_row - self.first_row


@dataclass(frozen=True)
class Place:
    """A rank's place among those that share a model; see `WorkerConfig`."""

    tensor_rank: int = 0
    tensor_size: int = 1
    stage: int = 0
    stages: int = 1

    @property
    def is_alone(self) -> bool:
        """The rank has the whole model."""
        return self.tensor_size * self.stages == 1

    @property
    def is_first(self) -> bool:
        """The rank's stage embeds tokens."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """The rank's stage has the final norm and the head."""
        return self.stage + 1 == self.stages


@dataclass(frozen=True)
class LeanModel:
    """A model, or a rank's share of one (`parallel.cut`), as the lean decoder runs it.

    Attributes:
        spec: what the decoder computes; of a share, with the rank's own layers, heads, intermediate size and vocabulary.
        ropes: the rotary tables that `spec.rope_tables` counts.
        norm_offset: added to every norm's stored weight.
        sources: for each weight of the spec that the rank has, the pieces of checkpoint tensors that it is made of, one below
            the other.
        whole: the model that this is a share of; None for a whole model.
        place: which share.
        first_token: the first row of the vocabulary that the rank has.
        kv_scales: those of the KV cache that it was loaded for.
    """

    spec: DecoderSpec
    ropes: tuple[Rope, ...]
    norm_offset: float
    sources: Mapping[str, tuple[Piece, ...]]
    whole: LeanModel | None = None
    place: Place = Place()
    first_token: int = 0
    kv_scales: ScalesInUse = NO_SCALES

    def parts(self) -> dict[str, list[tuple[str, int, Piece]]]:
        """Return, for each checkpoint tensor by name, what of it goes where: (weight, its first row there, piece)."""
        places: dict[str, list[tuple[str, int, Piece]]] = {}
        for weight, pieces in self.sources.items():
            row = 0
            for piece in pieces:
                places.setdefault(piece.name, []).append((weight, row, piece))
                row += piece.num_rows
        return places

    def checkpoint_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every checkpoint tensor that the whole model is made of."""
        sources = (self.whole or self).sources
        return {piece.name: piece.shape for pieces in sources.values() for piece in pieces}

    def weight_names(self) -> frozenset[str]:
        """Return the checkpoint names of the tensors that this share has something of."""
        return frozenset(piece.name for pieces in self.sources.values() for piece in pieces)

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every weight that this share has, in the order of use."""
        return {name: shape for name, shape in self.spec.weight_shapes().items() if name in self.sources}

    def offset(self, weight: str) -> float:
        """Return what is added to a stored weight when it is loaded."""
        return self.norm_offset if weight.endswith("norm") else 0.0

    def computes_the_same(self, other: LeanModel) -> bool:
        """Whether the other model differs from the one that this is, or is a share of, in its weights alone.

        Numbers are compared with a tolerance: a GGUF file stores the configuration's in single precision.
        """
        own = self.whole or self
        return (
            replace(own.spec, norm_eps=0.0) == replace(other.spec, norm_eps=0.0)
            and math.isclose(own.spec.norm_eps, other.spec.norm_eps, rel_tol=1e-6)
            and own.norm_offset == other.norm_offset
            and dict(own.sources) == dict(other.sources)
            and len(own.ropes) == len(other.ropes)
            and all(one.rotates_like(another) for one, another in zip(own.ropes, other.ropes, strict=True))
        )

    def rope_tables(self, max_context: int) -> tuple[tuple[Tensor, Tensor], ...]:
        """Return (cos, sin) of every rotary table, each float32[max_context, rotary_dim / 2]."""
        return tuple(rope.table(max_context) for rope in self.ropes)


@dataclass
class _Draft:
    """A configuration as read so far, and what stands in the way of a lean decoder."""

    config: Any
    reasons: list[str] = field(default_factory=list)
    norm_offset: float = 0.0
    fused_sources: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    sandwich_norms: bool = False
    embed_scale: float = 1.0
    logit_soft_cap: float | None = None
    attention_soft_cap: float | None = None
    scale: float | None = None
    windows: Sequence[int | None] | None = None
    partial_rotary: bool = False

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self.config, name, default)


def _llama(draft: _Draft) -> None:
    draft.qkv_bias = draft.o_bias = bool(draft.get("attention_bias", False))
    if draft.get("mlp_bias", False):
        draft.reasons.append("its feed-forward has biases")


def _mistral(draft: _Draft) -> None:
    draft.windows = [draft.get("sliding_window")] * draft.config.num_hidden_layers


def _qwen2(draft: _Draft) -> None:
    draft.qkv_bias = True
    draft.windows = _windows_by_layer_type(draft)


def _qwen3(draft: _Draft) -> None:
    draft.qk_norm = True
    draft.qkv_bias = draft.o_bias = bool(draft.get("attention_bias", False))
    draft.windows = _windows_by_layer_type(draft)


def _phi3(draft: _Draft) -> None:
    draft.fused_sources = True
    draft.partial_rotary = True
    draft.windows = [draft.get("sliding_window")] * draft.config.num_hidden_layers


def _gemma(draft: _Draft) -> None:
    draft.norm_offset = 1.0
    draft.embed_scale = math.sqrt(draft.config.hidden_size)
    draft.qkv_bias = draft.o_bias = bool(draft.get("attention_bias", False))
    if draft.get("use_bidirectional_attention"):
        draft.reasons.append("its attention is not causal")


def _gemma2(draft: _Draft) -> None:
    _gemma(draft)
    draft.sandwich_norms = True
    draft.scale = float(draft.config.query_pre_attn_scalar) ** -0.5
    draft.attention_soft_cap = draft.get("attn_logit_softcapping")
    draft.logit_soft_cap = draft.get("final_logit_softcapping")
    draft.windows = _windows_by_layer_type(draft)


def _gemma3(draft: _Draft) -> None:
    _gemma2(draft)
    draft.qk_norm = True


def _windows_by_layer_type(draft: _Draft) -> list[int | None]:
    """transformers masks key k for query q where `k <= q - sliding_window`: that many keys are visible, q's own included."""
    kinds = draft.get("layer_types") or ["full_attention"] * draft.config.num_hidden_layers
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if unknown:
        draft.reasons.append(f"it has layers of the type {', '.join(unknown)}")
    return [draft.get("sliding_window") if kind == "sliding_attention" else None for kind in kinds]


_FAMILIES: dict[str, Callable[[_Draft], None]] = {
    "Llama": _llama,
    "Mistral": _mistral,
    "Qwen2": _qwen2,
    "Qwen3": _qwen3,
    "Phi3": _phi3,
    "Gemma": _gemma,
    "Gemma2": _gemma2,
    "Gemma3": _gemma3,
}
_BARE_MODELS = {"Gemma3": "Gemma3TextModel"}

LEAN_ARCHITECTURES = tuple(f"{name}ForCausalLM" for name in _FAMILIES)
"""Architectures that run as lean decoders; their bare models (`LlamaModel`, ...) do too."""


def norm_offset(architecture: str) -> float:
    """Return what the architecture adds to the stored weights of its norms; 0 where it is not a lean one."""
    return 1.0 if (_family(architecture) or "").startswith("Gemma") else 0.0


def _family(architecture: str) -> str | None:
    for name in _FAMILIES:
        if architecture in (f"{name}ForCausalLM", _BARE_MODELS.get(name, f"{name}Model")):
            return name
    return None


def lean_model(
    architecture: str, config: Any, dtype: DType, rope_divisors: Sequence[float] | None = None
) -> LeanModel | Refusal:
    """Return how the lean decoder runs a model, or why it cannot.

    Args:
        architecture: as the configuration names it.
        config: the transformers configuration.
        dtype: of weights and activations; the embedding's scale is rounded to it, as the published models do.
        rope_divisors: see `Rope.frequency_divisors`.
    """
    family = _family(architecture)
    if family is None:
        return Refusal((f"{architecture} is not in the lean decoder family",))
    draft = _Draft(config)
    _FAMILIES[family](draft)
    activation = _ACTIVATIONS.get(str(draft.get("hidden_activation") or draft.get("hidden_act")))
    if activation is None:
        draft.reasons.append(f"its activation is {draft.get('hidden_act')}")
    head_dim = int(draft.get("head_dim") or config.hidden_size // config.num_attention_heads)
    tables, ropes, rotary_dim = _ropes(draft, head_dim, rope_divisors)
    if rotary_dim % 2:
        draft.reasons.append(f"{rotary_dim} elements of each head are rotated, an odd number")
    if draft.reasons or activation is None:
        return Refusal(tuple(draft.reasons))
    windows = draft.windows or [None] * config.num_hidden_layers
    spec = DecoderSpec(
        vocab_size=int(config.vocab_size),
        hidden_size=int(config.hidden_size),
        intermediate_size=int(config.intermediate_size),
        attention=tuple(
            AttentionLayer(
                num_heads=int(config.num_attention_heads),
                num_kv_heads=int(draft.get("num_key_value_heads") or config.num_attention_heads),
                head_dim=head_dim,
                scale=draft.scale if draft.scale is not None else head_dim**-0.5,
                sliding_window=window,
                soft_cap=draft.attention_soft_cap,
            )
            for window in windows
        ),
        rope_tables=tables,
        rotary_dim=rotary_dim,
        norm_eps=float(config.rms_norm_eps),
        activation=activation,
        tied=bool(draft.get("tie_word_embeddings", False)),
        qkv_bias=draft.qkv_bias,
        o_bias=draft.o_bias,
        qk_norm=draft.qk_norm,
        sandwich_norms=draft.sandwich_norms,
        embed_scale=_rounded(draft.embed_scale, dtype),
        logit_soft_cap=draft.logit_soft_cap,
    )
    if not architecture.endswith("ForCausalLM"):
        # A bare model has no head of its own; the decoder's is never asked for logits.
        spec = replace(spec, tied=True)
    return LeanModel(spec, ropes, draft.norm_offset, _sources(spec, draft.fused_sources))


def _ropes(
    draft: _Draft, head_dim: int, divisors: Sequence[float] | None
) -> tuple[tuple[int, ...], tuple[Rope, ...], int]:
    """Return (each layer's table, the tables, rotated elements of a head)."""
    config, num_layers = draft.config, draft.config.num_hidden_layers
    given: dict[str, Any] = dict(draft.get("rope_parameters") or draft.get("rope_scaling") or {})
    kinds = list(draft.get("layer_types") or [])
    nested = [kind for kind in dict.fromkeys(kinds) if isinstance(given.get(kind), Mapping)]
    if nested:
        entries = [given[kind] for kind in nested]
        tables = tuple(nested.index(kind) if kind in nested else -1 for kind in kinds)
        if -1 in tables:
            draft.reasons.append("some of its layers have no rotary embedding")
    else:
        entries, tables = [given], (0,) * num_layers
    factors = {float(entry.get("partial_rotary_factor") or 1.0) for entry in entries}
    if len(factors) > 1 or (factors != {1.0} and not draft.partial_rotary):
        draft.reasons.append(f"it has partial_rotary_factor {sorted(factors)}")
    rotary_dim = int(head_dim * factors.pop())
    ropes = []
    for entry in entries:
        rope = rope_from_config(config, entry, rotary_dim, divisors)
        if isinstance(rope, Refusal):
            draft.reasons.extend(rope.reasons)
        else:
            ropes.append(rope)
    return tables, tuple(ropes), rotary_dim


def _rounded(value: float, dtype: DType) -> float:
    if value == 1.0:
        return value
    import torch

    return float(torch.tensor(value, dtype=dtype.to_torch()))


def _sources(spec: DecoderSpec, fused: bool) -> dict[str, tuple[Piece, ...]]:
    """Return the Hugging Face tensors that each of the spec's weights is made of."""
    names: dict[str, tuple[str, ...]] = {
        "embed": ("model.embed_tokens.weight",),
        "final_norm": ("model.norm.weight",),
        "head": ("lm_head.weight",),
    }
    qkv = ("self_attn.qkv_proj",) if fused else ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    in_layer: dict[str, tuple[str, ...]] = {
        "input_norm": ("input_layernorm.weight",),
        "qkv": tuple(f"{name}.weight" for name in qkv),
        "qkv_bias": tuple(f"{name}.bias" for name in qkv),
        "q_norm": ("self_attn.q_norm.weight",),
        "k_norm": ("self_attn.k_norm.weight",),
        "o": ("self_attn.o_proj.weight",),
        "o_bias": ("self_attn.o_proj.bias",),
        "gate_up": ("mlp.gate_up_proj.weight",) if fused else ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
        "down": ("mlp.down_proj.weight",),
        "mlp_norm": ("post_attention_layernorm.weight",),
    }
    if spec.sandwich_norms:
        in_layer |= {
            "attention_out_norm": ("post_attention_layernorm.weight",),
            "mlp_norm": ("pre_feedforward_layernorm.weight",),
            "mlp_out_norm": ("post_feedforward_layernorm.weight",),
        }
    sources: dict[str, tuple[Piece, ...]] = {}
    for weight, shape in spec.weight_shapes().items():
        if not weight.startswith("layers."):
            sources[weight] = tuple(Piece(name, shape) for name in names[weight])
            continue
        _, index, kind = weight.split(".")
        tensors = [f"model.layers.{index}.{name}" for name in in_layer[kind]]
        rows = _rows(kind, shape[0], spec.attention[int(index)], len(tensors))
        sources[weight] = tuple(Piece(name, (count, *shape[1:])) for name, count in zip(tensors, rows, strict=True))
    return sources


def _rows(kind: str, rows: int, layer: AttentionLayer, count: int) -> tuple[int, ...]:
    if count == 3:
        kv = layer.num_kv_heads * layer.head_dim
        return (layer.num_heads * layer.head_dim, kv, kv)
    return (rows // count,) * count
