"""Paged attention in plain torch, in steps that a fault can replace one by one.

It is correct as it stands, and slow: it goes through a batch sequence by sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hardpoint.interfaces import AttentionLayer, AttentionPlan, StepBatch
from hardpoint_conformance.mutants.derived import Methods


@dataclass(frozen=True)
class PlainStep:
    """One step's batch, copied; and the plan."""

    plan: AttentionPlan
    query_start: list[int]
    context_lens: list[int]
    tables: list[list[int]]
    slots: list[int]
    num_decodes: int

    @classmethod
    def of(cls, plan: AttentionPlan, batch: StepBatch) -> PlainStep:
        """Copy a batch."""
        return cls(
            plan,
            batch.query_start.tolist(),
            batch.context_lens.tolist(),
            batch.block_table[batch.rows].tolist(),
            batch.slot_mapping.tolist(),
            batch.num_decodes,
        )


class PlainAttention:
    """The computation. Keys and values are views [block, token, head, dim] of the cache."""

    def start(self, step: PlainStep) -> None:
        """Begin with a layer of a step."""

    def slot(self, slot: int, block_size: int) -> int:
        """Return where a token's key and value go; negative for nowhere."""
        return slot

    def context(self, step: PlainStep, index: int) -> int:
        """Return how many keys sequence `index` has."""
        return step.context_lens[index]

    def blocks(self, step: PlainStep, index: int, count: int) -> list[int]:
        """Return the first `count` blocks of sequence `index`."""
        return step.tables[index][:count]

    def gather(self, pages: Tensor, step: PlainStep, index: int, length: int) -> Tensor:
        """Return the first `length` keys or values of a sequence, float32[length, kv_heads, dim]."""
        count = -(-length // step.plan.block_size)
        found = pages[torch.tensor(self.blocks(step, index, count), dtype=torch.long)]
        return found.flatten(0, 1)[:length].float()

    def kv_heads(self, layer: AttentionLayer) -> Tensor:
        """Return the KV head of each query head."""
        return torch.arange(layer.num_heads) // (layer.num_heads // layer.num_kv_heads)

    def visible(self, distance: Tensor, layer: AttentionLayer) -> Tensor:
        """Return which keys a query sees, from key position - query position, int64[queries, keys]."""
        shown = (distance <= 0) | (not layer.causal)
        return shown if layer.sliding_window is None else shown & (distance.abs() < layer.sliding_window)

    def masked(self, logits: Tensor, distance: Tensor, layer: AttentionLayer) -> Tensor:
        """Return logits [heads, queries, keys] with the soft cap, and -inf for what is not seen."""
        if layer.soft_cap is not None:
            logits = layer.soft_cap * torch.tanh(logits / layer.soft_cap)
        return logits.masked_fill(~self.visible(distance, layer), -torch.inf)

    def weights(self, logits: Tensor, sinks: Tensor | None) -> Tensor:
        """Return the softmax over keys; a sink takes its share and gives nothing."""
        if sinks is None:
            return torch.softmax(logits, -1)
        extra = sinks.float()[:, None, None].expand(-1, logits.shape[1], 1)
        return torch.softmax(torch.cat([logits, extra], -1), -1)[..., :-1]

    def mix(self, weights: Tensor, values: Tensor) -> Tensor:
        """Return the weighted sum of values [keys, heads, dim], [queries, heads, dim]."""
        return torch.einsum("hqk,khd->qhd", weights, values)

    def write(self, step: PlainStep, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write a step's keys and values, in the cache's units, to their slots."""
        size = step.plan.block_size
        slots = torch.tensor([self.slot(wanted, size) for wanted in step.slots], dtype=torch.long)
        written = slots >= 0
        block, offset = slots[written] // size, slots[written] % size
        keys[block, offset], values[block, offset] = k[written].to(keys.dtype), v[written].to(values.dtype)

    def freed(self, step: PlainStep, layer: AttentionLayer, query: int) -> int:
        """Return how many tokens are in blocks that no query from this position on sees."""
        size, window = step.plan.block_size, layer.sliding_window
        return 0 if window is None else max(query - window + 1, 0) // size * size

    def span(self, step: PlainStep, index: int) -> slice:
        """Return the step's tokens whose keys a sequence sees that has no cache."""
        return slice(step.query_start[index], step.query_start[index + 1])

    def forward_whole(
        self, step: PlainStep, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sinks: Tensor | None
    ) -> None:
        """Compute the attention of whole sequences over the step's own keys and values into `out`."""
        heads = self.kv_heads(layer)
        for index in range(len(step.context_lens)):
            rows, seen = slice(step.query_start[index], step.query_start[index + 1]), self.span(step, index)
            distance = torch.arange(seen.start, seen.stop) - torch.arange(rows.start, rows.stop)[:, None]
            logits = torch.einsum("qhd,khd->hqk", q[rows].float() * layer.scale, k[seen].float()[:, heads])
            weights = self.weights(self.masked(logits, distance, layer), sinks)
            out[rows] = self.mix(weights, v[seen].float()[:, heads]).to(out.dtype)

    def forward(
        self,
        step: PlainStep,
        layer: AttentionLayer,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        out: Tensor,
        sinks: Tensor | None,
        slopes: Tensor | None,
    ) -> None:
        """Compute one layer's attention into `out`."""
        self.start(step)
        heads = self.kv_heads(layer)
        for index, total in enumerate(step.context_lens):
            rows = slice(step.query_start[index], step.query_start[index + 1])
            count = rows.stop - rows.start
            if count == 0:
                continue
            length = self.context(step, index)
            k = layer.k_scale * self.gather(keys, step, index, length)[:, heads]
            v = layer.v_scale * self.gather(values, step, index, length)[:, heads]
            # A weight of zero times NaN would be NaN.
            v[: self.freed(step, layer, total - count)] = 0
            distance = torch.arange(len(k)) - torch.arange(total - count, total)[:, None]
            logits = torch.einsum("qhd,khd->hqk", q[rows].float() * layer.scale, k)
            logits = self.masked(logits, distance, layer)
            if slopes is not None:
                logits = logits + slopes[:, None, None] * distance
            out[rows] = self.mix(self.weights(logits, sinks), v).to(out.dtype)


def plain(kernel: Callable[[], PlainAttention]) -> Methods:
    """Return the methods of an attention backend that computes by such a kernel."""
    made = kernel()

    def prepare(self: Any, plan: AttentionPlan, batch: StepBatch) -> PlainStep:
        return PlainStep.of(plan, batch)

    def write_kv(self: Any, layer: int, k: Tensor, v: Tensor, kv_cache: Tensor, metadata: PlainStep) -> None:
        numbers = metadata.plan.request.layers[layer]
        if (numbers.k_scale, numbers.v_scale) != (1.0, 1.0):
            k, v = k.float() / numbers.k_scale, v.float() / numbers.v_scale
        made.write(metadata, k, v, *_pages(kv_cache, metadata))

    def forward(
        self: Any,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kv_cache: Tensor,
        metadata: PlainStep,
        out: Tensor,
        sinks: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
    ) -> None:
        numbers = metadata.plan.request.layers[layer]
        if not numbers.causal:
            made.forward_whole(metadata, numbers, q, k, v, out, sinks)
            return
        made.forward(metadata, numbers, q, *_pages(kv_cache, metadata), out, sinks, alibi_slopes)

    return {"prepare": prepare, "write_kv": write_kv, "forward": forward}


def _pages(kv_cache: Tensor, step: PlainStep) -> tuple[Tensor, Tensor]:
    axes = step.plan.kv_cache.axes
    order = [axes.index(name) for name in ("kv", "block", "token", "head", "dim")]
    keys, values = kv_cache.permute(order).unbind(0)
    return keys, values
