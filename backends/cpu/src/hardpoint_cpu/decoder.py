"""A decoder whose whole step is one native call.

Weights are packed into the tiles that the native kernels read (native/gemm.hpp).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING

import torch

from hardpoint.interfaces import (
    BUFFERS,
    DEFAULT,
    WEIGHTS,
    Activation,
    AdapterRows,
    AdapterWeights,
    AttentionLayer,
    BlockFormat,
    DecoderProgram,
    DeviceAllocator,
    DType,
    FuseRequest,
    Policy,
    places_of,
)
from hardpoint.interfaces.errors import HardpointError
from hardpoint_cpu import _native
from hardpoint_cpu.attention import CpuStep, kv_format_code, native_layer

if TYPE_CHECKING:
    from torch import Tensor


# Codes of hp::DType, hp::Epilogue and hp::DecoderOutput.
DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
ACTIVATION_CODES = {Activation.SILU: 2, Activation.GELU_TANH: 3, Activation.CLAMPED_SWIGLU: 5, Activation.GELU: 8}
_LOGITS, _ARG_MAX = 0, 1
_SCORED_ROWS = 512
"""Rows whose log probabilities are computed in one pass over the head's weights: few passes, and the rows stay near in the caches."""
NO_BLOCKS = -1
"""Code of hp::BlockFormat for a weight that is not in blocks; others are ggml's numbers."""

DTYPES = (DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16)
_TILE = 16
_MAX_HEAD_DIM = 256
_ALIGNMENT = 64

_ADAPTED = {"qkv": 0, "o": 1, "gate_up": 2, "down": 3}
"""Codes of hp::DecoderLinear by the spec's names."""

_NO_ADAPTERS = 0, 0, 0, 0
_NO_ROWS, _NO_EMBEDDINGS = torch.empty(0, dtype=torch.int64), torch.empty(0)

RopeTables = tuple[tuple["Tensor", "Tensor"], ...]
"""Pairs (cos, sin), each float32[max_context, rotary_dim / 2]."""


class InvalidOperand(HardpointError, ValueError):
    """A tensor's shape, dtype, layout or device is not one that the operator takes; nothing was computed."""


@dataclass(frozen=True)
class DecoderSpec:
    """What the native decoder runs: embedding, pre-normalised attention and gated feed-forward layers, final norm, head.

    Every normalisation is RMSNorm, `x / sqrt(mean(x²) + norm_eps) * weight`, computed in float32; the offset of families whose
    weights are stored as `weight - 1` is added when they are loaded. Rotary embedding uses halves (`rotate_half`) and per-layer tables.

    Weights, by name, shapes in torch's [out, in] order (`N` is the layer's index):

    ============================  ==============================================================
    embed                         [vocab_size, hidden_size]
    layers.N.input_norm           [hidden_size]
    layers.N.qkv                  [(num_heads + 2 · num_kv_heads) · head_dim, hidden_size]: rows of q, then k, then v
    layers.N.qkv_bias             [(num_heads + 2 · num_kv_heads) · head_dim], where qkv_bias
    layers.N.q_norm, .k_norm      [head_dim], where qk_norm: RMSNorm of each head before rotary embedding
    layers.N.o                    [hidden_size, num_heads · head_dim]
    layers.N.o_bias               [hidden_size], where o_bias
    layers.N.attention_out_norm   [hidden_size], where sandwich_norms: applied to the attention's output before it is added
    layers.N.mlp_norm             [hidden_size]: applied before the feed-forward
    layers.N.gate_up              [2 · intermediate_size, hidden_size]: rows of gate, then up
    layers.N.down                 [hidden_size, intermediate_size]
    layers.N.mlp_out_norm         [hidden_size], where sandwich_norms: applied to the feed-forward's output
    final_norm                    [hidden_size]
    head                          [vocab_size, hidden_size], unless tied (then `embed` is the head)
    ============================  ==============================================================

    Attributes:
        attention: one entry per layer.
        rope_tables: for each layer, which of the rotary tables it uses.
        rotary_dim: leading elements of each head that are rotated (even, at most head_dim).
        embed_scale: factor of the embedding's output.
        logit_soft_cap: `cap * tanh(logit / cap)` of the final logits; None for off.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    attention: tuple[AttentionLayer, ...]
    rope_tables: tuple[int, ...]
    rotary_dim: int
    norm_eps: float
    activation: Activation = Activation.SILU
    tied: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    sandwich_norms: bool = False
    embed_scale: float = 1.0
    logit_soft_cap: float | None = None

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return len(self.attention)

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every weight by name, in the order of use."""
        hidden = self.hidden_size
        shapes: dict[str, tuple[int, ...]] = {"embed": (self.vocab_size, hidden)}
        for index, layer in enumerate(self.attention):
            qkv_rows = (layer.num_heads + 2 * layer.num_kv_heads) * layer.head_dim
            attention_width = layer.num_heads * layer.head_dim
            parts: dict[str, tuple[tuple[int, ...], bool]] = {
                "input_norm": ((hidden,), True),
                "qkv": ((qkv_rows, hidden), True),
                "qkv_bias": ((qkv_rows,), self.qkv_bias),
                "q_norm": ((layer.head_dim,), self.qk_norm),
                "k_norm": ((layer.head_dim,), self.qk_norm),
                "o": ((hidden, attention_width), True),
                "o_bias": ((hidden,), self.o_bias),
                "attention_out_norm": ((hidden,), self.sandwich_norms),
                "mlp_norm": ((hidden,), True),
                "gate_up": ((2 * self.intermediate_size, hidden), True),
                "down": ((hidden, self.intermediate_size), True),
                "mlp_out_norm": ((hidden,), self.sandwich_norms),
            }
            shapes |= {f"layers.{index}.{name}": shape for name, (shape, present) in parts.items() if present}
        shapes["final_norm"] = (hidden,)
        if not self.tied:
            shapes["head"] = (self.vocab_size, hidden)
        return shapes


@dataclass(frozen=True)
class _Place:
    """Where one weight stands in the arena: a matrix in tiles, or a float32 vector.

    Attributes:
        parts: for a matrix, (rows, first tile, tile step) of each stacked part; empty for a vector.
        blocks: the format of a matrix in blocks.
    """

    offset: int
    shape: tuple[int, ...]
    parts: tuple[tuple[int, int, int], ...] = ()
    blocks: BlockFormat | None = None

    @property
    def stored_columns(self) -> int:
        """Columns of the packed weight; a gated pair is padded to whole tiles of each half."""
        return self.shape[0] if len(self.parts) == 1 else len(self.parts) * _tiles(self.parts[0][0]) * _TILE


class _Rows:
    """Working memory of results, a row for each."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self._first = memory

    def first(self, count: int) -> Tensor:
        """Return the first rows; raises InvalidOperand where there are not as many. Steps follow one another that have equally many."""
        if count != self._first.shape[0]:
            if count > self.memory.shape[0]:
                raise InvalidOperand(
                    f"{count} rows do not fit the decoder's working memory", found=f"planned for {self.memory.shape[0]}"
                )
            self._first = self.memory[:count]
        return self._first


class CpuDecoder(DecoderProgram):
    """The fused decoder. Weights stand packed in one arena of the allocator, working memory in another.

    The residual stream is float32. The tensor that `run` returns is a view of working memory, valid until the next step.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        request: FuseRequest,
        allocator: DeviceAllocator,
        tables: RopeTables,
        names: Mapping[str, str],
        blocks: Mapping[str, BlockFormat],
    ) -> None:
        """Lay out the weights, uninitialised, and working memory for the largest step.

        Args:
            tables: the rotary tables that `spec.rope_tables` counts.
            names: the spec's name of each of the model's parameters.
            blocks: the formats of weights in blocks, by the spec's names.
        """
        self._spec, self._request, self._names = spec, request, names
        self._dtype = request.dtype.to_torch()
        self._code = DTYPE_CODES[self._dtype]
        cache = request.groups[0].plan.kv_cache
        inner = (cache.num_kv_heads, cache.block_size, cache.head_dim)
        self._cache = (cache.num_layers, 2), inner, cache.dtype.to_torch()
        self._places, size = _lay_out(spec, self._code, blocks)
        self._arena = allocator.empty((size,), DType.UINT8, WEIGHTS)
        self._rope = self._copy_of(tables, allocator)
        self._native = self._make_native(spec)
        self._native.set_rope_tables([(cos.data_ptr(), sin.data_ptr(), request.max_context) for cos, sin in self._rope])
        scratch, samples = self._native.scratch_bytes(), request.max_num_samples
        # Of a step's rows, or of those that it samples, which are more where sequences share a prompt's last token.
        states = (max(request.max_num_tokens, samples), spec.hidden_size)
        self._hidden = _Rows(allocator.empty(states, request.dtype, DEFAULT, Policy.DISCARD))
        logits = samples * max(4 * spec.vocab_size, 8, self._native.summary_bytes())
        self._output = allocator.empty((logits,), DType.UINT8, DEFAULT, Policy.DISCARD)
        # Of one step either logits or tokens are wanted.
        logits_memory = self._output[: 4 * samples * spec.vocab_size].view(torch.float32)
        self._logits = _Rows(logits_memory.view(samples, spec.vocab_size))
        self._tokens = _Rows(self._output[: 8 * samples].view(torch.int64))
        self._scratch = allocator.empty((scratch,), DType.UINT8, DEFAULT, Policy.DISCARD)
        self._native.set_scratch(self._scratch.data_ptr(), scratch)

    def load_weight(self, name: str, tensor: Tensor, first_row: int | None = None) -> None:
        """Copy one weight, or rows of it, into its place; raises InvalidOperand (a ValueError) on a wrong name or shape."""
        place, blocks = self._place(name), self._place(name).blocks
        shape = place.shape if blocks is None else (place.shape[0], blocks.row_bytes(place.shape[1]))
        first, end = (0, shape[0]) if first_row is None else (first_row, first_row + tensor.shape[0])
        fits = tuple(tensor.shape) == (end - first, *shape[1:]) and 0 <= first <= end <= shape[0]
        if not fits or (tensor.dtype is torch.uint8) != (blocks is not None):
            raise InvalidOperand(
                f"weight '{name}' is {list(shape)}{'' if blocks is None else f', uint8 blocks of {blocks}'}",
                found=f"shape {list(tensor.shape)} of {tensor.dtype} for the rows from {first} on",
            )
        if not place.parts:
            self._vector(place)[first:end].copy_(tensor)
            return
        source = tensor.detach().to(device="cpu", dtype=self._dtype if blocks is None else torch.uint8).contiguous()
        row_bytes = source.shape[1] * source.element_size()
        begin, k, address = source.data_ptr(), place.shape[1], self._address(place)
        part_begin = 0
        for part_rows, first_tile, step in place.parts:
            row = max(first - part_begin, 0)
            rows = min(end - part_begin, part_rows) - row
            part_begin += part_rows
            if rows <= 0:
                continue
            if blocks is None:
                _native.pack_weight(begin, k, rows, k, self._code, row, first_tile, step, address)
            else:
                _native.pack_blocks(begin, rows, k, blocks.type_id, row, first_tile, step, address)
            begin += rows * row_bytes

    def read_weight(self, name: str) -> Tensor:
        """Return a copy of one weight in the shape and order that `load_weight` takes; raises InvalidOperand on a wrong name."""
        place = self._place(name)
        if not place.parts:
            return self._vector(place).clone()
        if place.blocks is not None:
            k, type_id = place.shape[1], place.blocks.type_id
            raw = torch.empty((place.shape[0], place.blocks.row_bytes(k)), dtype=torch.uint8)
            begin = raw.data_ptr()
            for rows, first_tile, step in place.parts:
                _native.unpack_blocks(self._address(place), rows, k, type_id, 0, first_tile, step, begin)
                begin += rows * raw.shape[1]
            return raw
        out = torch.empty(place.shape, dtype=self._dtype)
        begin = out.data_ptr()
        for rows, first_tile, step in place.parts:
            k = place.shape[1]
            _native.unpack_weight(self._address(place), rows, k, self._code, 0, first_tile, step, begin, k)
            begin += rows * k * out.element_size()
        return out

    def take_adapters(self, weights: Mapping[str, AdapterWeights]) -> None:
        """Add from here on what adapters in these slots make of the inputs of linear layers; raises InvalidOperand."""
        for name, slots in weights.items():
            if slots.down.dtype is not self._dtype:
                raise InvalidOperand(f"adapters are of {self._dtype}", found=f"{slots.down.dtype} for '{name}'")
            _, layer, linear = self._names[name].split(".")
            try:
                self._native.set_adapters(int(layer), _ADAPTED[linear], native_adapters(slots))
            except ValueError as error:
                raise InvalidOperand(f"adapters do not fit '{name}'", found=str(error)) from error
        # The native decoder has their addresses.
        self._adapters = weights

    def weight_memory(self) -> tuple[Tensor, ...]:
        """Return the arena, which holds nothing but weights."""
        return (self._arena,)

    def scratch_bytes(self) -> int:
        """Return the bytes of working memory and results held for the largest step."""
        return self._scratch.nbytes + self._hidden.memory.nbytes + self._output.nbytes

    def run(
        self,
        token_ids: Tensor,
        positions: Tensor,
        metadata: tuple[object, ...],
        kv_cache: Tensor,
        rows: Tensor,
        embedded: tuple[Tensor, Tensor] | None = None,
        adapters: AdapterRows | None = None,
    ) -> Tensor:
        """Run one step and return the hidden states of the given token rows: a view that the next step overwrites."""
        self._check_cache(kv_cache)
        steps = [step for step in metadata if isinstance(step, CpuStep)]
        if len(steps) != len(metadata) or not steps:
            raise InvalidOperand("the step's metadata is what CpuAttention.prepare returned", found=repr(metadata))
        wanted = rows.to(torch.int32).contiguous()
        count = wanted.shape[0]
        places, given = self._given(embedded)
        out = self._hidden.first(count)
        try:
            self._native.run(
                [step.prepared(kv_cache.shape[2]) for step in steps],
                token_ids.data_ptr(),
                positions.data_ptr(),
                kv_cache.data_ptr(),
                wanted.data_ptr(),
                count,
                out.data_ptr(),
                places.data_ptr(),
                places.shape[0],
                given.data_ptr(),
                *(_NO_ADAPTERS if adapters is None else _native_rows(adapters)),
            )
        except (ValueError, IndexError) as error:
            raise InvalidOperand("cannot run the decoder's step", found=str(error)) from error
        return out

    def _given(self, embedded: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
        """Return the indices and embeddings as the native step takes them: int64[k] and float32[k, hidden_size], contiguous."""
        if embedded is None:
            return _NO_ROWS, _NO_EMBEDDINGS
        places, given = embedded
        if places.ndim != 1 or tuple(given.shape) != (len(places), self._spec.hidden_size):
            raise InvalidOperand(
                f"given embeddings are one row of {self._spec.hidden_size} for each index",
                found=f"indices {list(places.shape)}, embeddings {list(given.shape)}",
            )
        return places.long().contiguous(), given.float().contiguous()

    def logits(self, hidden: Tensor) -> Tensor:
        """Return float32[rows, vocab_size] of hidden states: a view that the next call overwrites."""
        return self._head(hidden, _LOGITS, self._logits)

    def argmax(self, hidden: Tensor) -> Tensor:
        """Return int64[rows], the tokens of the highest logits: a view that the next call overwrites."""
        return self._head(hidden, _ARG_MAX, self._tokens)

    def logprobs(self, hidden: Tensor, token_ids: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return log probabilities without the logits, whose memory traffic takes as long as the product; for a `count` of 0 or 1."""
        if count > 1:
            return None
        hidden, token_ids, rows = self._checked(hidden), token_ids.contiguous(), len(hidden)
        ids = torch.empty((rows, 1 + count), dtype=torch.int64)
        values = torch.empty((rows, 1 + count), dtype=torch.float32)
        ranks = torch.empty(rows, dtype=torch.int64)
        most = min(_SCORED_ROWS, self._request.max_num_tokens, self._output.nbytes // self._native.summary_bytes())
        blocks = -(-rows // most)
        places = [rows * block // blocks for block in range(blocks + 1)] if rows else [0]
        for begin, end in pairwise(places):
            try:
                self._native.logprobs(
                    hidden[begin:].data_ptr(),
                    end - begin,
                    token_ids[begin:].data_ptr(),
                    bool(count),
                    self._output.data_ptr(),
                    ids[begin:].data_ptr(),
                    values[begin:].data_ptr(),
                    ranks[begin:].data_ptr(),
                )
            except (ValueError, IndexError) as error:
                raise InvalidOperand("cannot compute log probabilities", found=str(error)) from error
        return ids, values, ranks

    def _checked(self, hidden: Tensor) -> Tensor:
        if hidden.ndim != 2 or hidden.shape[1] != self._spec.hidden_size or hidden.dtype is not self._dtype:
            raise InvalidOperand(
                f"hidden states are [rows, {self._spec.hidden_size}] of {self._dtype}",
                found=f"{list(hidden.shape)} of {hidden.dtype}",
            )
        return hidden.contiguous()

    def _head(self, hidden: Tensor, output: int, memory: _Rows) -> Tensor:
        hidden = self._checked(hidden)
        count = hidden.shape[0]
        out = memory.first(count)
        try:
            self._native.head(hidden.data_ptr(), count, output, out.data_ptr())
        except ValueError as error:
            raise InvalidOperand("cannot compute logits", found=str(error)) from error
        return out

    def _copy_of(self, tables: RopeTables, allocator: DeviceAllocator) -> Tensor:
        spec, request = self._spec, self._request
        count, shape = max(spec.rope_tables) + 1, (request.max_context, spec.rotary_dim // 2)
        found = [tuple(table.shape) for pair in tables for table in pair]
        if len(tables) != count or any(size != shape for size in found):
            raise InvalidOperand(f"{count} pairs of rotary tables are {list(shape)} each", found=f"shapes {found}")
        rope = allocator.empty((count, 2, *shape), DType.FLOAT32, BUFFERS)
        for place, pair in zip(rope, tables, strict=True):
            for half, table in zip(place, pair, strict=True):
                half.copy_(table)
        return rope

    def _make_native(self, spec: DecoderSpec) -> _native.Decoder:
        request = self._request
        layers, places = [], places_of(request.groups)
        for index, (attention, table) in enumerate(zip(spec.attention, spec.rope_tables, strict=True)):
            group, cache_layer = places[index]
            # Scales of the cache are the plan's: the modules have none.
            planned = request.groups[group].plan.request.layers[cache_layer]
            scaled = replace(attention, k_scale=planned.k_scale, v_scale=planned.v_scale)
            prefix = f"layers.{index}."
            named = {
                name.removeprefix(prefix): place for name, place in self._places.items() if name.startswith(prefix)
            }
            layers.append(
                _native.DecoderLayer(
                    attention=native_layer(scaled, request.groups[0].plan.block_size),
                    kv_group=group,
                    cache_layer=cache_layer,
                    rope_table=table,
                    weights={name: self._tuple(place) for name, place in named.items() if place.parts},
                    vectors={name: self._address(place) for name, place in named.items() if not place.parts},
                )
            )
        return _native.Decoder(
            dtype=self._code,
            kv_format=kv_format_code(request.dtype, request.groups[0].plan.kv_cache.dtype),
            vocab=spec.vocab_size,
            hidden=spec.hidden_size,
            intermediate=spec.intermediate_size,
            rotary_dim=spec.rotary_dim,
            norm_eps=spec.norm_eps,
            activation=ACTIVATION_CODES[spec.activation],
            embed_scale=spec.embed_scale,
            logit_soft_cap=spec.logit_soft_cap or 0.0,
            max_tokens=request.max_num_tokens,
            max_rows=request.max_num_samples,
            adapted=request.adapters,
            embed=self._tuple(self._places["embed"]),
            head=self._tuple(self._places["embed" if spec.tied else "head"]),
            final_norm=self._address(self._places["final_norm"]),
            layers=layers,
        )

    def _place(self, name: str) -> _Place:
        if name not in self._names:
            raise InvalidOperand(f"the model has no parameter '{name}'", found=f"{len(self._names)} others")
        return self._places[self._names[name]]

    def _address(self, place: _Place) -> int:
        return self._arena.data_ptr() + place.offset

    def _tuple(self, place: _Place) -> tuple[int, int, int, int, int]:
        blocks = NO_BLOCKS if place.blocks is None else place.blocks.type_id
        return self._address(place), place.stored_columns, place.shape[1], self._code, blocks

    def _vector(self, place: _Place) -> Tensor:
        return self._arena[place.offset : place.offset + 4 * prod(place.shape)].view(torch.float32)

    def _check_cache(self, kv_cache: Tensor) -> None:
        layers, inner, dtype = self._cache
        shape = kv_cache.shape
        good = len(shape) == 6 and shape[:2] == layers and shape[3:] == inner
        if not good or not kv_cache.is_contiguous() or kv_cache.dtype is not dtype:
            expected = ", ".join(map(str, (*layers, "blocks", *inner)))
            raise InvalidOperand(
                f"the cache is [{expected}] of {dtype}, contiguous",
                found=f"{list(shape)} of {kv_cache.dtype}, strides {kv_cache.stride()}",
            )


def native_adapters(weights: AdapterWeights) -> _native.AdapterMatrices:
    """Return the adapters of one layer as the native code takes them, which keeps the addresses of their tensors."""
    slots, max_rank, rows = weights.up.shape
    return _native.AdapterMatrices(
        dtype=DTYPE_CODES[weights.down.dtype],
        columns=weights.down.shape[2],
        rows=rows,
        max_rank=max_rank,
        slots=slots,
        down=weights.down.data_ptr(),
        down_stride=weights.down.stride(0),
        up=weights.up.data_ptr(),
        up_stride=weights.up.stride(0),
        ranks=weights.ranks.data_ptr(),
        scales=weights.scales.data_ptr(),
        parts_stride=weights.ranks.stride(0),
        spans=_spans(weights.spans).data_ptr(),
        parts=len(weights.spans),
    )


@cache
def _spans(spans: tuple[tuple[int, int], ...]) -> Tensor:
    return torch.tensor(spans, dtype=torch.int32)


def _native_rows(rows: AdapterRows) -> tuple[int, int, int, int]:
    return rows.tokens.data_ptr(), rows.slots.data_ptr(), rows.starts.data_ptr(), len(rows.groups)


def _tiles(rows: int) -> int:
    return -(-rows // _TILE)


def _lay_out(spec: DecoderSpec, code: int, blocks: Mapping[str, BlockFormat]) -> tuple[dict[str, _Place], int]:
    """Return every weight's place in the arena, in the order of use, and the arena's size in bytes."""
    places: dict[str, _Place] = {}
    offset = 0
    for name, shape in spec.weight_shapes().items():
        if len(shape) == 1:
            place, size = _Place(offset, shape), 4 * shape[0]
        else:
            half = shape[0] // 2
            parts = ((half, 0, 2), (half, 1, 2)) if name.endswith(".gate_up") else ((shape[0], 0, 1),)
            format = blocks.get(name)
            place = _Place(offset, shape, parts, format)
            columns, k = place.stored_columns, shape[1]
            size = _native.packed_bytes(columns, k, code)
            if format is not None:
                size = _native.packed_block_bytes(columns, k, format.type_id)
        places[name] = place
        offset += -(-size // _ALIGNMENT) * _ALIGNMENT
    return places, offset


def refusals(spec: DecoderSpec, request: FuseRequest) -> tuple[str, ...]:
    """Return why a decoder cannot be run with this plan, one sentence each; empty where it can."""
    cache = request.groups[0].plan.kv_cache
    reasons = []
    if request.dtype not in DTYPES:
        reasons.append(f"dtype {request.dtype} is not supported (supported: {', '.join(DTYPES)})")
    if cache.dtype not in (request.dtype, DType.FLOAT8_E4M3):
        reasons.append(f"a KV cache of {cache.dtype} with activations of {request.dtype} is not supported")
    if cache.axes != ("kv", "block", "head", "token", "dim"):
        reasons.append(f"a KV cache with axes {cache.axes} is not supported")
    if any(layer.sinks or layer.alibi for layer in spec.attention):
        reasons.append("attention sinks and ALiBi are not supported")
    head_dim = max(layer.head_dim for layer in spec.attention)
    if head_dim > _MAX_HEAD_DIM:
        reasons.append(f"head dimension {head_dim} is not supported (at most {_MAX_HEAD_DIM})")
    if spec.rotary_dim % 2 or spec.rotary_dim > min(layer.head_dim for layer in spec.attention):
        reasons.append(f"rotary dimension {spec.rotary_dim} is odd or larger than a head")
    return tuple(reasons)
