"""Behaviours of the block manager, one by one."""

from __future__ import annotations

import numpy as np
import pytest

from hardpoint.interfaces.errors import ConfigError, EmptyPrompt, InvalidRequest, TokenOutOfRange
from hardpoint.kv import AllocStatus, BlockManager, OutOfBlocks


def manager(device: int = 16, host: int = 0, block_size: int = 4, **options: object) -> BlockManager:
    return BlockManager(
        block_size=block_size,
        num_device_blocks=device,
        num_host_blocks=host,
        watermark=float(options.pop("watermark", 0.0)),  # type: ignore[arg-type]
        **options,  # type: ignore[arg-type]
    )


def computed(blocks: BlockManager, seq_id: int, tokens: list[int], salt: str = "") -> int:
    cached = blocks.allocate(seq_id, tokens, salt=salt)
    blocks.mark_computed(seq_id, len(tokens))
    return cached


def test_allocate_takes_the_blocks_that_the_tokens_need() -> None:
    blocks = manager()
    assert blocks.allocate(1, list(range(9))) == 0
    assert len(set(blocks.block_table(1))) == 3
    assert blocks.stats.device_used == 3


def test_numpy_prompts_of_both_widths_are_taken() -> None:
    blocks = manager()
    computed(blocks, 1, list(range(9)))
    for seq_id, dtype in enumerate((np.int32, np.int64, np.uint16), start=2):
        assert blocks.allocate(seq_id, np.arange(9, dtype=dtype)) == 8


def test_can_allocate_says_ok_later_or_never() -> None:
    blocks = manager(device=4)
    assert blocks.can_allocate(list(range(16))) is AllocStatus.OK
    assert blocks.can_allocate(list(range(17))) is AllocStatus.NEVER
    blocks.allocate(1, [1])
    assert blocks.can_allocate(list(range(16))) is AllocStatus.LATER


def test_the_watermark_is_kept_free_unless_all_blocks_are_free() -> None:
    blocks = manager(device=10, watermark=0.2)
    assert blocks.watermark_blocks == 2
    assert blocks.can_allocate(list(range(40))) is AllocStatus.OK
    blocks.allocate(1, [1, 2, 3])
    assert blocks.can_allocate(list(range(4 * 7))) is AllocStatus.OK
    assert blocks.can_allocate(list(range(4 * 8))) is AllocStatus.LATER


def test_the_watermark_does_not_hold_back_growth() -> None:
    blocks = manager(device=2, watermark=0.9)
    blocks.allocate(1, [1, 2, 3, 4])
    assert blocks.can_append(1) is AllocStatus.OK
    blocks.append_slots(1, [5])
    assert blocks.stats.device_free == 0


def test_append_counts_new_blocks_before_it_takes_them() -> None:
    blocks = manager()
    blocks.allocate(1, [1, 2, 3])
    assert [blocks.num_new_blocks(1, k) for k in (1, 2, 5, 6)] == [0, 1, 1, 2]
    assert blocks.num_new_blocks(1, 1, lookahead=4) == 1
    assert blocks.append_slots(1, [4], lookahead=4) == []
    assert len(blocks.block_table(1)) == 2


def test_append_beyond_the_pool_is_never() -> None:
    blocks = manager(device=2)
    blocks.allocate(1, list(range(8)))
    assert blocks.can_append(1) is AllocStatus.NEVER


def test_append_without_free_blocks_is_refused_and_changes_nothing() -> None:
    blocks = manager(device=2)
    blocks.allocate(1, list(range(4)))
    blocks.allocate(2, list(range(4)))
    assert blocks.can_append(1) is AllocStatus.LATER
    with pytest.raises(OutOfBlocks, match="0 of 2 device blocks"):
        blocks.append_slots(1, [4])
    assert blocks.num_tokens(1) == 4
    blocks.check()


def test_forks_share_all_blocks_and_copy_the_last_one_on_write() -> None:
    blocks = manager()
    computed(blocks, 1, list(range(6)))
    blocks.fork(1, 2)
    shared = blocks.block_table(1)
    assert blocks.block_table(2) == shared
    assert [blocks.ref_count(b) for b in shared] == [2, 2]
    assert blocks.num_new_blocks(1) == 1
    ((source, destination),) = blocks.append_slots(1, [6])
    assert source == shared[1]
    assert blocks.block_table(1) == [shared[0], destination]
    assert blocks.append_slots(2, [7]) == []
    assert blocks.block_table(2) == shared


def test_a_fork_at_a_block_boundary_copies_nothing() -> None:
    blocks = manager()
    computed(blocks, 1, list(range(8)))
    blocks.fork(1, 2)
    assert blocks.append_slots(1, [8]) == []
    assert blocks.append_slots(2, [8]) == []
    assert blocks.block_table(1)[:2] == blocks.block_table(2)[:2]
    assert blocks.block_table(1)[2] != blocks.block_table(2)[2]


def test_a_fork_does_not_share_lookahead_blocks() -> None:
    blocks = manager()
    blocks.allocate(1, list(range(6)), lookahead=8)
    blocks.mark_computed(1, 6)
    blocks.fork(1, 2)
    assert len(blocks.block_table(1)) == 4
    assert len(blocks.block_table(2)) == 2


def test_swap_keeps_shared_blocks_shared_in_both_directions() -> None:
    blocks = manager(host=8)
    computed(blocks, 1, list(range(6)))
    blocks.fork(1, 2)
    out = blocks.swap_out([1, 2])
    assert len(out) == 2
    assert blocks.block_table(1) == blocks.block_table(2) == [host for _, host in out]
    assert blocks.is_swapped(1)
    assert blocks.stats.host_used == 2
    back = blocks.swap_in([1, 2])
    assert len(back) == 2
    assert blocks.block_table(1) == blocks.block_table(2)
    assert blocks.stats.host_used == 0
    assert len(blocks.append_slots(1, [9])) == 1


def test_can_swap_says_ok_later_or_never() -> None:
    blocks = manager(device=4, host=2)
    computed(blocks, 1, list(range(8)))
    computed(blocks, 2, list(range(100, 104)))
    assert blocks.can_swap_out([1]) is AllocStatus.OK
    assert blocks.can_swap_out([1, 2]) is AllocStatus.NEVER
    blocks.swap_out([1])
    assert blocks.can_swap_out([2]) is AllocStatus.LATER
    with pytest.raises(OutOfBlocks):
        blocks.swap_out([2])
    blocks.allocate(3, list(range(200, 208)))
    assert blocks.can_swap_in([1]) is AllocStatus.LATER
    with pytest.raises(OutOfBlocks):
        blocks.swap_in([1])
    blocks.free(3)
    assert blocks.can_swap_in([1]) is AllocStatus.OK


def test_a_hit_needs_equal_tokens_and_an_equal_prefix() -> None:
    blocks = manager()
    computed(blocks, 1, [1, 1, 1, 1, 2, 2, 2, 2, 3])
    assert computed(blocks, 2, [1, 1, 1, 1, 2, 2, 2, 2, 4]) == 8
    assert computed(blocks, 3, [1, 1, 1, 9, 2, 2, 2, 2, 4]) == 0
    assert computed(blocks, 4, [2, 2, 2, 2, 1]) == 0


def test_one_token_is_always_left_to_compute() -> None:
    blocks = manager()
    computed(blocks, 1, list(range(8)))
    assert blocks.allocate(2, list(range(8))) == 4


def test_recomputing_a_cached_block_gives_the_duplicate_back() -> None:
    blocks = manager()
    computed(blocks, 1, list(range(8)))
    computed(blocks, 2, list(range(8)))
    assert blocks.block_table(1) == blocks.block_table(2)
    assert blocks.stats.device_used == 2


def test_only_computed_blocks_are_hit() -> None:
    blocks = manager()
    blocks.allocate(1, list(range(9)))
    assert blocks.allocate(2, list(range(9))) == 0
    blocks.mark_computed(1, 7)
    assert blocks.allocate(3, list(range(9))) == 4


def test_salts_separate_caches() -> None:
    blocks = manager()
    computed(blocks, 1, list(range(9)), salt="adapter")
    assert computed(blocks, 2, list(range(9))) == 0
    assert computed(blocks, 3, list(range(9)), salt="adapter") == 8


def test_a_salt_that_was_forgotten_hits_nothing_old() -> None:
    blocks = manager(device=4)
    computed(blocks, 1, list(range(9)), salt="a")
    blocks.free(1)
    computed(blocks, 2, list(range(50, 66)))
    blocks.free(2)
    assert computed(blocks, 3, list(range(9)), salt="a") == 0


@pytest.mark.parametrize("hash_bits", [0, 1, 4])
def test_colliding_hashes_never_hit_falsely(hash_bits: int) -> None:
    blocks = manager(device=512, hash_bits=hash_bits)
    prompts = [[a, b, a, b, b, b, a, a, c] for a in range(8) for b in range(8) for c in range(2)]
    prefixes = set()
    for seq_id, prompt in enumerate(prompts):
        known = [n for n in (4, 8) if tuple(prompt[:n]) in prefixes]
        assert computed(blocks, seq_id, prompt) == max(known, default=0)
        prefixes |= {tuple(prompt[:4]), tuple(prompt[:8])}
    blocks.check()


def test_freed_blocks_stay_cached_until_they_are_needed() -> None:
    blocks = manager(device=4)
    computed(blocks, 1, list(range(9)))
    blocks.free(1)
    assert blocks.stats.device_free == 4
    assert blocks.stats.cached == 2
    assert blocks.allocate(2, list(range(9))) == 8
    assert blocks.stats.evictions == 0


def test_eviction_takes_the_least_recently_used_and_tails_before_heads() -> None:
    blocks = manager(device=6)
    computed(blocks, 1, [1] * 12)
    computed(blocks, 2, [2] * 12)
    blocks.free(1)
    blocks.free(2)
    blocks.allocate(3, [3] * 5)
    assert blocks.stats.evictions == 2
    blocks.free(3)
    assert blocks.allocate(4, [1] * 13) == 4
    assert blocks.stats.evictions == 3
    blocks.free(4)
    assert blocks.allocate(5, [2] * 13) == 8


def test_a_hit_makes_blocks_recently_used() -> None:
    blocks = manager(device=5)
    computed(blocks, 1, [1] * 8)
    computed(blocks, 2, [2] * 8)
    blocks.free(1)
    blocks.free(2)
    blocks.allocate(3, [1] * 9)
    blocks.free(3)
    blocks.allocate(4, [4] * 12)
    blocks.free(4)
    assert blocks.stats.evictions == 2
    assert blocks.allocate(5, [1] * 9) == 8


def test_reset_forgets_everything_and_sequences_keep_their_blocks() -> None:
    blocks = manager()
    computed(blocks, 1, list(range(9)))
    table = blocks.block_table(1)
    blocks.reset_prefix_cache()
    assert blocks.stats.cached == 0
    assert blocks.block_table(1) == table
    assert computed(blocks, 2, list(range(9))) == 0
    assert computed(blocks, 3, list(range(9))) == 8
    blocks.append_slots(1, [9, 10, 11])
    blocks.mark_computed(1, 12)
    assert blocks.allocate(4, list(range(13))) == 8
    blocks.check()


def test_without_prefix_caching_nothing_is_reused() -> None:
    blocks = manager(enable_prefix_caching=False)
    computed(blocks, 1, list(range(9)))
    assert computed(blocks, 2, list(range(9))) == 0
    assert blocks.stats.cached == 0


def test_statistics_count_tokens_of_lookups_and_hits() -> None:
    blocks = manager()
    computed(blocks, 1, list(range(9)))
    computed(blocks, 2, list(range(9)))
    blocks.allocate(3, list(range(9)), use_prefix_cache=False)
    assert blocks.stats.queried_tokens == 18
    assert blocks.stats.hit_tokens == 8


def test_bad_calls_raise_typed_errors() -> None:
    blocks = manager(host=4)
    with pytest.raises(EmptyPrompt):
        blocks.allocate(1, [])
    with pytest.raises(TokenOutOfRange, match="-3 at position 1"):
        blocks.allocate(1, [1, -3])
    with pytest.raises(TokenOutOfRange, match="2147483648"):
        blocks.allocate(1, [1 << 31])
    with pytest.raises(TypeError):
        blocks.allocate(1, ["a"])  # type: ignore[list-item]
    with pytest.raises(KeyError):
        blocks.free(7)
    blocks.allocate(1, [1, 2])
    with pytest.raises(InvalidRequest, match="already"):
        blocks.allocate(1, [1])
    with pytest.raises(InvalidRequest, match="all its tokens are computed"):
        blocks.fork(1, 2)
    with pytest.raises(InvalidRequest, match="only grow"):
        blocks.mark_computed(1, 3)
    with pytest.raises(InvalidRequest, match="not negative"):
        blocks.append_slots(1, [3], lookahead=-1)
    with pytest.raises(InvalidRequest, match="twice"):
        blocks.swap_out([1, 1])
    with pytest.raises(InvalidRequest, match="not swapped"):
        blocks.swap_in([1])
    blocks.mark_computed(1, 2)
    blocks.swap_out([1])
    with pytest.raises(InvalidRequest, match="swapped out"):
        blocks.append_slots(1, [3])
    blocks.check()


@pytest.mark.parametrize(
    "options",
    [
        {"block_size": 0, "num_device_blocks": 1},
        {"block_size": 1, "num_device_blocks": 0},
        {"block_size": 16, "num_device_blocks": 1 << 28},
        {"block_size": 1, "num_device_blocks": 1, "watermark": 1.0},
        {"block_size": 1, "num_device_blocks": 1, "hash_bits": 65},
        {"block_size": 1, "num_device_blocks": 1, "num_host_blocks": -1},
    ],
)
def test_impossible_sizes_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        BlockManager(**options)  # type: ignore[arg-type]
