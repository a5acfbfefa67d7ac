"""Paged attention of the CPU backend, over the native kernels.

The KV cache of a layer is [2, num_blocks, num_kv_heads, block_size, head_dim]: keys, then values. A cache of float8_e4m3fn is widened tile
by tile into the queries' dtype, exactly. Results of a sequence depend neither on the batch around it nor on the number of threads.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from hardpoint.interfaces import AttentionBackend, AttentionPlan, Device, DType, KVCacheSpec, Refusal
from hardpoint.interfaces.capabilities import AttentionCapabilities, AttentionLayer, AttentionRequest
from hardpoint.interfaces.errors import InvalidBatch
from hardpoint.worker.attention_checks import (
    check_arrays,
    check_block_pairs,
    check_layer_cache,
    check_per_head,
    check_rows,
)
from hardpoint_cpu import _native
from hardpoint_cpu.capabilities import capabilities

if TYPE_CHECKING:
    from torch import Tensor

    from hardpoint.interfaces.batch import Int32Array, StepBatch

_HOST = torch.device("cpu")

# Codes of hp::DType.
_DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def kv_format_code(dtype: DType, kv_dtype: DType) -> int:
    """Return hp::KvFormat of a cache of `kv_dtype` under queries of `dtype`: 0 where they are the same, 1 for float8_e4m3fn."""
    return 0 if kv_dtype is dtype else 1


@contextmanager
def _native_errors(problem: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, IndexError) as error:
        raise InvalidBatch(problem, found=str(error)) from error


@dataclass
class CpuStep:
    """Metadata of one step: the batch in the form of the native kernels.

    Attributes:
        plan: what the step keeps to.
        arrays: query_start, context_lens, block_table, rows and slot_mapping of the batch, contiguous.
    """

    plan: AttentionPlan
    num_tokens: int
    arrays: tuple[Int32Array, ...]
    _prepared: dict[int, _native.PreparedBatch] = field(default_factory=dict)

    def prepared(self, num_blocks: int) -> _native.PreparedBatch:
        """Return the native batch for a cache of `num_blocks` blocks; raises InvalidBatch when it does not fit the cache."""
        found = self._prepared.get(num_blocks)
        if found is None:
            plan = self.plan
            try:
                found = _native.PreparedBatch(
                    self.num_tokens, plan.block_size, num_blocks, *self.arrays, plan.request.bidirectional
                )
            except (ValueError, IndexError) as error:
                raise InvalidBatch("cannot prepare the batch", found=str(error)) from error
            self._prepared[num_blocks] = found
        return found


class CpuAttention(AttentionBackend):
    """Native paged attention: prefill, chunked prefill, decode and mixes of them."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._native_layers: dict[AttentionRequest, tuple[_native.AttentionLayer, ...]] = {}

    def capabilities(self) -> AttentionCapabilities:
        """Return what these kernels do."""
        return capabilities(self._device).attention

    def plan(self, request: AttentionRequest) -> AttentionPlan | Refusal:
        """Return the cache's shape and block size, or why the request cannot be served."""
        claims = self.capabilities()
        if reasons := claims.explain(request):
            return Refusal(reasons)
        first = request.layers[0]
        spec = KVCacheSpec(
            num_layers=request.num_cached_layers,
            block_size=request.block_size or claims.default_block_size,
            num_kv_heads=first.num_kv_heads,
            head_dim=first.head_dim,
            dtype=request.kv_dtype,
        )
        return AttentionPlan(request, spec, notes=(f"native kernels for {_native.isa()}",))

    def prepare(self, plan: AttentionPlan, batch: StepBatch) -> CpuStep:
        """Return the step's arrays for the kernels; raises InvalidBatch when their shapes do not fit together."""
        check_arrays(batch)
        given = (batch.query_start, batch.context_lens, batch.block_table, batch.rows, batch.slot_mapping)
        return CpuStep(plan, batch.num_tokens, tuple(np.ascontiguousarray(array, np.int32) for array in given))

    def write_kv(self, layer: int, k: Tensor, v: Tensor, kv_cache: Tensor, metadata: CpuStep) -> None:
        """Write the step's keys and values to their slots; a slot of -1 is not written."""
        spec = metadata.plan.kv_cache
        keys, values = _cache_addresses(kv_cache, spec)
        shape, request = (metadata.num_tokens, spec.num_kv_heads, spec.head_dim), metadata.plan.request
        dtype = request.dtype.to_torch()
        check_rows("k", k, shape, dtype, _HOST)
        check_rows("v", v, shape, dtype, _HOST)
        _native.write_kv(
            metadata.prepared(kv_cache.shape[1]),
            self._layers_of(metadata.plan)[layer],
            k.data_ptr(),
            k.stride(0),
            v.data_ptr(),
            v.stride(0),
            _DTYPE_CODES[dtype],
            kv_format_code(request.dtype, request.kv_dtype),
            keys,
            values,
        )

    def forward(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kv_cache: Tensor,
        metadata: CpuStep,
        out: Tensor,
        sinks: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
    ) -> None:
        """Compute attention of the step's queries over their sequences' caches into `out`.

        All keys and values are read from the cache, where the layer has one. Rows of tokens that belong to no sequence (padding) are left
        as they are.
        """
        request, numbers = metadata.plan.request, metadata.plan.request.layers[layer]
        shape = (metadata.num_tokens, numbers.num_heads, numbers.head_dim)
        dtype = request.dtype.to_torch()
        if request.bidirectional:
            num_blocks, strides = 0, (k.stride(0), v.stride(0))
            for name, rows in (("k", k), ("v", v)):
                check_rows(name, rows, (metadata.num_tokens, numbers.num_kv_heads, numbers.head_dim), dtype, _HOST)
            keys, values = k.data_ptr(), v.data_ptr()
        else:
            keys, values = _cache_addresses(kv_cache, metadata.plan.kv_cache)
            num_blocks, strides = kv_cache.shape[1], (0, 0)
        check_rows("q", q, shape, dtype, _HOST)
        check_rows("out", out, shape, dtype, _HOST)
        check_per_head("sinks", sinks, numbers.sinks, numbers.num_heads, _HOST)
        check_per_head("alibi_slopes", alibi_slopes, numbers.alibi, numbers.num_heads, _HOST)
        prepared = metadata.prepared(num_blocks)
        with _native_errors("cannot compute attention of the batch"):
            _native.attention(
                prepared,
                self._layers_of(metadata.plan)[layer],
                q.data_ptr(),
                q.stride(0),
                _DTYPE_CODES[dtype],
                kv_format_code(request.dtype, request.kv_dtype),
                keys,
                values,
                out.data_ptr(),
                out.stride(0),
                0 if sinks is None else sinks.data_ptr(),
                0 if alibi_slopes is None else alibi_slopes.data_ptr(),
                *strides,
            )

    def copy_blocks(self, kv_cache: Tensor, pairs: Int32Array) -> None:
        """Copy whole blocks in all layers, pair by pair; raises InvalidBatch, with nothing copied, for a block outside."""
        self._copy(kv_cache, kv_cache, pairs)

    def swap_blocks(self, source: Tensor, destination: Tensor, pairs: Int32Array) -> None:
        """Copy whole blocks in all layers from one cache to another; raises InvalidBatch as copy_blocks does."""
        self._copy(source, destination, pairs)

    def _copy(self, source: Tensor, destination: Tensor, pairs: Int32Array) -> None:
        if not len(pairs):
            return
        pairs = np.ascontiguousarray(pairs, dtype=np.int32)
        for cache in (source, destination):
            if cache.ndim != 6 or not cache.is_contiguous() or cache.device != _HOST:
                raise InvalidBatch(
                    "a cache is [layers, 2, blocks, kv_heads, block_size, head_dim], contiguous, on the host",
                    found=f"shape {tuple(cache.shape)}, strides {cache.stride()}, on {cache.device}",
                )
        check_block_pairs(source, destination, pairs, 2)
        block_bytes = source.shape[3] * source.shape[4] * source.shape[5] * source.element_size()
        with _native_errors("cannot copy blocks"):
            _native.copy_blocks(
                source.data_ptr(),
                source.shape[2],
                destination.data_ptr(),
                destination.shape[2],
                source.shape[0] * source.shape[1],
                block_bytes,
                pairs.ctypes.data,
                len(pairs),
            )

    def _layers_of(self, plan: AttentionPlan) -> tuple[_native.AttentionLayer, ...]:
        found = self._native_layers.get(plan.request)
        if found is None:
            found = tuple(native_layer(layer, plan.block_size) for layer in plan.request.layers)
            self._native_layers[plan.request] = found
        return found


def native_layer(layer: AttentionLayer, block_size: int) -> _native.AttentionLayer:
    """Return a layer's numbers in native form."""
    return _native.AttentionLayer(
        num_heads=layer.num_heads,
        num_kv_heads=layer.num_kv_heads,
        head_dim=layer.head_dim,
        scale=layer.scale,
        window=layer.sliding_window or 0,
        soft_cap=layer.soft_cap or 0.0,
        block_size=block_size,
        k_scale=layer.k_scale,
        v_scale=layer.v_scale,
    )


def _cache_addresses(kv_cache: Tensor, spec: KVCacheSpec) -> tuple[int, int]:
    """Return the addresses of a layer's keys and values; raises InvalidBatch when the tensor is not such a layer."""
    check_layer_cache(kv_cache, (spec.num_kv_heads, spec.block_size, spec.head_dim), spec.dtype.to_torch(), _HOST)
    keys = kv_cache.data_ptr()
    return keys, keys + kv_cache.stride(0) * kv_cache.element_size()
