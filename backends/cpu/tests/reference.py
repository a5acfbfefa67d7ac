"""Paged attention by its definition, in torch: the oracle (float64) and a plain low-precision implementation beside it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from hardpoint.interfaces import AttentionPlan, Device
from hardpoint.interfaces.batch import StepBatch
from hardpoint.interfaces.capabilities import AttentionLayer, AttentionRequest
from hardpoint.interfaces.dtypes import DType
from hardpoint_cpu.attention import CpuAttention

DEVICE = Device(backend="cpu", index=0, name="test", torch_device="cpu", total_memory=1 << 30, driver_version="test")


@dataclass
class Case:
    """A batch with its cache, and everything that attention over it needs.

    Attributes:
        lens: (query length, context length) of each sequence.
        keys, values: of each sequence, [context, kv_heads, head_dim]; in e4m3 times the layer's scales where the cache is that.
        kv_cache: [2, blocks, kv_heads, block_size, head_dim]; all that no sequence owns is NaN.
    """

    layer: AttentionLayer
    lens: list[tuple[int, int]]
    plan: AttentionPlan
    batch: StepBatch
    q: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    kv_cache: Tensor
    sinks: Tensor | None
    alibi: Tensor | None
    backend: CpuAttention

    def run(self) -> Tensor:
        """Return the backend's output; rows that it does not write stay NaN."""
        out = torch.full_like(self.q, float("nan"))
        step = self.backend.prepare(self.plan, self.batch)
        self.backend.forward(0, self.q, self.q, self.q, self.kv_cache, step, out, self.sinks, self.alibi)
        return out

    def expected(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """Return the output by definition, computed in `dtype` throughout."""
        rows = []
        for i, (query_len, _) in enumerate(self.lens):
            start = int(self.batch.query_start[i])
            rows.append(self._sequence(self.q[start : start + query_len], self.keys[i], self.values[i], dtype))
        return torch.cat(rows)

    @cached_property
    def judgement(self) -> tuple[Tensor, float, float]:
        """The exact output, the greatest error that is allowed, and that of plain torch in the same dtype; found once.

        The allowed one is twice that of plain torch, plus a few roundings: those of the output, and those of a logit in float32, whose
        absolute error is a relative one of its weight; plain torch may happen to have none of either in a small case.
        """
        exact, dtype = self.expected(), self.q.dtype
        plain = (self.expected(dtype).double() - exact).abs().max().item()
        longest_key = max(k.double().norm(dim=-1).max().item() for k in self.keys)
        largest_logit = self.q.double().norm(dim=-1).max().item() * longest_key * self.layer.scale
        roundings = 4 * OUTPUT_ROUNDING[dtype] + largest_logit * OUTPUT_ROUNDING[torch.float32]
        return exact, 2 * plain + roundings * exact.abs().max().item(), plain

    def _sequence(self, q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype) -> Tensor:
        layer, n, m = self.layer, len(k), len(q)
        group = layer.num_heads // layer.num_kv_heads
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        logits = torch.einsum("qhd,khd->hqk", q, k) * layer.scale
        if layer.soft_cap is not None:
            logits = layer.soft_cap * torch.tanh(logits / layer.soft_cap)
        distance = torch.arange(n)[None, :] - torch.arange(n - m, n)[:, None]
        if self.alibi is not None:
            logits = logits + self.alibi.to(dtype)[:, None, None] * distance.to(dtype)
        visible = distance <= 0
        if layer.sliding_window is not None:
            visible &= distance > -layer.sliding_window
        logits = logits.masked_fill(~visible, float("-inf"))
        if self.sinks is not None:
            column = self.sinks.to(dtype)[:, None, None].expand(-1, m, 1)
            logits = torch.cat([logits, column], -1)
        weights = torch.softmax(logits, -1)[..., :n]
        return torch.einsum("hqk,khd->qhd", weights, v)


def make_case(
    lens: list[tuple[int, int]],
    *,
    dtype: torch.dtype = torch.float32,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    block_size: int = 16,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: bool = False,
    alibi: bool = False,
    narrow: bool = False,
    seed: int = 0,
    spare_blocks: int = 3,
) -> Case:
    """Build a case with random contents, scattered blocks, and NaN wherever no sequence has a token; `narrow` for a cache in e4m3."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    layer = AttentionLayer(num_heads, num_kv_heads, head_dim, head_dim**-0.5, window, soft_cap, sinks, alibi)
    kind = kv_kind = DType.of(dtype)
    if narrow:
        layer, kv_kind = replace(layer, k_scale=0.25, v_scale=2.0), DType.FLOAT8_E4M3
    kv_dtype = kv_kind.to_torch()
    max_context = max(context for _, context in lens)
    backend = CpuAttention(DEVICE)
    plan = backend.plan(AttentionRequest((layer,), kind, kv_kind, block_size, max_context))
    assert isinstance(plan, AttentionPlan), plan

    blocks = [-(-context // block_size) for _, context in lens]
    total = sum(blocks) + spare_blocks
    order = torch.randperm(total, generator=generator).tolist()
    kv_cache = torch.full((2, total, num_kv_heads, block_size, head_dim), float("nan")).to(kv_dtype)
    rows = torch.randperm(len(lens) + 1, generator=generator)[: len(lens)].numpy().astype(np.int32)
    table = np.full((len(lens) + 1, max(blocks) + 2), -1, dtype=np.int32)
    keys, values, slots, positions = [], [], [], []
    for (query_len, context), count, row in zip(lens, blocks, rows, strict=True):
        owned = [order.pop() for _ in range(count)]
        table[row, :count] = owned
        k, v = (random(context, num_kv_heads, head_dim).to(dtype).to(kv_dtype) for _ in "kv")
        position = torch.arange(context)
        block, offset = torch.tensor(owned)[position // block_size], position % block_size
        kv_cache[0, block, :, offset] = k
        kv_cache[1, block, :, offset] = v
        keys.append(k.to(dtype) * layer.k_scale)
        values.append(v.to(dtype) * layer.v_scale)
        new = range(context - query_len, context)
        positions.extend(new)
        slots.extend(owned[p // block_size] * block_size + p % block_size for p in new)
    query_start = np.cumsum([0] + [m for m, _ in lens]).astype(np.int32)
    tokens = int(query_start[-1])
    nothing = np.zeros((0, 2), dtype=np.int32)
    batch = StepBatch(
        token_ids=np.zeros(tokens, dtype=np.int64),
        positions=np.array(positions, dtype=np.int64),
        slot_mapping=np.array(slots, dtype=np.int32),
        query_start=query_start,
        context_lens=np.array([n for _, n in lens], dtype=np.int32),
        block_table=table,
        rows=rows,
        seq_ids=np.arange(len(lens), dtype=np.int64),
        num_decodes=sum(m == 1 for m, _ in lens),
        sample_rows=np.arange(len(lens), dtype=np.int32),
        sample_seq_ids=np.arange(len(lens), dtype=np.int64),
        swap_out=nothing,
        swap_in=nothing,
        copies=nothing,
        preempted=np.zeros(0, dtype=np.int64),
    )
    # Queries larger than the keys make the softmax peaky, so that a wrong mask or scale shows.
    return Case(
        layer,
        lens,
        plan,
        batch,
        (2 * random(tokens, num_heads, head_dim)).to(dtype),
        keys,
        values,
        kv_cache,
        random(num_heads) + 1 if sinks else None,
        2.0 ** -torch.arange(1, num_heads + 1, dtype=torch.float32) if alibi else None,
        backend,
    )


def with_blocks_moved(case: Case, seed: int = 1) -> Case:
    """Return the same case with its blocks at other places of the cache."""
    total, block_size = case.kv_cache.shape[1], case.kv_cache.shape[3]
    moved_to = torch.randperm(total, generator=torch.Generator().manual_seed(seed))
    cache = torch.empty_like(case.kv_cache)
    cache[:, moved_to] = case.kv_cache
    target = moved_to.numpy().astype(np.int32)
    table = np.where(case.batch.block_table < 0, -1, target[np.maximum(case.batch.block_table, 0)]).astype(np.int32)
    slots = case.batch.slot_mapping
    new_slots = target[slots // block_size] * block_size + slots % block_size
    return replace(
        case, kv_cache=cache, batch=replace(case.batch, block_table=table, slot_mapping=new_slots.astype(np.int32))
    )


# Error that rounding the output alone makes, relative to the size of the values.
OUTPUT_ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}


def assert_accurate(case: Case, out: Tensor) -> None:
    """Compare with the oracle, within the error that the case allows."""
    assert out.dtype is case.q.dtype
    exact, bound, plain = case.judgement
    error = (out.double() - exact).abs().max().item()
    assert error <= bound, f"error {error:.3g} exceeds {bound:.3g}; plain torch in {out.dtype} has {plain:.3g}"
