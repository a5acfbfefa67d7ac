"""How a step's work is divided: every key and every row exactly once, by a sequence's own length."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hardpoint.triton.work import SplitRule, decode_items, prefill_items

RULES = st.builds(
    SplitRule, st.sampled_from([16, 32, 64, 128]), st.integers(1, 16), st.sampled_from([1, 2, 8, 16, 32, 64])
)
CONTEXTS = st.lists(st.integers(0, 300_000), max_size=12).map(lambda some: np.array(some, np.int32))


@given(RULES, CONTEXTS, st.none() | st.integers(1, 5000))
def test_splits_cover_what_is_visible_and_stay_within_their_limits(
    rule: SplitRule, contexts: np.ndarray, window: int | None
) -> None:
    for context, splits in zip(contexts.tolist(), rule.splits(contexts, window).tolist(), strict=True):
        first = max(0, context - (window or context)) // rule.block_n
        tiles = -(-context // rule.block_n) - first
        length = max(-(-tiles // rule.max_splits), rule.min_tiles)
        assert 0 <= splits <= rule.max_splits
        assert (splits - 1) * length < tiles <= splits * length or splits == tiles == 0


@given(RULES, CONTEXTS)
def test_splits_of_a_sequence_do_not_depend_on_the_others(rule: SplitRule, contexts: np.ndarray) -> None:
    alone = [int(rule.splits(contexts[i : i + 1])[0]) for i in range(len(contexts))]
    assert rule.splits(contexts).tolist() == alone


@given(RULES, CONTEXTS, st.none() | st.integers(1, 5000), st.integers(0, 100_000))
def test_room_is_reserved_for_the_most_splits(
    rule: SplitRule, contexts: np.ndarray, window: int | None, more: int
) -> None:
    longest = int(contexts.max(initial=1)) + more
    assert rule.splits(contexts, window).max(initial=0) <= rule.most(longest)


@given(st.lists(st.integers(0, 9), max_size=9))
def test_decode_items_name_each_part_once(splits: list[int]) -> None:
    items = decode_items(np.array(splits, np.int32))
    assert items.tolist() == [[seq, part] for seq, count in enumerate(splits) for part in range(count)]
    assert items.dtype == np.int32


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300)), max_size=8), st.integers(1, 9), st.integers(0, 5))
def test_prefill_items_cover_each_row_once_and_begin_with_the_longest(
    sequences: list[tuple[int, int]], group: int, first: int
) -> None:
    queries = np.array([q for q, _ in sequences], np.int32)
    before = np.array([c for _, c in sequences], np.int32)
    items = prefill_items(queries, queries + before, group, 16, first)
    wanted = {(first + seq, tile) for seq, q in enumerate(queries.tolist()) for tile in range(-(-q * group // 16))}
    assert len(items) == len(wanted)
    assert set(map(tuple, items.tolist())) == wanted
    keys = [int(before[seq - first]) + tile * 16 // group for seq, tile in items.tolist()]
    assert keys == sorted(keys, reverse=True)
