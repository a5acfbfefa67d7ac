"""Plain-torch references: paged attention, an allocator, and step batches, for tests that need no backend."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hardpoint.interfaces import (
    AttentionBackend,
    AttentionCapabilities,
    AttentionFeature,
    AttentionLayer,
    AttentionPlan,
    AttentionRequest,
    DType,
    IntSet,
    KVCacheSpec,
    MemoryCapabilities,
    MemoryInfo,
    MemoryStats,
    Policy,
    Refusal,
    StepBatch,
)
from hardpoint.interfaces.allocator import DEFAULT
from hardpoint.memory import Accounting, TensorAllocator

_FLOATS = frozenset({DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16})


@dataclass(frozen=True)
class _Metadata:
    plan: AttentionPlan
    slots: Tensor
    sequences: list[tuple[int, int, int, Tensor]]


class ReferenceAttention(AttentionBackend):
    """Attention by gathering each sequence's keys and values and a float32 softmax; KV layout [kv, block, head, token, dim].

    An fp8 cache holds keys and values divided by the layer's scales, saturated.
    """

    def __init__(self, block_size: int = 16) -> None:
        self._block_size = block_size

    def capabilities(self) -> AttentionCapabilities:
        return AttentionCapabilities(
            dtypes=_FLOATS,
            kv_dtypes=dict.fromkeys(_FLOATS, _FLOATS | {DType.FLOAT8_E4M3}),
            head_dims=IntSet.between(1),
            block_sizes=IntSet.between(1),
            default_block_size=self._block_size,
            group_sizes=IntSet.between(1),
            max_context=1 << 20,
            features=frozenset(AttentionFeature),
        )

    def plan(self, request: AttentionRequest) -> AttentionPlan | Refusal:
        reasons = self.capabilities().explain(request)
        if reasons:
            return Refusal(reasons)
        layer = request.layers[0]
        block_size = request.block_size or self._block_size
        return AttentionPlan(
            request,
            KVCacheSpec(request.num_cached_layers, block_size, layer.num_kv_heads, layer.head_dim, request.kv_dtype),
        )

    def prepare(self, plan: AttentionPlan, batch: StepBatch) -> _Metadata:
        sequences = []
        for index in range(batch.num_seqs):
            first, last = int(batch.query_start[index]), int(batch.query_start[index + 1])
            context = int(batch.context_lens[index])
            blocks = -(-context // plan.block_size)
            table = torch.from_numpy(batch.block_table[batch.rows[index], :blocks].astype(np.int64))
            sequences.append((first, last, context, table))
        return _Metadata(plan, torch.from_numpy(batch.slot_mapping.astype(np.int64)), sequences)

    def write_kv(self, layer: int, k: Tensor, v: Tensor, kv_cache: Tensor, metadata: Any) -> None:
        slots, size = metadata.slots, metadata.plan.block_size
        kept = slots >= 0
        blocks, offsets = slots[kept] // size, slots[kept] % size
        for which, (values, scale) in enumerate(zip((k, v), _scales(metadata.plan, layer), strict=True)):
            if kv_cache.dtype is torch.float8_e4m3fn:
                held = (values[kept].float() / scale).clamp(-448, 448).to(kv_cache.dtype)
                kv_cache.view(torch.uint8)[which][blocks, :, offsets] = held.view(torch.uint8)
            else:
                kv_cache[which][blocks, :, offsets] = values[kept].to(kv_cache.dtype)

    def forward(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kv_cache: Tensor,
        metadata: Any,
        out: Tensor,
        sinks: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
    ) -> None:
        shape: AttentionLayer = metadata.plan.request.layers[layer]
        for first, last, context, table in metadata.sequences:
            if not shape.causal:
                own = (x[first:last].float() for x in (q, k, v))
                out[first:last] = attend(*own, shape, sinks=sinks).to(out.dtype)
                continue
            keys, values = (
                part[table].transpose(1, 2).reshape(-1, shape.num_kv_heads, shape.head_dim)[:context].float() * scale
                for part, scale in zip(kv_cache, _scales(metadata.plan, layer), strict=True)
            )
            out[first:last] = attend(
                q[first:last].float(), keys, values, shape, sinks=sinks, alibi_slopes=alibi_slopes
            ).to(out.dtype)

    def copy_blocks(self, kv_cache: Tensor, pairs: np.ndarray) -> None:
        for source, destination in pairs.tolist():
            kv_cache[:, :, destination] = kv_cache[:, :, source]

    def swap_blocks(self, source: Tensor, destination: Tensor, pairs: np.ndarray) -> None:
        for block, other in pairs.tolist():
            destination[:, :, other] = source[:, :, block]


def _scales(plan: AttentionPlan, layer: int) -> tuple[float, float]:
    shape = plan.request.layers[layer]
    return shape.k_scale, shape.v_scale


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer: AttentionLayer,
    *,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
) -> Tensor:
    """Return attention of the last `len(q)` positions over all keys of one sequence.

    Args:
        q: [num_tokens, num_heads, head_dim].
        k, v: [context, num_kv_heads, head_dim], the query tokens' own included.
    """
    group = layer.num_heads // layer.num_kv_heads
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    logits = torch.einsum("qhd,khd->hqk", q, k) * layer.scale
    if layer.soft_cap is not None:
        logits = layer.soft_cap * torch.tanh(logits / layer.soft_cap)
    at_key = torch.arange(len(k))
    distance = at_key - at_key[len(k) - len(q) :, None]
    if layer.alibi:
        assert alibi_slopes is not None
        logits = logits + alibi_slopes[:, None, None] * distance
    hidden = (distance > 0) & layer.causal
    if layer.sliding_window is not None:
        hidden |= distance.abs() >= layer.sliding_window
    logits = logits.masked_fill(hidden, float("-inf"))
    if layer.sinks:
        assert sinks is not None
        extra = sinks[:, None, None].expand(-1, len(q), 1)
        weights = torch.cat((logits, extra), dim=-1).softmax(dim=-1)[..., :-1]
    else:
        weights = logits.softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, v)


class PlainAllocator(TensorAllocator):
    """Host memory of torch's own, with books; it never sleeps, and remembers every tensor by its address."""

    def __init__(self) -> None:
        self._books = Accounting()
        self._homes: dict[int, str] = {}

    def capabilities(self) -> MemoryCapabilities:
        return MemoryCapabilities()

    def empty(
        self,
        shape: Sequence[int],
        dtype: DType,
        tag: str = DEFAULT,
        policy: Policy = Policy.PRESERVE,
        max_rows: int | None = None,
    ) -> Tensor:
        home = np.zeros(prod(shape) * dtype.itemsize, np.uint8)
        tensor = torch.from_numpy(home).view(dtype.to_torch()).view(tuple(shape))
        self._books.add(tag, home.nbytes)
        weakref.finalize(home, self._books.remove, tag, home.nbytes)
        self._homes[tensor.untyped_storage().data_ptr()] = tag
        return tensor

    def pool(self, tag: str, policy: Policy = Policy.PRESERVE) -> Any:
        return nullcontext()

    def stats(self) -> MemoryStats:
        return self._books.stats()

    def memory_info(self) -> MemoryInfo:
        return MemoryInfo(1 << 34, 1 << 34)

    def close(self) -> None:
        pass

    def vendor_tag_of(self, tensor: Tensor) -> str | None:
        return self._homes.get(tensor.untyped_storage().data_ptr())


def step_batch(
    sequences: Sequence[tuple[Sequence[int], int]],
    block_tables: Sequence[Sequence[int]],
    block_size: int,
    max_blocks: int = 64,
) -> StepBatch:
    """Return a step for sequences of (new tokens, tokens computed before); decodes must come first.

    Args:
        block_tables: each sequence's blocks, enough for all its tokens.
    """
    tokens = [token for new, _ in sequences for token in new]
    positions = [done + index for new, done in sequences for index in range(len(new))]
    slots = [
        table[position // block_size] * block_size + position % block_size
        for (new, done), table in zip(sequences, block_tables, strict=True)
        for position in range(done, done + len(new))
    ]
    table = np.zeros((len(sequences), max_blocks), dtype=np.int32)
    for row, blocks in enumerate(block_tables):
        table[row, : len(blocks)] = blocks
    count = len(sequences)
    pairs = np.zeros((0, 2), dtype=np.int32)
    return StepBatch(
        token_ids=np.array(tokens, dtype=np.int64),
        positions=np.array(positions, dtype=np.int64),
        slot_mapping=np.array(slots, dtype=np.int32),
        query_start=np.cumsum([0, *(len(new) for new, _ in sequences)]).astype(np.int32),
        context_lens=np.array([done + len(new) for new, done in sequences], dtype=np.int32),
        block_table=table,
        rows=np.arange(count, dtype=np.int32),
        seq_ids=np.arange(count, dtype=np.int64),
        num_decodes=sum(1 for new, done in sequences if len(new) == 1 and done > 0),
        sample_rows=np.arange(count, dtype=np.int32),
        sample_seq_ids=np.arange(count, dtype=np.int64),
        swap_out=pairs,
        swap_in=pairs,
        copies=pairs,
        preempted=np.zeros(0, dtype=np.int64),
    )


def last_rows(batch: StepBatch) -> Tensor:
    """Return int32[R], the index of each sequence's last token in the step."""
    return torch.from_numpy(batch.query_start[1:] - 1).to(torch.int32)
