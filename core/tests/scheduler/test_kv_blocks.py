"""Behaviours of the block manager and its prefix cache, as the scheduler's requests see them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hardpoint.interfaces.errors import InvalidRequest
from hardpoint.scheduler import Scheduler, SchedulerConfig

NEW = 63
"""A token that no prompt here contains."""


def scheduler(device: int = 16, **options: Any) -> Scheduler:
    defaults: dict[str, Any] = {
        "block_size": 4,
        "num_device_blocks": device,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_model_len": 64,
        "watermark": 0.0,
    }
    return Scheduler(SchedulerConfig(**{**defaults, **options}))


def step(s: Scheduler, token: int = NEW) -> Any:
    batch = s.schedule()
    assert batch is not None
    s.update(np.full(len(batch.sample_rows), token, np.int64))
    s.check()
    return batch


def run(s: Scheduler, tokens: list[int], **options: Any) -> int:
    """Serve one request alone, for one new token, and return how many tokens of its prompt were cached."""
    handle = s.add_request(tokens, **{"max_tokens": 1, **options})
    while s.finish_reason(handle) is None:
        step(s)
    return s.num_cached_tokens(handle)


# Pools


def test_sequences_take_the_blocks_that_their_tokens_need() -> None:
    s = scheduler()
    s.add_request(list(range(8)), max_tokens=9)
    used = []
    for _ in range(6):
        step(s)
        used.append(s.block_stats.device_used)
    assert used == [2, 3, 3, 3, 3, 4]
    assert s.block_stats.device_free == 16 - 4


def test_the_watermark_is_kept_free_unless_all_blocks_are_free() -> None:
    s = scheduler(10, watermark=0.2, enable_prefix_caching=False)
    first = s.add_request([1, 2, 3], max_tokens=2)
    fits, waits = s.add_request([4] * 28, max_tokens=1), s.add_request([5] * 4, max_tokens=1)
    assert step(s).seq_ids.tolist() == [first, fits]
    assert step(s).seq_ids.tolist() == [first, waits]
    whole = s.add_request([6] * 40, max_tokens=1, pooling=True)
    assert step(s).seq_ids.tolist() == [whole]


def test_the_watermark_does_not_hold_back_growth() -> None:
    s = scheduler(2, watermark=0.9)
    s.add_request([1, 2, 3, 4], max_tokens=4)
    step(s)
    step(s)
    assert s.block_stats.device_free == 0


# Forks


def test_a_fork_at_a_block_boundary_copies_nothing() -> None:
    s = scheduler()
    s.add_request(list(range(8)), n=2, max_tokens=3)
    step(s)
    batch = step(s)
    assert len(batch.copies) == 0
    tables = batch.block_table[batch.rows].tolist()
    assert tables[0][:2] == tables[1][:2]
    assert tables[0][2] != tables[1][2]


def test_the_last_owner_of_a_shared_block_writes_in_place() -> None:
    s = scheduler()
    s.add_request(list(range(6)), n=2, max_tokens=3)
    before = step(s).block_table[0][:2].tolist()
    batch = step(s)
    ((source, destination),) = batch.copies.tolist()
    assert source == before[1]
    assert sorted(batch.block_table[batch.rows][:, 1].tolist()) == sorted([source, destination])


# The prefix cache


def test_a_hit_needs_equal_tokens_and_an_equal_prefix() -> None:
    s = scheduler()
    assert run(s, [1, 1, 1, 1, 2, 2, 2, 2, 3]) == 0
    assert run(s, [1, 1, 1, 1, 2, 2, 2, 2, 4]) == 8
    assert run(s, [1, 1, 1, 9, 2, 2, 2, 2, 4]) == 0
    assert run(s, [2, 2, 2, 2, 1]) == 0


def test_one_token_is_always_left_to_compute() -> None:
    s = scheduler()
    assert run(s, list(range(8))) == 0
    assert run(s, list(range(8))) == 4


def test_blocks_computed_twice_are_kept_once() -> None:
    s = scheduler()
    for _ in range(2):
        s.add_request(list(range(8)), max_tokens=2)
    assert step(s).num_tokens == 16
    assert s.block_stats.device_used == 2


def test_only_computed_blocks_are_hit() -> None:
    s = scheduler(long_prefill_token_threshold=6)
    s.add_request(list(range(16)), max_tokens=1)
    step(s)
    second = s.add_request(list(range(16)), max_tokens=1)
    step(s)
    assert s.num_cached_tokens(second) == 4


def test_a_salt_that_was_forgotten_hits_nothing_old() -> None:
    s = scheduler(4)
    run(s, list(range(9)), salt="a")
    run(s, list(range(40, 56)), pooling=True)
    assert run(s, list(range(9)), salt="a") == 0


@pytest.mark.parametrize("hash_bits", [0, 1, 4])
def test_colliding_hashes_never_hit_falsely(hash_bits: int) -> None:
    s = scheduler(512, hash_bits=hash_bits)
    prefixes = set()
    for prompt in ([a, b, a, b, b, b, a, a, c] for a in range(8) for b in range(8) for c in range(2)):
        known = [n for n in (4, 8) if tuple(prompt[:n]) in prefixes]
        assert run(s, prompt) == max(known, default=0)
        prefixes |= {tuple(prompt[:4]), tuple(prompt[:8])}


def test_freed_blocks_stay_cached_until_they_are_needed() -> None:
    s = scheduler(4)
    run(s, list(range(9)))
    assert (s.block_stats.device_free, s.block_stats.cached) == (4, 2)
    assert run(s, list(range(9))) == 8
    assert s.block_stats.evictions == 0


def test_eviction_takes_the_least_recently_used_and_tails_before_heads() -> None:
    s = scheduler(6)
    run(s, [1] * 12, pooling=True)
    run(s, [2] * 12, pooling=True)
    run(s, [3] * 5)
    assert s.block_stats.evictions == 2
    assert run(s, [1] * 13) == 4
    assert s.block_stats.evictions == 4
    assert run(s, [2] * 13) == 4


def test_a_hit_makes_blocks_recently_used() -> None:
    s = scheduler(5)
    run(s, [1] * 8, pooling=True)
    run(s, [2] * 8, pooling=True)
    assert run(s, [1] * 9) == 8
    run(s, [4] * 12, pooling=True)
    assert run(s, [1] * 9) == 8


def test_without_prefix_caching_nothing_is_reused() -> None:
    s = scheduler(enable_prefix_caching=False)
    run(s, list(range(9)))
    assert run(s, list(range(9))) == 0
    assert s.block_stats.cached == 0


def test_statistics_count_tokens_of_lookups_and_hits() -> None:
    s = scheduler()
    run(s, list(range(9)))
    run(s, list(range(9)))
    run(s, list(range(9)), max_cached_tokens=0)
    assert s.block_stats.queried_tokens == 18
    assert s.block_stats.hit_tokens == 8


# Groups with windows


def held(s: Scheduler) -> int:
    return s.block_stats.device_used


def test_a_group_with_a_window_gives_back_what_no_query_sees() -> None:
    s = scheduler(100, group_windows=(0, 8))
    s.add_request(list(range(10, 42)), max_tokens=32)
    for computed in range(32, 60):
        step(s)
        # The sampled token is not computed yet: of 8 keys it sees 7, which lie in 2 or 3 blocks of 4.
        full, first = -(-computed // 4), (computed - 7) // 4
        assert held(s) - 2 * full + first in (0, 1)


def test_a_hit_needs_the_blocks_of_the_window_alone() -> None:
    s = scheduler(40, group_windows=(0, 8))
    prompt = list(range(10, 50))
    run(s, prompt)
    assert held(s) == 0
    handle = s.add_request([*prompt, 1, 2], max_tokens=1)
    step(s)
    assert s.num_cached_tokens(handle) == 40


def test_a_hit_ends_where_a_window_is_not_cached() -> None:
    s = scheduler(26, group_windows=(0, 8))
    prompt = list(range(10, 50))
    s.add_request(prompt, max_tokens=20)
    for _ in range(8):
        step(s)
    # The first blocks of the group with a window are the first to be evicted; a prompt that ends with them computes all.
    run(s, list(range(100, 128)))
    again = s.add_request([*prompt[:8], 1, 2, 3, 4, 5], max_tokens=1)
    step(s)
    s.check()
    assert s.num_cached_tokens(again) < 8


def test_more_sequences_fit_than_with_one_group() -> None:
    def preemptions(windows: tuple[int, ...], num_blocks: int) -> int:
        s = scheduler(num_blocks, group_windows=windows)
        for first in range(5):
            s.add_request([first] * 4, max_tokens=44)
        while s.has_unfinished():
            step(s)
        return s.stats.preemptions_by_recompute

    # Of four layers two have a window: as one group, blocks of four layers; as two groups, twice as many of two layers.
    assert preemptions((0,), 48) > 0
    assert preemptions((0, 8), 96) == 0


# Against a model


@dataclass
class PlainCache:
    """The prefix cache of requests that are served one after another, written plainly."""

    block_size: int
    num_blocks: int
    cached: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    """Salt and tokens up to the end of each cached block, the next one to be evicted first."""
    evictions: int = 0

    def serve(self, prompt: list[int], output: list[int], salt: str, skips: bool) -> int:
        size, tokens = self.block_size, prompt + output[:-1]  # the last token is sampled and not computed
        keys = [(salt, tuple(tokens[:end])) for end in range(size, len(tokens) + 1, size)]
        hits = 0
        if not skips:
            while hits < (len(prompt) - 1) // size and keys[hits] in self.cached:
                hits += 1
        self.cached = [key for key in self.cached if key not in keys[:hits]]
        held = registered = hits
        for computed in range(len(prompt), len(tokens) + 1):
            while held * size < computed:
                held += 1
                if held + len(self.cached) > self.num_blocks:
                    self.cached.pop(0)
                    self.evictions += 1
            for key in keys[registered : computed // size]:
                if key in self.cached:  # computed again: the cached block is taken, and the new one given back
                    self.cached.remove(key)
            registered = computed // size
        self.cached += reversed(keys)
        return hits * size


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_hits_and_evictions_are_those_of_a_plain_cache(data: st.DataObject) -> None:
    block_size, num_blocks = data.draw(st.integers(1, 4)), data.draw(st.integers(4, 14))
    longest = min(block_size * num_blocks - 1, 16)
    s = scheduler(
        num_blocks, block_size=block_size, max_num_seqs=1, hash_bits=data.draw(st.sampled_from([0, 1, 3, 64]))
    )
    model = PlainCache(block_size, num_blocks)
    for _ in range(data.draw(st.integers(1, 20))):
        prompt = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=longest))
        output = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=4))[: block_size * num_blocks - len(prompt)]
        salt, skips = data.draw(st.sampled_from(["", "", "a"])), data.draw(st.booleans())
        handle = s.add_request(prompt, max_tokens=len(output), salt=salt, max_cached_tokens=0 if skips else None)
        for token in output:
            step(s, token)
        assert s.finish_reason(handle) is not None
        assert s.num_cached_tokens(handle) == model.serve(prompt, output, salt, skips)
        assert s.block_stats.evictions == model.evictions
        assert s.block_stats.cached == len(model.cached)


# Tiers below the prefix cache


class PlainTiers:
    """What is where, of prompts of one block that are served one by one by a device which keeps the last one only."""

    def __init__(self, num_host: int, num_disk: int) -> None:
        self.num_host, self.num_disk = num_host, num_disk
        self.on_device: int | None = None
        # Least recently used first.
        self.host: list[int] = []
        self.disk: list[int] = []

    def serve(self, prompt: int) -> bool:
        """Return whether the prompt's block is found."""
        if prompt == self.on_device:
            return True
        found = self.host if prompt in self.host else self.disk if prompt in self.disk else None
        if self.on_device is not None:
            self._evict(self.on_device, keeps=prompt)
        self.on_device = prompt
        if found is not None:
            found.remove(prompt)
            found.append(prompt)
        return found is not None

    def _evict(self, prompt: int, keeps: int) -> None:
        if prompt in self.host:
            self.host.remove(prompt)
        else:
            room = [one for one in self.host if one != keeps] if len(self.host) == self.num_host else None
            if room == []:
                return
            if prompt in self.disk:
                self.disk.remove(prompt)
            if room:
                self.host.remove(room[0])
                others = [one for one in self.disk if one != keeps]
                if len(self.disk) == self.num_disk and others:
                    self.disk.remove(others[0])
                if len(self.disk) < self.num_disk:
                    self.disk.append(room[0])
        self.host.append(prompt)


@given(st.integers(1, 4), st.integers(0, 4), st.lists(st.integers(0, 8), max_size=40))
@settings(deadline=None)
def test_what_the_tiers_keep_is_what_was_used_last(num_host: int, num_disk: int, prompts: list[int]) -> None:
    s = scheduler(2, num_tier_host_blocks=num_host, num_tier_disk_blocks=num_disk)
    plain = PlainTiers(num_host, num_disk)
    for prompt in prompts:
        assert run(s, [prompt] * 4 + [9]) == (4 if plain.serve(prompt) else 0)
        stats = s.tier_stats
        assert (stats.host_blocks, stats.disk_blocks) == (len(plain.host), len(plain.disk))


def test_a_prompt_may_go_on_from_the_device_to_the_tiers() -> None:
    s = scheduler(8, num_tier_host_blocks=8)
    long = list(range(24))
    run(s, long)
    run(s, [60] * 13)  # takes the end of the long prompt's chain
    assert 0 < s.tier_stats.stores < 6
    handle = s.add_request(long, max_tokens=1)
    batch = step(s)
    assert batch.num_tokens == 0
    assert len(batch.tier_moves.loads) > 0
    assert run(s, [7, 7]) == 0
    assert s.num_cached_tokens(handle) == 20


def test_salts_stay_apart_in_the_tiers() -> None:
    s = scheduler(2, num_tier_host_blocks=4)
    run(s, [1] * 5, salt="a")
    run(s, [2] * 5)
    assert run(s, [1] * 5) == 0
    run(s, [2] * 5)
    assert run(s, [1] * 5, salt="a") == 4


def test_a_load_that_fails_is_computed_with_all_that_follows() -> None:
    s = scheduler(6, num_tier_host_blocks=8)
    run(s, list(range(17)))
    run(s, [60] * 21)
    handle = s.add_request(list(range(17)), max_tokens=1)
    batch = s.schedule()
    assert batch is not None
    assert batch.tier_moves is not None
    assert len(batch.tier_moves.loads) == 4
    with pytest.raises(InvalidRequest):
        s.update(np.empty(0, np.int64), failed_loads=[4])
    s.update(np.empty(0, np.int64), failed_loads=[1, 3])
    s.check()
    assert step(s).token_ids.tolist() == list(range(4, 17))
    assert s.num_cached_tokens(handle) == 4
    assert s.tier_stats.failed_loads == 2


def test_a_step_that_fails_leaves_nothing_to_be_found_that_it_was_to_store() -> None:
    s = scheduler(2, num_tier_host_blocks=4)
    run(s, [1] * 5)
    s.add_request([2] * 5, max_tokens=1)
    assert s.schedule() is not None
    s.fail_step()
    s.check()
    assert s.tier_stats.host_blocks == 0
    assert run(s, [1] * 5) == 0


def test_what_the_device_has_can_be_stored_before_it_is_lost() -> None:
    s = scheduler(16, num_tier_host_blocks=3)
    run(s, list(range(21)))
    batch = s.store_cached()
    assert batch is not None
    assert (batch.num_tokens, len(batch.tier_moves.stores)) == (0, 3)
    s.update(np.empty(0, np.int64))
    assert s.store_cached() is None
    s.recompute_all(swapped=False)
    s.check()
    assert run(s, list(range(21))) in (4, 8, 12)
    s.reset_prefix_cache()
    assert s.tier_stats.host_blocks == 0
    assert run(s, list(range(21))) == 0
