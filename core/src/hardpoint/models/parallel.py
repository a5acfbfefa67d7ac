"""Cutting a lean model for the ranks that share it.

Tensor parallelism (Megatron-LM, arXiv:1909.08053): the rows of `qkv` and `gate_up` and the columns of `o` and `down` are divided,
so that one sum over the ranks follows attention and one the feed-forward; embedding and head are divided by vocabulary. Attention
is cut by whole KV heads with their query heads, which need not divide evenly. Pipeline parallelism: each stage has
consecutive layers, the first the embedding, the last the final norm and the head.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hardpoint.interfaces.attention import Refusal
from hardpoint.interfaces.capabilities import AttentionLayer
from hardpoint.interfaces.errors import CapabilityRefused
from hardpoint.models.families import LeanModel, Piece, Place

if TYPE_CHECKING:
    from hardpoint.interfaces.collectives import Collectives
    from hardpoint.interfaces.dtypes import DType
    from hardpoint.models.source import ModelSource

_UNIT = 16
"""Rows that matrix units take at once: shares are multiples of it, the last one apart."""

Span = tuple[int, int]
"""(first, end)."""


@dataclass(frozen=True)
class Ranks:
    """What a rank reaches the others by.

    Attributes:
        tensor: the ranks that share its layers, by their `tensor_rank`; None where there are no others.
        pipeline: the ranks of its place in each stage, by their `stage`; None where there is one stage.
    """

    tensor: Collectives | None = None
    pipeline: Collectives | None = None


def share_of(source: ModelSource, dtype: DType, place: Place) -> LeanModel:
    """Return a rank's share of a model; raises CapabilityRefused with all reasons, before any weight is read."""
    model = source.lean_model(dtype)
    if isinstance(model, Refusal):
        reasons: tuple[str, ...] = (
            *(f"the model is not a lean decoder: {reason}" for reason in model.reasons),
            "models that run through transformers' code run on one rank only",
        )
        hint = "Run it with tensor_parallel_size=1 and pipeline_parallel_size=1"
    else:
        reasons = obstacles(model, place)
        if not reasons:
            return cut(model, place)
        sizes = ", ".join(map(str, tensor_sizes(model)))
        hint = f"tensor_parallel_size can be {sizes}; pipeline_parallel_size can be 1 to {model.spec.num_layers}"
    raise CapabilityRefused(
        f"{source.path} cannot be divided among {place.tensor_size} tensor-parallel ranks in {place.stages} stages",
        reasons,
        hint=hint,
    )


def obstacles(model: LeanModel, place: Place) -> tuple[str, ...]:
    """Return why a model cannot be divided like this, one sentence each; empty where it can."""
    spec, size = model.spec, place.tensor_size
    reasons = []
    for layer in dict.fromkeys(spec.attention):
        groups = layer.num_heads // layer.num_kv_heads
        if size > layer.num_kv_heads and (size % layer.num_kv_heads or groups % (size // layer.num_kv_heads)):
            reasons.append(
                f"{layer.num_heads} query heads over {layer.num_kv_heads} KV heads do not divide among {size} ranks: more ranks "
                f"than KV heads must be a multiple of these that divides the query heads"
            )
    for total, what in ((spec.intermediate_size, "intermediate size"), (spec.vocab_size, "vocabulary")):
        if not all(end > first for first, end in _spans(total, size)):
            reasons.append(f"the {what} of {total} leaves nothing for some of {size} ranks")
    if place.stages > spec.num_layers:
        reasons.append(f"{spec.num_layers} layers are fewer than {place.stages} stages")
    return tuple(dict.fromkeys(reasons))


def tensor_sizes(model: LeanModel) -> tuple[int, ...]:
    """Return the numbers of ranks that can share each layer of a model."""
    most = max(layer.num_heads for layer in model.spec.attention)
    return tuple(size for size in range(1, most + 1) if not obstacles(model, Place(tensor_size=size)))


def cut(model: LeanModel, place: Place) -> LeanModel:
    """Return a rank's share of a whole model that has no `obstacles`."""
    if place.is_alone:
        return model
    spec, rank, size = model.spec, place.tensor_rank, place.tensor_size
    first, end = layers_of_stage(spec.num_layers, place)
    vocabulary = _spans(spec.vocab_size, size)[rank]
    inner = _spans(spec.intermediate_size, size)[rank]
    spans = [_heads(layer, place) for layer in spec.attention]
    attention = tuple(
        replace(spec.attention[index], num_heads=_length(spans[index][0]), num_kv_heads=_length(spans[index][1]))
        for index in range(first, end)
    )
    sources: dict[str, tuple[Piece, ...]] = {}
    for weight, pieces in model.sources.items():
        if not weight.startswith("layers."):
            if _has(weight, place, spec.tied):
                sources[weight] = pieces if weight == "final_norm" else _rows(pieces, [vocabulary])
            continue
        _, number, kind = weight.split(".")
        index = int(number)
        if first <= index < end and (kind != "o_bias" or rank == 0):
            part = _part(kind, pieces, spec.attention[index], spans[index], inner, spec.intermediate_size)
            sources[f"layers.{index - first}.{kind}"] = part
    own = replace(
        spec,
        vocab_size=_length(vocabulary),
        intermediate_size=_length(inner),
        attention=attention,
        rope_tables=spec.rope_tables[first:end],
        # All ranks' parts of the projection are summed, so that only one adds the bias.
        o_bias=spec.o_bias and rank == 0,
    )
    return replace(model, spec=own, sources=sources, whole=model, place=place, first_token=vocabulary[0])


def layers_of_stage(num_layers: int, place: Place) -> Span:
    """Return a stage's layers: consecutive, as many as any other stage's or one more."""
    return _even(num_layers, place.stages, place.stage)


def vocabulary_width(vocab_size: int, size: int) -> int:
    """Return the most rows of the vocabulary that a rank has; all ranks have as many, but for the last ones."""
    return _length(_spans(vocab_size, size)[0])


def _has(weight: str, place: Place, tied: bool) -> bool:
    if weight == "embed":
        return place.is_first or (place.is_last and tied)
    return place.is_last


def _part(
    kind: str, pieces: Sequence[Piece], layer: AttentionLayer, heads: tuple[Span, Span], inner: Span, inner_size: int
) -> tuple[Piece, ...]:
    dim = layer.head_dim
    queries, keys = (_scaled(span, dim) for span in heads)
    if kind in ("qkv", "qkv_bias"):
        first_key = layer.num_heads * dim
        first_value = first_key + layer.num_kv_heads * dim
        return _rows(pieces, [queries, _shifted(keys, first_key), _shifted(keys, first_value)])
    if kind == "gate_up":
        return _rows(pieces, [inner, _shifted(inner, inner_size)])
    if kind in ("o", "down"):
        return tuple(replace(piece, columns=queries if kind == "o" else inner) for piece in pieces)
    return tuple(pieces)


def _rows(pieces: Iterable[Piece], spans: Iterable[Span]) -> tuple[Piece, ...]:
    """Return what lies in spans of a weight's rows, in the order of the spans."""
    placed, row = [], 0
    for piece in pieces:
        placed.append((row, piece))
        row += piece.num_rows
    found = []
    for first, end in spans:
        for row, piece in placed:
            begin, stop = max(first - row, 0), min(end - row, piece.num_rows)
            if begin < stop:
                found.append(replace(piece, rows=(piece.first_row + begin, piece.first_row + stop)))
    return tuple(found)


def _heads(layer: AttentionLayer, place: Place) -> tuple[Span, Span]:
    """Return a rank's (query heads, KV heads); where ranks outnumber KV heads, several have the same one."""
    heads, kv_heads, size, rank = layer.num_heads, layer.num_kv_heads, place.tensor_size, place.tensor_rank
    if size <= kv_heads:
        keys = _even(kv_heads, size, rank)
        return _scaled(keys, heads // kv_heads), keys
    key = rank // (size // kv_heads)
    return _scaled((rank, rank + 1), heads // size), (key, key + 1)


def _spans(total: int, size: int) -> list[Span]:
    """Divide `total` rows into shares of one length, but for the last ones, which may be shorter or empty."""
    width = -(-total // size)
    rounded = -(-width // _UNIT) * _UNIT
    if rounded * (size - 1) < total:
        width = rounded
    return [(min(rank * width, total), min((rank + 1) * width, total)) for rank in range(size)]


def _even(total: int, size: int, rank: int) -> Span:
    """Divide `total` things into shares whose lengths differ by one at most, the longer ones first."""
    length, longer = divmod(total, size)
    first = rank * length + min(rank, longer)
    return first, first + length + (rank < longer)


def _length(span: Span) -> int:
    return span[1] - span[0]


def _scaled(span: Span, factor: int) -> Span:
    return span[0] * factor, span[1] * factor


def _shifted(span: Span, by: int) -> Span:
    return span[0] + by, span[1] + by
