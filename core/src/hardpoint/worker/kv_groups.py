"""Which layers of a model share a block table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hardpoint.interfaces.attention import AttentionBackend, KVCacheGroup, Refusal
from hardpoint.interfaces.capabilities import AttentionLayer, AttentionRequest

MAX_GROUPS = 8
"""Most groups of one model: each has a block table, and metadata of its own in every step."""


def plan_groups(
    attention: AttentionBackend, request: AttentionRequest, *, divides: bool
) -> tuple[KVCacheGroup, ...] | Refusal:
    """Return the KV cache groups of a model's layers, or why its attention cannot be served.

    Args:
        request: of all layers.
        divides: False for one group that keeps all keys. Layers without a cache are one group in any case.
    """
    plan = attention.plan(request)
    if isinstance(plan, Refusal):
        return plan
    if not divides or request.bidirectional:
        return KVCacheGroup.whole(plan)
    found = group_layers(request.layers, request.max_context, plan.block_size)
    if len(found) == 1:
        return (replace(KVCacheGroup.whole(plan)[0], window=found[0][1]),)
    groups = []
    for number, (layers, window) in enumerate(found):
        own = tuple(request.layers[layer] for layer in layers)
        plan = attention.plan(replace(request, layers=own, block_size=plan.block_size, kv_group=number))
        if isinstance(plan, Refusal):
            return plan
        groups.append(KVCacheGroup(layers, plan, window))
    return tuple(groups)


def group_layers(
    layers: Sequence[AttentionLayer], max_context: int, block_size: int
) -> list[tuple[tuple[int, ...], int]]:
    """Return groups of equally many layers, as their numbers and their window (0: all keys), the largest window first.

    Of all sizes of a group the one is chosen with which the longest sequence takes the fewest bytes, and one group where none saves
    anything. The last group of a window may have fewer layers; what is left of its blocks is unused.
    """
    kinds: dict[int, list[int]] = {}
    for number, layer in enumerate(layers):
        window = layer.sliding_window or 0
        kinds.setdefault(window if window < max_context else 0, []).append(number)
    ordered = sorted(kinds.items(), key=lambda kind: kind[0] or max_context, reverse=True)
    longest = -(-max_context // block_size)

    def held(window: int) -> int:
        return min(longest, -(-window // block_size) + 2) if window else longest

    best, least = [(tuple(range(len(layers))), ordered[0][0])], len(layers) * held(ordered[0][0])
    for size in range(len(ordered[0][1]), 0, -1):
        groups = [
            (tuple(numbers[first : first + size]), window)
            for window, numbers in ordered
            for first in range(0, len(numbers), size)
        ]
        taken = sum(size * held(window) for _, window in groups)
        if len(groups) <= MAX_GROUPS and taken < least:
            best, least = groups, taken
    return best
