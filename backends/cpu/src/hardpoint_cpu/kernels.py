"""Fused operators of the CPU backend over tensors on the host, and the way to its decoder.

A row's result is the same, bit for bit, whatever the batch and the number of threads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hardpoint.interfaces import (
    Activation,
    AdapterRows,
    AdapterWeights,
    BlockFormat,
    DecoderProgram,
    Device,
    DeviceAllocator,
    DType,
    ExpertsProgram,
    ExpertsRequest,
    FuseRequest,
    KernelSet,
    LinearProgram,
    LinearRequest,
    Refusal,
    SamplingTables,
)
from hardpoint_cpu import _native
from hardpoint_cpu.adapters import add_adapters
from hardpoint_cpu.decoder import ACTIVATION_CODES, DTYPE_CODES, DTYPES, CpuDecoder, InvalidOperand, refusals
from hardpoint_cpu.experts import CpuExperts
from hardpoint_cpu.linear import BLOCK_FORMATS, CpuBlockLinear, CpuLinear
from hardpoint_cpu.recognition import recognise

if TYPE_CHECKING:
    from torch import Tensor, nn


class CpuKernels(KernelSet):
    """Native operators for tensors on the host, in float32, bfloat16 and float16."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._sampler = _native.RowSampler()

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

    def layer_norm(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, branch: Tensor | None = None
    ) -> Tensor:
        """Return the layer normalisation of x, or of the sum of x and a branch, computed in float32, in x's dtype."""
        n = x.shape[-1]
        rows, scale = _rows("x", x), _vector("weight", weight, n)
        offsets = None if bias is None else _vector("bias", bias, n)
        added = None if branch is None else _rows("branch", branch)
        if branch is not None and (branch.shape != x.shape or branch.dtype is not x.dtype):
            raise InvalidOperand(
                f"branch is {list(x.shape)} of {x.dtype}, as x", found=f"{list(branch.shape)} of {branch.dtype}"
            )
        out = torch.empty(x.shape, dtype=x.dtype)
        _native.layer_norm(
            rows.data_ptr(),
            rows.stride(0),
            0 if added is None else added.data_ptr(),
            0 if added is None else added.stride(0),
            len(rows),
            n,
            _code(x),
            scale.data_ptr(),
            0 if offsets is None else offsets.data_ptr(),
            eps,
            out.data_ptr(),
            n,
        )
        return out

    def rotary(self, q: Tensor, k: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Rotate q [T, heads, dim] and k [T, kv_heads, dim] in place (halves); cos, sin float32[max, rotary_dim / 2]."""
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
            0.0,
            where.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
        )

    def gated_activation(self, x: Tensor, activation: Activation) -> Tensor:
        """Return `act(x[..., :n]) * x[..., n:]` where n is half the last axis."""
        rows = _rows("x", x)
        n, odd = divmod(x.shape[-1], 2)
        if odd:
            raise InvalidOperand("gate and up need an even last axis", found=f"shape {list(x.shape)}")
        out = torch.empty((*x.shape[:-1], n), dtype=x.dtype)
        code = ACTIVATION_CODES[activation]
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

    def add_adapters(self, out: Tensor, x: Tensor, weights: AdapterWeights, rows: AdapterRows) -> bool:
        """Add what adapters make of rows; see `KernelSet.add_adapters`."""
        add_adapters(out, x, weights, rows)
        return True

    def fuse(self, model: nn.Module, request: FuseRequest, allocator: DeviceAllocator) -> DecoderProgram | Refusal:
        """Return the fused decoder, or why this model cannot be run by it."""
        found = recognise(model)
        if isinstance(found, Refusal):
            return found
        if reasons := refusals(found.spec, request):
            return Refusal(reasons)
        tables = tuple(rope.table(request.max_context) for rope in found.ropes)
        return CpuDecoder(found.spec, request, allocator, tables, found.names, found.blocks)

    def plan_linear(self, request: LinearRequest) -> LinearProgram | Refusal:
        """Return a native linear layer over packed weights, or why it does not run in the dtype."""
        return _dtype_refusal(request.dtype) or (
            CpuLinear(request) if request.blocks is None else CpuBlockLinear(request)
        )

    def block_formats(self) -> frozenset[BlockFormat]:
        """Return the formats of blocks that native/block_weight.hpp knows."""
        return BLOCK_FORMATS

    def plan_experts(self, request: ExpertsRequest) -> ExpertsProgram | Refusal:
        """Return the native experts, or why they do not run in the dtype."""
        return _dtype_refusal(request.dtype) or CpuExperts(request)


def _dtype_refusal(dtype: DType) -> Refusal | None:
    if dtype in DTYPES:
        return None
    return Refusal((f"dtype {dtype} is not supported (supported: {', '.join(DTYPES)})",))


def _code(tensor: Tensor) -> int:
    return DTYPE_CODES[tensor.dtype]


def _check(name: str, tensor: Tensor, dims: int | None = None) -> None:
    good = tensor.device.type == "cpu" and tensor.dtype in DTYPE_CODES and tensor.ndim >= 1
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
