"""Which layers of a model share a block table, and steps of layers that attend in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from hardpoint.interfaces.attention import AttentionBackend, KVCacheGroup, Refusal
from hardpoint.interfaces.batch import StepBatch
from hardpoint.interfaces.capabilities import AttentionLayer, AttentionRequest

MAX_GROUPS = 8
"""Most groups of one model: each has a block table, and metadata of its own in every step."""


class LayerGroup(NamedTuple):
    """Layers that share a block table: their numbers, and what their queries see; see `KVCacheGroup`."""

    layers: tuple[int, ...]
    window: int = 0
    chunk: int = 0


def plan_groups(
    attention: AttentionBackend, request: AttentionRequest, *, divides: bool
) -> tuple[KVCacheGroup, ...] | Refusal:
    """Return the KV cache groups of a model's layers, or why its attention cannot be served.

    Args:
        request: of all layers.
        divides: False for one group that keeps all keys. Layers without a cache are one group in any case.
    """
    asked, request = request, replace(request, layers=tuple(replace(layer, chunk=None) for layer in request.layers))
    plan = attention.plan(request)
    if isinstance(plan, Refusal):
        return plan
    if request.bidirectional:
        return KVCacheGroup.whole(plan)
    found = group_layers(asked.layers, request.max_context, plan.block_size)
    chunks = {group.chunk for group in found}
    obstacle = _obstacle(chunks, plan.block_size, divides)
    if obstacle is not None:
        return Refusal((obstacle,))
    if not divides:
        return KVCacheGroup.whole(plan)
    if len(found) == 1:
        return (replace(KVCacheGroup.whole(plan)[0], window=found[0].window, chunk=found[0].chunk),)
    groups = []
    for number, group in enumerate(found):
        own = tuple(request.layers[layer] for layer in group.layers)
        plan = attention.plan(replace(request, layers=own, block_size=plan.block_size, kv_group=number))
        if isinstance(plan, Refusal):
            return plan
        groups.append(KVCacheGroup(group.layers, plan, group.window, group.chunk))
    return tuple(groups)


def _obstacle(chunks: set[int], block_size: int, divides: bool) -> str | None:
    """Return why layers cannot attend in these chunks, or None."""
    if any(chunks) and not divides:
        return "layers that attend in chunks need KV cache groups, and this engine keeps one block table for all layers"
    if any(chunk % block_size for chunk in chunks):
        return f"chunks of {max(chunks)} positions do not consist of whole blocks of {block_size}"
    return None


def group_layers(layers: Sequence[AttentionLayer], max_context: int, block_size: int) -> list[LayerGroup]:
    """Return groups of equally many layers, the largest window first.

    Of all sizes of a group the one is chosen with which the longest sequence takes the fewest bytes, and one group where none saves
    anything and no layers attend in other chunks than others. The last group of a window may have fewer layers; what is left of its
    blocks is unused.
    """
    kinds: dict[tuple[int, int], list[int]] = {}
    for number, layer in enumerate(layers):
        chunk = layer.chunk or 0
        chunk = chunk if chunk < max_context else 0
        # A layer that attends in chunks sees one chunk at most, at the chunk's last position.
        window = chunk or layer.sliding_window or 0
        kinds.setdefault((window if window < max_context else 0, chunk), []).append(number)
    ordered = sorted(kinds.items(), key=lambda kind: kind[0][0] or max_context, reverse=True)
    longest = -(-max_context // block_size)

    def held(window: int) -> int:
        return min(longest, -(-window // block_size) + 2) if window else longest

    (widest, chunk), _ = ordered[0]
    best, least = [LayerGroup(tuple(range(len(layers))), widest, chunk)], float(len(layers) * held(widest))
    if len({chunk for _, chunk in kinds}) > 1:
        least = float("inf")
    for size in range(len(ordered[0][1]), 0, -1):
        groups = [
            LayerGroup(tuple(numbers[first : first + size]), window, chunk)
            for (window, chunk), numbers in ordered
            for first in range(0, len(numbers), size)
        ]
        taken = sum(size * held(group.window) for group in groups)
        if len(groups) <= MAX_GROUPS and taken < least:
            best, least = groups, taken
    return best


def in_chunks(batch: StepBatch, chunk: int, block_size: int) -> StepBatch:
    """Return a step as layers see it that attend in chunks: a sequence for each chunk that has tokens in the step.

    Args:
        chunk: positions of a chunk, a multiple of the block size.
    """
    if not chunk:
        return batch
    ends = batch.context_lens.astype(np.int64)
    begins = ends - np.diff(batch.query_start)
    first, last = begins // chunk, (ends - 1) // chunk
    counts = np.maximum(last - first + 1, 0)
    owners = np.repeat(np.arange(len(ends)), counts)
    numbers = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts) + first[owners]
    starts = numbers * chunk
    own_ends = np.minimum(ends[owners], starts + chunk)
    lengths = own_ends - np.maximum(begins[owners], starts)
    blocks = starts[:, None] // block_size + np.arange(min(chunk // block_size, batch.block_table.shape[1]))
    table = batch.block_table[batch.rows[owners][:, None], np.minimum(blocks, batch.block_table.shape[1] - 1)]
    return replace(
        batch,
        positions=batch.positions % chunk,
        query_start=np.concatenate(([0], np.cumsum(lengths))).astype(np.int32),
        context_lens=(own_ends - starts).astype(np.int32),
        block_table=np.ascontiguousarray(table),
        rows=np.arange(len(owners), dtype=np.int32),
        seq_ids=batch.seq_ids[owners],
    )
