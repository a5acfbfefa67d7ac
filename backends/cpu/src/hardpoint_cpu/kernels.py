"""Fused operators of the CPU backend: packed linear layers, row operators, and a decoder whose whole step is one native call.

Weights are packed into the tiles that the native kernels read (native/gemm.hpp). A row's result is the same, bit for bit,
whatever the batch and the number of threads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import torch

from hardpoint.interfaces import (
    BUFFERS,
    DEFAULT,
    WEIGHTS,
    Activation,
    DecoderOutput,
    DecoderProgram,
    DecoderRequest,
    DecoderSpec,
    Device,
    DeviceAllocator,
    DType,
    KernelSet,
    Policy,
    Refusal,
    SamplingTables,
)
from hardpoint.interfaces.errors import HardpointError
from hardpoint_cpu import _native
from hardpoint_cpu.attention import CpuStep

if TYPE_CHECKING:
    from torch import Tensor

    from hardpoint.interfaces.batch import StepBatch

# Codes of hp::DType, hp::Epilogue and hp::DecoderOutput.
_DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_STORE = 0
_ACTIVATION_CODES = {Activation.SILU: 2, Activation.GELU_TANH: 3}
_OUTPUT_CODES = {DecoderOutput.LOGITS: 0, DecoderOutput.ARGMAX: 1, DecoderOutput.HIDDEN: 2}

_DTYPES = (DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16)
_TILE = 16
_MAX_HEAD_DIM = 256
_ALIGNMENT = 64


class InvalidOperand(HardpointError, ValueError):
    """A tensor's shape, dtype, layout or device is not one that the operator takes; nothing was computed."""


class CpuKernels(KernelSet):
    """Native operators for tensors on the host, in float32, bfloat16 and float16."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._sampler = _native.RowSampler()

    def linear(self, weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
        """Return `x -> x @ weight.T + bias` over a packed copy of the weight; x has the weight's dtype."""
        _check("weight", weight, dims=2)
        if bias is not None and bias.shape != weight.shape[:1]:
            raise InvalidOperand(f"bias is [{weight.shape[0]}]", found=f"shape {list(bias.shape)}")
        return _PackedLinear(weight, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return RMSNorm over the last axis, computed in float32, in x's dtype."""
        rows, scale = _rows("x", x), _vector("weight", weight, x.shape[-1])
        out = torch.empty(x.shape, dtype=x.dtype)
        _native.rms_norm(*_matrix(rows), _code(x), scale.data_ptr(), eps, out.data_ptr(), x.shape[-1])
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add x to `residual` in place, and return RMSNorm of the sum."""
        n = x.shape[-1]
        rows, sums, scale = _rows("x", x), _rows_in_place("residual", residual), _vector("weight", weight, n)
        if residual.shape != x.shape or residual.dtype is not x.dtype:
            raise InvalidOperand(
                f"residual is {list(x.shape)} of {x.dtype}, as x", found=f"{list(residual.shape)} of {residual.dtype}"
            )
        out = torch.empty(x.shape, dtype=x.dtype)
        _native.add_rms_norm(
            rows.data_ptr(),
            rows.stride(0),
            sums.data_ptr(),
            sums.stride(0),
            len(rows),
            n,
            _code(x),
            scale.data_ptr(),
            eps,
            out.data_ptr(),
            n,
        )
        return out

    def rotary(self, q: Tensor, k: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Rotate q [T, heads, dim] and k [T, kv_heads, dim] in place (halves); cos, sin float32[max, rotary_dim / 2]."""
        self._rotate(q, k, positions, cos, sin, interleaved=False)

    def vendor_rotary_interleaved(self, q: Tensor, k: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Rotate as `rotary` does, with elements 2i and 2i + 1 as a pair (GPT-J, Cohere)."""
        self._rotate(q, k, positions, cos, sin, interleaved=True)

    def gated_activation(self, x: Tensor, activation: Activation) -> Tensor:
        """Return `act(x[..., :n]) * x[..., n:]` where n is half the last axis."""
        rows = _rows("x", x)
        n, odd = divmod(x.shape[-1], 2)
        if odd:
            raise InvalidOperand("gate and up need an even last axis", found=f"shape {list(x.shape)}")
        out = torch.empty((*x.shape[:-1], n), dtype=x.dtype)
        code = _ACTIVATION_CODES[activation]
        _native.gated_activation(rows.data_ptr(), rows.stride(0), len(rows), n, _code(x), code, out.data_ptr(), n)
        return out

    def argmax(self, logits: Tensor) -> Tensor:
        """Return int64[rows], the lowest index of the highest value in each row of float32[rows, columns]."""
        rows = _logits(logits)
        out = torch.empty(len(rows), dtype=torch.int64)
        _native.arg_max(*_matrix(rows), out.data_ptr())
        return out

    def sample(self, logits: Tensor, step: Tensor, tables: SamplingTables) -> Tensor | None:
        """Return a token for each row of logits, int64[S], and write it to the tables; see `KernelSet.sample`."""
        rows = _logits(logits)
        tokens = torch.empty(len(rows), dtype=torch.int64)
        self._sampler.sample(
            *_matrix(rows),
            step.data_ptr(),
            tables.parameters.data_ptr(),
            tables.masks.data_ptr(),
            tables.biases.data_ptr(),
            tables.history.data_ptr(),
            tables.last_tokens.data_ptr(),
            tokens.data_ptr(),
        )
        return tokens

    def logprobs(self, logits: Tensor, token_ids: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return ids, log probabilities and ranks of rows of logits; see `KernelSet.logprobs`."""
        rows = _logits(logits)
        ids = torch.empty((len(rows), 1 + count), dtype=torch.int64)
        values = torch.empty((len(rows), 1 + count), dtype=torch.float32)
        ranks = torch.empty(len(rows), dtype=torch.int64)
        self._sampler.logprobs(
            *_matrix(rows), token_ids.data_ptr(), count, ids.data_ptr(), values.data_ptr(), ranks.data_ptr()
        )
        return ids, values, ranks

    def vendor_log_sum_exp(self, logits: Tensor) -> Tensor:
        """Return float32[rows], `log(sum(exp(row)))` of each row of float32[rows, columns]."""
        rows = _logits(logits)
        out = torch.empty(len(rows), dtype=torch.float32)
        _native.log_sum_exp(*_matrix(rows), out.data_ptr())
        return out

    def vendor_soft_cap(self, logits: Tensor, cap: float) -> None:
        """Replace each logit of float32[rows, columns] by `cap * tanh(logit / cap)`, in place."""
        _native.soft_cap(*_matrix(_logits(logits)), cap)

    def plan_decoder(self, request: DecoderRequest, allocator: DeviceAllocator) -> DecoderProgram | Refusal:
        """Return the fused decoder, or why this one cannot be run by it."""
        if reasons := _refusals(request):
            return Refusal(reasons)
        return CpuDecoder(request, allocator)

    def _rotate(self, q: Tensor, k: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> None:
        tokens, _, dim = q.shape
        for name, heads in (("q", q), ("k", k)):
            _check(name, heads, dims=3)
            packed = heads.stride(1) == dim or heads.shape[1] == 1
            if heads.shape[0] != tokens or heads.shape[2] != dim or heads.dtype is not q.dtype or not packed:
                raise InvalidOperand(
                    f"{name} is [{tokens}, heads, {dim}] of {q.dtype}, heads contiguous",
                    found=f"{list(heads.shape)} of {heads.dtype}, strides {heads.stride()}",
                )
        for name, table in (("cos", cos), ("sin", sin)):
            good = table.ndim == 2 and table.shape == cos.shape and 2 * table.shape[1] <= dim and table.is_contiguous()
            if not good or table.dtype is not torch.float32:
                raise InvalidOperand(
                    f"{name} is float32[max positions, at most {dim // 2}], contiguous",
                    found=f"{list(table.shape)} of {table.dtype}",
                )
        where = positions.to(torch.int64).contiguous()
        if where.shape != (tokens,) or (tokens and not 0 <= int(where.min()) <= int(where.max()) < len(cos)):
            raise InvalidOperand(
                f"positions are {tokens} integers from 0 to {len(cos) - 1}",
                found=f"shape {list(where.shape)}, or beyond",
            )
        _native.rotary(
            q.data_ptr(),
            q.stride(0),
            q.shape[1],
            0,
            k.data_ptr(),
            k.stride(0),
            k.shape[1],
            0,
            tokens,
            _code(q),
            dim,
            2 * cos.shape[1],
            int(interleaved),
            0.0,
            where.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
        )


class _PackedLinear:
    """One packed weight [n, k], callable on [..., k]."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._n, self._k = weight.shape
        self._dtype = weight.dtype
        self._code = _code(weight)
        self._bias = None if bias is None else bias.detach().to(torch.float32).contiguous()
        source = weight.detach().contiguous()
        self._tiles = torch.empty(_native.packed_bytes(self._n, self._k, self._code), dtype=torch.uint8)
        _native.pack_weight(source.data_ptr(), self._k, self._n, self._k, self._code, 0, 0, 1, self._tiles.data_ptr())

    def __call__(self, x: Tensor) -> Tensor:
        rows = _rows("x", x)
        if x.shape[-1] != self._k or x.dtype is not self._dtype:
            raise InvalidOperand(
                f"x is [..., {self._k}] of {self._dtype}, as the weight", found=f"{list(x.shape)} of {x.dtype}"
            )
        out = torch.empty((*x.shape[:-1], self._n), dtype=x.dtype)
        workspace = torch.empty(_native.linear_workspace_bytes(len(rows), self._k, self._code), dtype=torch.uint8)
        _native.linear(
            self._tiles.data_ptr(),
            self._n,
            self._k,
            self._code,
            rows.data_ptr(),
            rows.stride(0),
            len(rows),
            0 if self._bias is None else self._bias.data_ptr(),
            _STORE,
            0.0,
            out.data_ptr(),
            self._n,
            self._code,
            self._n,
            0,
            workspace.data_ptr(),
            workspace.numel(),
        )
        return out


@dataclass(frozen=True)
class _Place:
    """Where one weight stands in the arena: a matrix in tiles, or a float32 vector.

    Attributes:
        parts: for a matrix, (rows, first tile, tile step) of each stacked part; empty for a vector.
    """

    offset: int
    shape: tuple[int, ...]
    parts: tuple[tuple[int, int, int], ...] = ()

    @property
    def stored_columns(self) -> int:
        """Columns of the packed weight; a gated pair is padded to whole tiles of each half."""
        return self.shape[0] if len(self.parts) == 1 else len(self.parts) * _tiles(self.parts[0][0]) * _TILE


class CpuDecoder(DecoderProgram):
    """The fused decoder. Weights stand packed in one arena of the allocator, working memory in another.

    The residual stream is float32. The tensor that `run` returns is a view of working memory, valid until the next step.
    """

    def __init__(self, request: DecoderRequest, allocator: DeviceAllocator) -> None:
        self._request = request
        self._dtype = request.dtype.to_torch()
        self._code = _DTYPE_CODES[self._dtype]
        spec = request.spec
        self._places, size = _lay_out(spec, self._code)
        self._arena = allocator.empty((size,), DType.UINT8, WEIGHTS)
        num_tables = max(spec.rope_tables) + 1
        self._rope = allocator.empty((num_tables, 2, request.max_context, spec.rotary_dim // 2), DType.FLOAT32, BUFFERS)
        self._native = self._make_native(spec)
        self._native.set_rope_tables([(cos.data_ptr(), sin.data_ptr(), request.max_context) for cos, sin in self._rope])
        output = request.max_num_samples * max(4 * spec.vocab_size, 8)
        output = max(output, request.max_num_tokens * spec.hidden_size * request.dtype.itemsize)
        scratch = self._native.scratch_bytes()
        self._output = allocator.empty((output,), DType.UINT8, DEFAULT, Policy.DISCARD)
        self._scratch = allocator.empty((scratch,), DType.UINT8, DEFAULT, Policy.DISCARD)
        self._native.set_scratch(self._scratch.data_ptr(), scratch)

    def load_weight(self, name: str, tensor: Tensor) -> None:
        """Copy one weight into its place; raises InvalidOperand (a ValueError) on a wrong name or shape."""
        place = self._place(name)
        if tuple(tensor.shape) != place.shape:
            raise InvalidOperand(f"weight '{name}' is {list(place.shape)}", found=f"shape {list(tensor.shape)}")
        if not place.parts:
            self._vector(place).copy_(tensor)
            return
        source = tensor.detach().to(device="cpu", dtype=self._dtype).contiguous()
        row_bytes = place.shape[1] * source.element_size()
        begin = source.data_ptr()
        for rows, first_tile, step in place.parts:
            k = place.shape[1]
            _native.pack_weight(begin, k, rows, k, self._code, 0, first_tile, step, self._address(place))
            begin += rows * row_bytes

    def read_weight(self, name: str) -> Tensor:
        """Return a copy of one weight in the shape and order that `load_weight` takes; raises InvalidOperand on a wrong name."""
        place = self._place(name)
        if not place.parts:
            return self._vector(place).clone()
        out = torch.empty(place.shape, dtype=self._dtype)
        begin = out.data_ptr()
        for rows, first_tile, step in place.parts:
            k = place.shape[1]
            _native.unpack_weight(self._address(place), rows, k, self._code, 0, first_tile, step, begin, k)
            begin += rows * k * out.element_size()
        return out

    def weight_memory(self) -> tuple[Tensor, ...]:
        """Return the arena, which holds nothing but weights."""
        return (self._arena,)

    def set_rope_tables(self, tables: tuple[tuple[Tensor, Tensor], ...]) -> None:
        """Set the rotary tables: pairs (cos, sin), each float32[max_context, rotary_dim / 2]."""
        shape = tuple(self._rope.shape[2:])
        found = [tuple(table.shape) for pair in tables for table in pair]
        if len(tables) != len(self._rope) or any(size != shape for size in found):
            raise InvalidOperand(
                f"{len(self._rope)} pairs of rotary tables are {list(shape)} each", found=f"shapes {found}"
            )
        for place, pair in zip(self._rope, tables, strict=True):
            for half, table in zip(place, pair, strict=True):
                half.copy_(table)

    def scratch_bytes(self) -> int:
        """Return the bytes of working memory and output held for the largest step."""
        return self._scratch.nbytes + self._output.nbytes

    def run(self, batch: StepBatch, metadata: object, kv_cache: Tensor, rows: Tensor, output: DecoderOutput) -> Tensor:
        """Run one step and return `output` for the given token rows: a view that the next step overwrites."""
        self._check_cache(kv_cache)
        if not isinstance(metadata, CpuStep):
            raise InvalidOperand("the step's metadata is what CpuAttention.prepare returned", found=repr(metadata))
        wanted = rows.to(torch.int32).contiguous()
        out = self._output_view(output, len(wanted))
        try:
            self._native.run(
                metadata.prepared(kv_cache.shape[2]),
                batch.token_ids.ctypes.data,
                batch.positions.ctypes.data,
                kv_cache.data_ptr(),
                wanted.data_ptr(),
                len(wanted),
                _OUTPUT_CODES[output],
                out.data_ptr(),
            )
        except (ValueError, IndexError) as error:
            raise InvalidOperand("cannot run the decoder's step", found=str(error)) from error
        return out

    def _make_native(self, spec: DecoderSpec) -> _native.Decoder:
        request = self._request
        layers = []
        for index, (attention, table) in enumerate(zip(spec.attention, spec.rope_tables, strict=True)):
            prefix = f"layers.{index}."
            named = {
                name.removeprefix(prefix): place for name, place in self._places.items() if name.startswith(prefix)
            }
            layers.append(
                _native.DecoderLayer(
                    attention=_native.AttentionLayer(
                        num_heads=attention.num_heads,
                        num_kv_heads=attention.num_kv_heads,
                        head_dim=attention.head_dim,
                        scale=attention.scale,
                        window=attention.sliding_window or 0,
                        soft_cap=attention.soft_cap or 0.0,
                        block_size=request.attention.block_size,
                    ),
                    rope_table=table,
                    weights={name: self._tuple(place) for name, place in named.items() if place.parts},
                    vectors={name: self._address(place) for name, place in named.items() if not place.parts},
                )
            )
        return _native.Decoder(
            dtype=self._code,
            vocab=spec.vocab_size,
            hidden=spec.hidden_size,
            intermediate=spec.intermediate_size,
            rotary_dim=spec.rotary_dim,
            norm_eps=spec.norm_eps,
            activation=_ACTIVATION_CODES[spec.activation],
            embed_scale=spec.embed_scale,
            logit_soft_cap=spec.logit_soft_cap or 0.0,
            max_tokens=request.max_num_tokens,
            max_rows=request.max_num_samples,
            embed=self._tuple(self._places["embed"]),
            head=self._tuple(self._places["embed" if spec.tied else "head"]),
            final_norm=self._address(self._places["final_norm"]),
            layers=layers,
        )

    def _place(self, name: str) -> _Place:
        place = self._places.get(name)
        if place is None:
            raise InvalidOperand(
                f"the decoder has no weight '{name}'", hint="See DecoderSpec.weight_shapes for the names"
            )
        return place

    def _address(self, place: _Place) -> int:
        return self._arena.data_ptr() + place.offset

    def _tuple(self, place: _Place) -> tuple[int, int, int, int]:
        return self._address(place), place.stored_columns, place.shape[1], self._code

    def _vector(self, place: _Place) -> Tensor:
        return self._arena[place.offset : place.offset + 4 * prod(place.shape)].view(torch.float32)

    def _output_view(self, output: DecoderOutput, rows: int) -> Tensor:
        spec = self._request.spec
        shape, dtype = {
            DecoderOutput.LOGITS: ((rows, spec.vocab_size), torch.float32),
            DecoderOutput.ARGMAX: ((rows,), torch.int64),
            DecoderOutput.HIDDEN: ((rows, spec.hidden_size), self._dtype),
        }[output]
        size = prod(shape) * dtype.itemsize
        if size > self._output.nbytes:
            raise InvalidOperand(
                f"{rows} rows of {output} do not fit the decoder's working memory",
                found=f"planned for {self._request.max_num_samples} rows of logits, {self._request.max_num_tokens} tokens",
            )
        return self._output[:size].view(dtype).view(shape)

    def _check_cache(self, kv_cache: Tensor) -> None:
        cache = self._request.attention.kv_cache
        inner = (cache.num_kv_heads, cache.block_size, cache.head_dim)
        shape = tuple(kv_cache.shape)
        good = len(shape) == 6 and shape[:2] == (cache.num_layers, 2) and shape[3:] == inner
        if not good or not kv_cache.is_contiguous() or kv_cache.dtype is not self._dtype:
            raise InvalidOperand(
                f"the cache is [{cache.num_layers}, 2, blocks, {', '.join(map(str, inner))}] of {self._dtype}, contiguous",
                found=f"{list(shape)} of {kv_cache.dtype}, strides {kv_cache.stride()}",
            )


def _tiles(rows: int) -> int:
    return -(-rows // _TILE)


def _lay_out(spec: DecoderSpec, code: int) -> tuple[dict[str, _Place], int]:
    """Return every weight's place in the arena, in the order of use, and the arena's size in bytes."""
    places: dict[str, _Place] = {}
    offset = 0
    for name, shape in spec.weight_shapes().items():
        if len(shape) == 1:
            place, size = _Place(offset, shape), 4 * shape[0]
        else:
            half = shape[0] // 2
            parts = ((half, 0, 2), (half, 1, 2)) if name.endswith(".gate_up") else ((shape[0], 0, 1),)
            place = _Place(offset, shape, parts)
            size = _native.packed_bytes(place.stored_columns, shape[1], code)
        places[name] = place
        offset += -(-size // _ALIGNMENT) * _ALIGNMENT
    return places, offset


def _refusals(request: DecoderRequest) -> tuple[str, ...]:
    spec, cache = request.spec, request.attention.kv_cache
    reasons = []
    if request.dtype not in _DTYPES:
        reasons.append(f"dtype {request.dtype} is not supported (supported: {', '.join(_DTYPES)})")
    if cache.dtype is not request.dtype:
        reasons.append(f"a KV cache of {cache.dtype} with activations of {request.dtype} is not supported")
    if cache.axes != ("kv", "block", "head", "token", "dim"):
        reasons.append(f"a KV cache with axes {cache.axes} is not supported")
    if any(layer.sinks or layer.alibi for layer in spec.attention):
        reasons.append("attention sinks and ALiBi have no weights in the decoder's specification")
    head_dim = max(layer.head_dim for layer in spec.attention)
    if head_dim > _MAX_HEAD_DIM:
        reasons.append(f"head dimension {head_dim} is not supported (at most {_MAX_HEAD_DIM})")
    if spec.rotary_dim % 2 or spec.rotary_dim > min(layer.head_dim for layer in spec.attention):
        reasons.append(f"rotary dimension {spec.rotary_dim} is odd or larger than a head")
    return tuple(reasons)


def _code(tensor: Tensor) -> int:
    return _DTYPE_CODES[tensor.dtype]


def _check(name: str, tensor: Tensor, dims: int | None = None) -> None:
    good = tensor.device.type == "cpu" and tensor.dtype in _DTYPE_CODES and tensor.ndim >= 1
    good = good and (dims is None or tensor.ndim == dims) and (tensor.stride(-1) == 1 or tensor.shape[-1] == 1)
    if not good:
        raise InvalidOperand(
            f"{name} is {'a tensor' if dims is None else f'a {dims}-dimensional tensor'} of float32, bfloat16 or float16 "
            "on the host, contiguous in its last axis",
            found=f"{list(tensor.shape)} of {tensor.dtype}, strides {tensor.stride()}, on {tensor.device}",
        )


def _rows(name: str, tensor: Tensor) -> Tensor:
    """Return the tensor as [rows, n], a view where its strides allow."""
    _check(name, tensor)
    return tensor.reshape(-1, tensor.shape[-1])


def _rows_in_place(name: str, tensor: Tensor) -> Tensor:
    _check(name, tensor)
    try:
        return tensor.view(-1, tensor.shape[-1])
    except RuntimeError as error:
        raise InvalidOperand(
            f"{name} is changed in place and must be one block of rows", found=f"strides {tensor.stride()}"
        ) from error


def _matrix(rows: Tensor) -> tuple[int, int, int, int]:
    return rows.data_ptr(), rows.stride(0), len(rows), rows.shape[1]


def _logits(logits: Tensor) -> Tensor:
    _check("logits", logits, dims=2)
    if logits.dtype is not torch.float32:
        raise InvalidOperand("logits are float32[rows, columns]", found=f"{list(logits.shape)} of {logits.dtype}")
    return logits


def _vector(name: str, tensor: Tensor, n: int) -> Tensor:
    """Return a vector of n float32 values."""
    if tensor.shape != (n,):
        raise InvalidOperand(f"{name} is [{n}]", found=f"shape {list(tensor.shape)}")
    return tensor.detach().to(torch.float32).contiguous()
