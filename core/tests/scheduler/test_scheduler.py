"""Behaviours of the scheduler, one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hardpoint.interfaces.batch import StepBatch
from hardpoint.interfaces.errors import (
    ConfigError,
    EmptyPrompt,
    HardpointError,
    InvalidRequest,
    InvalidSamplingParams,
    PromptTooLong,
    RequestNeverFits,
    TokenOutOfRange,
)
from hardpoint.scheduler import FinishReason, Scheduler, SchedulerConfig, SequenceState


def scheduler(**options: Any) -> Scheduler:
    defaults: dict[str, Any] = {
        "block_size": 4,
        "num_device_blocks": 64,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 32,
        "max_model_len": 64,
        "watermark": 0.0,
    }
    return Scheduler(SchedulerConfig(**{**defaults, **options}))


def update(s: Scheduler, batch: StepBatch, tokens: Sequence[int] | int = 1) -> dict[int, FinishReason]:
    values = [tokens] * len(batch.sample_rows) if isinstance(tokens, int) else tokens
    finished = dict(s.update(np.array(values, np.int64)))
    s.check()
    return finished


def step(s: Scheduler, tokens: Sequence[int] | int = 1) -> StepBatch:
    batch = s.schedule()
    assert batch is not None
    update(s, batch, tokens)
    return batch


def finish_all(s: Scheduler, token: int = 1, max_steps: int = 1000) -> dict[int, FinishReason]:
    finished: dict[int, FinishReason] = {}
    for _ in range(max_steps):
        batch = s.schedule()
        if batch is None:
            return finished
        finished |= update(s, batch, token)
    raise AssertionError("requests are left")


# Steps


def test_a_prompt_is_computed_and_sampled_in_one_step() -> None:
    s = scheduler()
    handle = s.add_request([5, 6, 7, 8, 9], max_tokens=3)
    batch = s.schedule()
    assert batch is not None
    assert batch.token_ids.tolist() == [5, 6, 7, 8, 9]
    assert batch.positions.tolist() == [0, 1, 2, 3, 4]
    assert batch.query_start.tolist() == [0, 5]
    assert batch.context_lens.tolist() == [5]
    assert batch.seq_ids.tolist() == [handle]
    assert batch.num_decodes == 0
    assert batch.sample_rows.tolist() == [0]
    assert batch.sample_seq_ids.tolist() == [handle]
    table = batch.block_table[batch.rows[0]]
    assert batch.slot_mapping.tolist() == [table[p // 4] * 4 + p % 4 for p in range(5)]
    assert update(s, batch, 11) == {}
    decode = s.schedule()
    assert decode is not None
    assert decode.num_decodes == 1
    assert (decode.token_ids.tolist(), decode.positions.tolist(), decode.context_lens.tolist()) == ([11], [5], [6])


def test_arrays_have_the_contracts_types_and_shapes() -> None:
    s = scheduler()
    s.add_request([1, 2, 3])
    batch = s.schedule()
    assert batch is not None
    for name in ("token_ids", "positions", "seq_ids", "sample_seq_ids", "preempted"):
        assert getattr(batch, name).dtype == np.int64
    for name in (
        "slot_mapping",
        "query_start",
        "context_lens",
        "rows",
        "block_table",
        "sample_rows",
        "state_rows",
        "sample_state_rows",
        "sample_positions",
        "swap_out",
        "swap_in",
        "copies",
    ):
        assert getattr(batch, name).dtype == np.int32
    assert batch.block_table.shape == (8, 16)
    assert batch.swap_out.shape == batch.swap_in.shape == batch.copies.shape == (0, 2)


def test_a_step_has_its_own_numbers_whatever_sizes_came_before() -> None:
    s = scheduler(max_num_batched_tokens=128, max_model_len=128)
    lengths = [*range(1, 101), *range(100, 0, -1), 7, 7]
    for number, length in enumerate(lengths):
        prompt = [number * 128 + place for place in range(length)]
        handle = s.add_request(prompt, max_tokens=9)
        batch = s.schedule()
        assert batch is not None
        assert batch.token_ids.tolist() == prompt
        assert batch.positions.tolist() == list(range(length))
        assert (batch.query_start.tolist(), batch.context_lens.tolist()) == ([0, length], [length])
        assert (batch.seq_ids.tolist(), batch.sample_rows.tolist()) == ([handle], [0])
        assert len(batch.slot_mapping) == length
        update(s, batch)
        s.abort([handle])
        s.release([handle])


def test_decodes_and_prefill_chunks_share_a_step_decodes_first() -> None:
    s = scheduler(max_num_batched_tokens=8)
    first = s.add_request([1, 2, 3])
    step(s)
    second = s.add_request(list(range(20)))
    chunks = []
    for _ in range(3):
        batch = step(s)
        assert batch.seq_ids.tolist() == [first, second]
        assert batch.num_decodes == 1
        chunks.append(int(batch.query_start[2] - batch.query_start[1]))
        assert batch.num_tokens <= 8
    assert chunks == [7, 7, 6]
    assert step(s).num_decodes == 2


def test_only_the_last_chunk_of_a_prompt_is_sampled() -> None:
    s = scheduler(max_num_batched_tokens=8)
    s.add_request(list(range(10)))
    assert len(step(s).sample_rows) == 0
    assert len(step(s).sample_rows) == 1


def test_a_threshold_lets_prompts_share_a_step() -> None:
    s = scheduler(max_num_batched_tokens=16, long_prefill_token_threshold=5)
    for _ in range(3):
        s.add_request(list(range(12)), max_cached_tokens=0)
    assert np.diff(step(s).query_start).tolist() == [5, 5, 5]


def test_prompts_take_a_limited_part_of_the_steps_that_decodes_wait_for() -> None:
    s = scheduler(mixed_prefill_tokens=6)
    first = s.add_request([1, 2, 3], max_tokens=20)
    step(s)
    for length in (10, 7):
        s.add_request(list(range(length)), max_tokens=20, max_cached_tokens=0)
    assert [np.diff(step(s).query_start).tolist() for _ in range(3)] == [[1, 6], [1, 4, 2], [1, 1, 5]]
    assert step(s).num_decodes == 3
    s.abort([first, first + 1, first + 2])
    s.add_request(list(range(31)), max_cached_tokens=0)
    assert np.diff(step(s).query_start).tolist() == [31], "nobody waits for this step"


def test_a_decode_that_waits_for_its_token_counts_as_one() -> None:
    s = scheduler(mixed_prefill_tokens=6, steps_in_flight=1)
    s.add_request([1, 2, 3], plan_ahead=False)
    first = s.schedule()
    s.add_request(list(range(20)), max_cached_tokens=0)
    beside = s.schedule()
    assert first is not None
    assert beside is not None
    assert (beside.num_decodes, beside.num_tokens) == (0, 6)


def test_a_decode_that_comes_back_from_the_host_counts_as_one() -> None:
    s = scheduler(mixed_prefill_tokens=6, num_device_blocks=8, num_host_blocks=8, preemption_mode="swap")
    first = s.add_request([1] * 15, max_tokens=4, max_cached_tokens=0)
    second = s.add_request([2] * 16, max_tokens=20, max_cached_tokens=0)
    while s.state(second) is not SequenceState.SWAPPED:
        step(s)
    s.abort([first])
    s.add_request([3] * 10, max_cached_tokens=0)
    back = step(s)
    assert back.seq_ids.tolist() == [second, second + 1]
    assert np.diff(back.query_start).tolist() == [1, 6]


def test_a_decode_comes_back_from_the_host_when_the_prompts_beside_it_are_few_enough() -> None:
    """The swapped sequence's blocks are free again while a prompt that nobody decoded beside takes three tokens a step."""
    s = scheduler(
        mixed_prefill_tokens=1,
        long_prefill_token_threshold=3,
        num_device_blocks=10,
        num_host_blocks=8,
        preemption_mode="swap",
        scheduling_policy="priority",
    )
    swapped = s.add_request([1] * 12, max_tokens=11, priority=2, max_cached_tokens=0)
    s.add_request([2] * 19, max_tokens=6, priority=0, max_cached_tokens=0)
    step(s)
    step(s)
    s.add_request([3] * 8, max_tokens=1, priority=1, max_cached_tokens=0)
    while s.state(swapped) is not SequenceState.SWAPPED:
        step(s)
    counts = []
    while s.state(swapped) is SequenceState.SWAPPED:
        batch = step(s)
        counts.append((batch.num_decodes, batch.num_tokens))
    assert counts == [(0, 3), (1, 2)]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 4096),
        ({"recompute_seconds_per_token": 1e-5}, 4096),
        ({"recompute_seconds_per_token": 1.6e-4}, 1024),
        ({"recompute_seconds_per_token": 1e-3}, 256),
        ({"recompute_seconds_per_token": 1e-3, "max_num_batched_tokens": 200}, 200),
        ({"recompute_seconds_per_token": 5.0}, 256),
        ({"recompute_seconds_per_token": 1e-3, "enable_chunked_prefill": False}, 4096),
        ({"recompute_seconds_per_token": 1e-3, "mixed_prefill_tokens": 700}, 700),
        ({"mixed_prefill_tokens": 5000}, 4096),
    ],
)
def test_the_part_of_prompts_follows_from_the_measured_speed(settings: dict[str, Any], expected: int) -> None:
    defaults = {"block_size": 16, "num_device_blocks": 8, "max_num_seqs": 8, "max_num_batched_tokens": 4096}
    assert SchedulerConfig(**defaults | settings).mixed_prefill_budget == expected


def test_without_chunked_prefill_prompts_are_computed_whole() -> None:
    s = scheduler(enable_chunked_prefill=False, max_num_batched_tokens=64)
    s.add_request([1] * 40)
    s.add_request([2] * 40)
    assert np.diff(step(s).query_start).tolist() == [40]
    assert np.diff(step(s).query_start).tolist() == [1, 40]


def test_no_more_sequences_run_than_allowed() -> None:
    s = scheduler(max_num_seqs=2)
    handles = [s.add_request([1, 2], max_tokens=2) for _ in range(3)]
    assert step(s).seq_ids.tolist() == handles[:2]
    assert s.state(handles[2]) is SequenceState.WAITING
    step(s)
    assert step(s).seq_ids.tolist() == handles[2:]


def test_nothing_to_do_is_no_batch() -> None:
    s = scheduler()
    assert s.schedule() is None
    assert not s.has_unfinished()
    assert s.update(np.empty(0, np.int64)) == []


def test_a_sequence_keeps_its_row_while_it_runs() -> None:
    s = scheduler()
    first, second = s.add_request([1, 2, 3], max_tokens=1), s.add_request([1, 2, 3], max_tokens=40)
    row = int(step(s).rows[1])
    assert s.state(first) is SequenceState.FINISHED
    for _ in range(10):
        batch = step(s)
        assert batch.seq_ids.tolist() == [second]
        assert batch.rows.tolist() == [row]


def test_a_sequence_has_a_row_of_the_workers_state_from_its_first_sample_to_its_release() -> None:
    s = scheduler(max_num_batched_tokens=8, num_device_blocks=6)
    first = s.add_request(list(range(10)), n=2, max_tokens=20)
    assert step(s).state_rows.tolist() == [-1]
    batch = step(s)
    assert (batch.state_rows.tolist(), batch.sample_state_rows.tolist()) == ([0], [0, 1])
    assert batch.sample_positions.tolist() == [0, 0]
    batch = step(s)
    assert batch.state_rows.tolist() == batch.sample_state_rows.tolist() == [0, 1]
    assert batch.sample_positions.tolist() == [1, 1]
    later = 0
    while s.num_preemptions(first + 1) == 0:
        later = step(s).num_seqs
    s.abort([first])
    assert later
    newcomer = s.add_request([1, 2], max_tokens=2)
    assert step(s).state_rows.tolist() == [2], "those of ended sequences are theirs until they are released"
    s.release([first, first + 1])
    another = s.add_request([3, 4], max_tokens=1)
    batch = step(s)
    assert batch.seq_ids.tolist() == [newcomer, another]
    assert batch.state_rows.tolist() in ([2, 0], [2, 1])


def test_a_preempted_sequence_keeps_its_row_and_its_number_of_tokens() -> None:
    s = scheduler(num_device_blocks=4, preemption_mode="recompute")
    first, second = s.add_request([1] * 6, max_tokens=8), s.add_request([2] * 6, max_tokens=8)
    seen: dict[int, list[tuple[int, int]]] = {first: [], second: []}
    while (batch := s.schedule()) is not None:
        rows, positions = batch.sample_state_rows.tolist(), batch.sample_positions.tolist()
        for seq_id, row, position in zip(batch.sample_seq_ids.tolist(), rows, positions, strict=True):
            seen[seq_id].append((row, position))
        update(s, batch)
    assert s.num_preemptions(second) > 0
    assert seen == {first: [(0, i) for i in range(8)], second: [(1, i) for i in range(8)]}


# How sequences end


def test_max_tokens_ends_with_length() -> None:
    s = scheduler()
    handle = s.add_request([1, 2], max_tokens=3)
    assert finish_all(s, 7) == {handle: FinishReason.LENGTH}
    assert s.output_token_ids(handle).tolist() == [7, 7, 7]
    assert s.all_token_ids(handle).tolist() == [1, 2, 7, 7, 7]


def test_the_context_length_ends_with_length() -> None:
    s = scheduler(max_model_len=10)
    handle = s.add_request([1, 2])
    assert finish_all(s) == {handle: FinishReason.LENGTH}
    assert len(s.all_token_ids(handle)) == 10


def test_a_sequence_that_fills_the_whole_pool_ends_with_length() -> None:
    s = scheduler(num_device_blocks=3)
    handle = s.add_request([1, 2])
    assert finish_all(s) == {handle: FinishReason.LENGTH}
    assert len(s.all_token_ids(handle)) == 12


@pytest.mark.parametrize("stop", [[9], [9, 10, 11, 12, 13, 14]])
def test_stop_tokens_end_with_stop(stop: list[int]) -> None:
    s = scheduler()
    handle = s.add_request([1, 2], max_tokens=9, stop_token_ids=stop)
    step(s, 8)
    assert s.finish_reason(handle) is None
    step(s, 9)
    assert s.finish_reason(handle) is FinishReason.STOP
    assert s.output_token_ids(handle).tolist() == [8, 9]


def test_min_tokens_come_before_a_stop() -> None:
    s = scheduler()
    handle = s.add_request([1], max_tokens=9, min_tokens=3, stop_token_ids=[5])
    assert finish_all(s, 5) == {handle: FinishReason.STOP}
    assert len(s.output_token_ids(handle)) == 3


def test_pooling_ends_after_the_prompt_without_a_sample() -> None:
    s = scheduler(max_num_batched_tokens=8)
    handle = s.add_request(list(range(12)), pooling=True)
    assert len(step(s).sample_rows) == 0
    batch = s.schedule()
    assert batch is not None
    assert len(batch.sample_rows) == 0
    assert update(s, batch) == {handle: FinishReason.POOLED}


def test_a_pooled_prompt_may_fill_the_context() -> None:
    s = scheduler(max_model_len=16)
    s.add_request([1] * 16, pooling=True)
    with pytest.raises(PromptTooLong):
        s.add_request([1] * 16)


def test_the_engine_ends_one_sequence_at_a_stop_string() -> None:
    s = scheduler()
    handle = s.add_request([1, 2], n=2, max_tokens=9)
    step(s)
    assert s.finish(handle, FinishReason.STOP)
    assert not s.finish(handle, FinishReason.STOP)
    assert step(s).seq_ids.tolist() == [handle + 1]
    assert s.finish_reason(handle) is FinishReason.STOP


def test_ended_sequences_are_kept_until_release() -> None:
    s = scheduler()
    handle = s.add_request([1, 2], max_tokens=1)
    other = s.add_request([1, 2], max_tokens=9)
    step(s)
    with pytest.raises(InvalidRequest, match="has not ended"):
        s.release([handle, other])
    assert s.output_token_ids(handle).tolist() == [1]
    s.release([handle])
    with pytest.raises(KeyError):
        s.output_token_ids(handle)
    assert s.stats.num_unreleased == 1


# Forks


def test_forks_share_the_prompt_and_have_consecutive_ids() -> None:
    s = scheduler()
    handle = s.add_request([1, 2, 3, 4, 5], n=3, max_tokens=4)
    assert s.state(handle + 2) is SequenceState.DORMANT
    batch = s.schedule()
    assert batch is not None
    assert batch.sample_rows.tolist() == [0, 0, 0]
    assert batch.sample_seq_ids.tolist() == [handle, handle + 1, handle + 2]
    update(s, batch, [10, 20, 30])
    assert s.block_stats.device_used == 2
    decode = s.schedule()
    assert decode is not None
    assert decode.token_ids.tolist() == [10, 20, 30]
    assert len(decode.copies) == 2
    assert len(set(decode.slot_mapping.tolist())) == 3
    update(s, decode, [11, 21, 31])
    assert s.output_token_ids(handle + 1).tolist() == [20, 21]
    assert s.block_stats.device_used == 4


def test_rows_of_forks_are_copied_from_their_parents_in_the_next_step_and_in_no_other() -> None:
    s = scheduler()
    s.add_request([1, 2, 3], n=3, max_tokens=4)
    first = step(s)
    assert first.row_copies.shape == (0, 2)
    second = step(s)
    parent, *forks = second.rows.tolist()
    assert parent == first.rows[0]
    assert second.row_copies.tolist() == [[parent, fork] for fork in forks]
    assert step(s).row_copies.shape == (0, 2)


def test_a_row_that_a_fork_gave_back_is_copied_to_for_its_next_owner_alone() -> None:
    s = scheduler(max_num_seqs=4)
    one, other = s.add_request([1, 2], n=2, max_tokens=8), s.add_request([3, 4], n=2, max_tokens=8)
    batch = s.schedule()
    assert batch is not None
    parents = dict(zip(batch.seq_ids.tolist(), batch.rows.tolist(), strict=True))
    update(s, batch)
    s.finish(one + 1)
    copies = step(s).row_copies.tolist()
    assert [source for source, _ in copies][-1] == parents[other]
    assert len({destination for _, destination in copies}) == len(copies)


def test_rows_of_forks_are_kept_free_from_admission_on() -> None:
    s = scheduler(max_num_seqs=4, max_num_batched_tokens=4)
    forked = s.add_request(list(range(6)), n=3, max_tokens=2)
    others = [s.add_request([i, i], max_tokens=2) for i in range(2)]
    finish_order = []
    while (batch := s.schedule()) is not None:
        assert batch.num_seqs <= 4
        finish_order += list(update(s, batch))
    assert sorted(finish_order) == [forked, forked + 1, forked + 2, *others]


def test_a_fork_that_ends_with_its_first_token_leaves_the_others() -> None:
    s = scheduler()
    handle = s.add_request([1, 2, 3], n=2, max_tokens=5, stop_token_ids=[9])
    step(s, [9, 4])
    assert s.finish_reason(handle) is FinishReason.STOP
    assert finish_all(s, 4) == {handle + 1: FinishReason.LENGTH}


# Prefix cache


def test_a_second_request_reuses_the_prefix() -> None:
    s = scheduler()
    first = s.add_request(list(range(10)), max_tokens=1)
    step(s)
    second = s.add_request([*range(8), 60, 61], max_tokens=1)
    batch = step(s)
    assert batch.positions.tolist() == [8, 9]
    assert (s.num_cached_tokens(first), s.num_cached_tokens(second)) == (0, 8)


def test_generated_tokens_are_reused_by_the_next_turn() -> None:
    s = scheduler()
    handle = s.add_request([1, 2, 3], max_tokens=6)
    finish_all(s, 7)
    turn = s.add_request([*s.all_token_ids(handle).tolist(), 8, 8])
    step(s)
    assert s.num_cached_tokens(turn) == 8


def test_max_cached_tokens_limits_what_the_prefix_cache_gives() -> None:
    s = scheduler()
    s.add_request(list(range(10)), max_tokens=1)
    step(s)
    for most, computed in ((0, 10), (3, 10), (4, 6), (7, 6), (8, 2), (100, 2), (None, 2)):
        s.add_request(list(range(10)), max_tokens=1, max_cached_tokens=most)
        assert step(s).num_tokens == computed


def test_salts_do_not_share() -> None:
    s = scheduler()
    for salt in ("", "a", "b"):
        s.add_request(list(range(9)), max_tokens=1, salt=salt)
        assert step(s).num_tokens == 9
    s.add_request(list(range(9)), max_tokens=1, salt="a")
    assert step(s).num_tokens == 1


def test_hits_survive_preemption() -> None:
    s = scheduler(num_device_blocks=5, preemption_mode="recompute")
    s.add_request([1] * 7, max_tokens=8)
    second = s.add_request([2] * 7, max_tokens=8)
    while s.num_preemptions(second) == 0:
        step(s)
    while s.state(second) is SequenceState.WAITING:
        batch = step(s)
    assert batch.seq_ids.tolist()[-1] == second
    assert int(batch.positions[batch.query_start[-2]]) >= 4
    # What it finds of its own is no hit: a prompt is looked up once.
    assert (s.block_stats.queried_tokens, s.block_stats.hit_tokens) == (14, 0)


def test_reset_of_the_prefix_cache_holds_at_once() -> None:
    s = scheduler()
    running = s.add_request(list(range(9)), max_tokens=9)
    step(s)
    s.reset_prefix_cache()
    s.add_request(list(range(9)), max_tokens=1)
    assert step(s).num_tokens == 10
    assert s.finish_reason(running) is None
    finish_all(s)


# Preemption


def test_the_latest_arrival_is_preempted_and_comes_back() -> None:
    s = scheduler(num_device_blocks=4, max_model_len=16, preemption_mode="recompute")
    first, second = (s.add_request([k] * 7, max_tokens=9) for k in (1, 2))
    preempted = []
    finished: dict[int, FinishReason] = {}
    while (batch := s.schedule()) is not None:
        preempted += batch.preempted.tolist()
        finished |= update(s, batch, 5)
    assert set(preempted) == {second}
    assert list(finished) == [first, second]
    assert s.output_token_ids(second).tolist() == [5] * 9


def test_swap_moves_blocks_out_and_back_without_recomputing() -> None:
    s = scheduler(num_device_blocks=4, num_host_blocks=8, max_model_len=16, preemption_mode="swap")
    s.add_request([1] * 7, max_tokens=9)
    second = s.add_request([2] * 7, max_tokens=9)
    out = back = computed = 0
    while (batch := s.schedule()) is not None:
        out += len(batch.swap_out)
        back += len(batch.swap_in)
        assert not (len(batch.swap_out) and len(batch.swap_in))
        computed += int(np.diff(batch.query_start)[batch.seq_ids == second].sum())
        update(s, batch, 5)
    assert out == back > 0
    assert computed == 7 + 8
    assert s.stats.preemptions_by_swap > 0
    assert s.stats.preemptions_by_recompute == 0


@pytest.mark.parametrize(("swap_seconds", "kind"), [(0.1, "swap"), (10.0, "recompute")])
def test_auto_preempts_the_cheaper_way(swap_seconds: float, kind: str) -> None:
    s = scheduler(
        num_device_blocks=4,
        num_host_blocks=8,
        max_model_len=16,
        swap_seconds_per_block=swap_seconds,
        recompute_seconds_per_token=1.0,
    )
    for k in (1, 2):
        s.add_request([k] * 7, max_tokens=9)
    finish_all(s)
    counts = {"swap": s.stats.preemptions_by_swap, "recompute": s.stats.preemptions_by_recompute}
    assert counts.pop(kind) > 0
    assert set(counts.values()) == {0}


def test_swap_falls_back_to_recompute_when_the_host_pool_is_full() -> None:
    s = scheduler(num_device_blocks=4, num_host_blocks=1, max_model_len=16, preemption_mode="swap")
    for k in (1, 2):
        s.add_request([k] * 7, max_tokens=9)
    finish_all(s)
    assert s.stats.preemptions_by_swap == 0
    assert s.stats.preemptions_by_recompute > 0


def test_the_lowest_priority_is_preempted() -> None:
    s = scheduler(num_device_blocks=4, max_model_len=16, scheduling_policy="priority", preemption_mode="recompute")
    low = s.add_request([1] * 7, max_tokens=9, priority=5)
    high = s.add_request([2] * 7, max_tokens=9, priority=0)
    finished = finish_all(s)
    assert list(finished) == [high, low]
    assert s.num_preemptions(low) > 0
    assert s.num_preemptions(high) == 0


# Lost contents


def test_recomputed_sequences_continue_with_the_same_tokens_ahead_of_later_ones() -> None:
    s = scheduler()
    first = s.add_request([1, 2, 3, 4, 5], max_tokens=6)
    step(s, 11)
    step(s, 12)
    s.recompute_all(swapped=False)
    s.check()
    later = s.add_request([6, 7], max_tokens=1)
    assert s.state(first) is SequenceState.WAITING
    assert s.block_stats.device_used == 0
    batch = s.schedule()
    assert batch is not None
    assert batch.seq_ids.tolist() == [first, later]
    assert batch.token_ids.tolist() == [1, 2, 3, 4, 5, 11, 12, 6, 7]
    update(s, batch, 13)
    finish_all(s, 14)
    assert s.output_token_ids(first).tolist() == [11, 12, 13, 14, 14, 14]
    assert s.num_preemptions(first) == 0


def test_forks_are_recomputed_each_with_its_own_tokens() -> None:
    s = scheduler()
    handle = s.add_request([1] * 6, n=2, max_tokens=4)
    step(s, [21, 22])
    step(s, [31, 32])
    s.recompute_all(swapped=True)
    finish_all(s, 5)
    assert [s.output_token_ids(handle + i).tolist() for i in range(2)] == [[21, 31, 5, 5], [22, 32, 5, 5]]


def test_a_prompt_of_forks_that_is_half_computed_starts_again() -> None:
    s = scheduler(max_num_batched_tokens=4, max_num_seqs=2)
    handle = s.add_request([1] * 6, n=2, max_tokens=2)
    step(s, [])
    s.recompute_all(swapped=False)
    s.check()
    assert finish_all(s) == dict.fromkeys((handle, handle + 1), FinishReason.LENGTH)


def test_lost_blocks_are_never_hit_again() -> None:
    s = scheduler()
    s.add_request(list(range(9)), max_tokens=1)
    finish_all(s)
    s.recompute_all(swapped=False)
    s.add_request(list(range(9)), max_tokens=1)
    assert step(s).num_tokens == 9


@pytest.mark.parametrize("swapped", [False, True])
def test_swapped_sequences_are_recomputed_only_where_the_host_is_lost_too(swapped: bool) -> None:
    s = scheduler(num_device_blocks=4, num_host_blocks=8, max_model_len=16, preemption_mode="swap")
    s.add_request([1] * 7, max_tokens=9)
    second = s.add_request([2] * 7, max_tokens=9)
    while s.state(second) is not SequenceState.SWAPPED:
        step(s, 5)
    s.recompute_all(swapped=swapped)
    s.check()
    assert s.state(second) is (SequenceState.WAITING if swapped else SequenceState.SWAPPED)
    assert (s.block_stats.host_used == 0) is swapped
    finish_all(s, 5)
    assert s.output_token_ids(second).tolist() == [5] * 9


def test_live_blocks_are_those_of_computed_tokens_and_of_the_prefix_cache() -> None:
    s = scheduler()
    s.add_request(list(range(9)), max_tokens=1)
    finish_all(s)
    cached = s.live_blocks(running=False).tolist()
    assert len(cached) == 2
    running = s.add_request([7] * 6, max_tokens=20)
    batch = step(s)
    own = batch.block_table[batch.rows[0]][:2].tolist()
    assert batch.seq_ids.tolist() == [running]
    assert s.live_blocks(running=True).tolist() == sorted({*cached, *own})
    assert set(s.live_blocks(running=False).tolist()) >= set(cached)
    s.reset_prefix_cache()
    assert s.live_blocks(running=True).tolist() == sorted(own)
    assert s.live_blocks(running=False).tolist() == []


def test_contents_are_not_lost_in_the_middle_of_a_step() -> None:
    s = scheduler()
    s.add_request([1, 2, 3], max_tokens=2)
    batch = s.schedule()
    assert batch is not None
    with pytest.raises(RuntimeError):
        s.recompute_all(swapped=False)
    update(s, batch)


# Order and fairness


def test_fcfs_serves_by_arrival() -> None:
    s = scheduler(max_num_seqs=1)
    late = s.add_request([1], max_tokens=1, arrival=10, priority=0)
    early = s.add_request([1], max_tokens=1, arrival=5, priority=9)
    assert list(finish_all(s)) == [early, late]


def test_fcfs_does_not_pass_over_a_large_request() -> None:
    s = scheduler(num_device_blocks=8, max_num_batched_tokens=64)
    running = s.add_request([1] * 20, max_tokens=4)
    step(s)
    large, small = s.add_request([2] * 20, max_tokens=1), s.add_request([3], max_tokens=1)
    assert list(finish_all(s)) == [running, large, small]


def test_a_request_that_did_not_fit_is_admitted_when_others_have_computed_its_prefix() -> None:
    s = scheduler(num_device_blocks=12, max_num_batched_tokens=8)
    first = s.add_request([1] * 28, max_tokens=20)
    second = s.add_request([1] * 28, max_tokens=1)
    while s.finish_reason(second) is None:
        assert s.finish_reason(first) is None
        step(s)


def test_priority_serves_lower_numbers_first() -> None:
    s = scheduler(max_num_seqs=1, scheduling_policy="priority")
    handles = [s.add_request([1], max_tokens=1, priority=p) for p in (2, 0, 1)]
    assert list(finish_all(s)) == [handles[1], handles[2], handles[0]]


def shortest_first(lengths_and_times: Sequence[tuple[int, float]], seconds_per_token: float) -> list[int]:
    """Return the indices of requests in the order in which they are served, one at a time, where all wait."""
    s = scheduler(max_num_seqs=1, scheduling_policy="shortest", recompute_seconds_per_token=seconds_per_token)
    index = {
        s.add_request([1] * length, max_tokens=1, arrival=s.config.arrival(length, now)): number
        for number, (length, now) in enumerate(lengths_and_times)
    }
    return [index[handle] for handle in finish_all(s)]


def test_of_a_burst_the_shortest_prompts_are_served_first_and_equal_ones_as_they_came() -> None:
    assert shortest_first([(30, 5.0), (4, 5.001), (9, 5.002), (4, 5.003)], 1e-3) == [1, 3, 2, 0]


@given(
    st.lists(st.tuples(st.integers(1, 60), st.floats(0, 2, allow_subnormal=False)), min_size=1, max_size=12),
    st.sampled_from([1e-4, 1e-3, 1e-2]),
)
def test_a_prompt_waits_for_none_that_came_later_than_20_times_its_own_computing_time(
    given_requests: list[tuple[int, float]], seconds_per_token: float
) -> None:
    requests = sorted(given_requests, key=lambda one: one[1])
    order = shortest_first(requests, seconds_per_token)
    for place, later in enumerate(order):
        for earlier in order[place + 1 :]:
            (length, came), (own, before) = requests[later], requests[earlier]
            if came > before:
                assert length < own
                assert came - before <= 20 * seconds_per_token * own + 1e-6


def test_without_the_policy_a_request_comes_after_all_others() -> None:
    assert scheduler().config.arrival(10, 5.0) is None


def test_a_request_is_passed_over_no_more_than_the_bound() -> None:
    bound = 4
    s = scheduler(max_num_seqs=1, scheduling_policy="priority", starvation_limit=bound)
    poor = s.add_request([1], max_tokens=1, priority=100)
    order: list[int] = []
    for _ in range(20):
        s.add_request([1], max_tokens=1, priority=0)
        batch = s.schedule()
        assert batch is not None
        order += list(update(s, batch))
    assert order.index(poor) == bound


def preemptions_of_the_last(starvation_limit: int) -> int:
    """How often the sequence of lowest rank is preempted while others, of higher rank, keep coming."""
    s = scheduler(
        num_device_blocks=6,
        max_model_len=24,
        max_num_seqs=3,
        starvation_limit=starvation_limit,
        preemption_mode="recompute",
    )
    last = s.add_request([9] * 7, max_tokens=12, arrival=1000)
    for k in range(100):
        if s.stats.num_waiting + s.stats.num_running < 3:
            s.add_request([k % 8] * 3, max_tokens=6, arrival=k)
        step(s)
    return s.num_preemptions(last)


def test_a_sequence_is_preempted_no_more_than_the_bound() -> None:
    assert preemptions_of_the_last(starvation_limit=1000) > 2
    assert preemptions_of_the_last(starvation_limit=2) == 2


# Abort and failure


def test_abort_while_waiting_running_and_swapped_frees_everything() -> None:
    s = scheduler(num_device_blocks=4, num_host_blocks=8, max_model_len=16, preemption_mode="swap", max_num_seqs=2)
    handles = [s.add_request([k] * 7, max_tokens=9) for k in (1, 2, 3)]
    while s.state(handles[1]) is not SequenceState.SWAPPED:
        step(s)
    assert [s.state(h) for h in handles] == [SequenceState.RUNNING, SequenceState.SWAPPED, SequenceState.WAITING]
    s.abort(handles)
    s.abort([handles[0], 12345])
    assert [s.finish_reason(h) for h in handles] == [FinishReason.ABORT] * 3
    assert (s.block_stats.device_used, s.block_stats.host_used) == (0, 0)
    assert not s.has_unfinished()
    s.check()


def test_results_of_an_aborted_request_are_ignored() -> None:
    s = scheduler()
    gone, stays = (s.add_request([k, k], max_tokens=5) for k in (1, 2))
    batch = s.schedule()
    assert batch is not None
    s.abort([gone])
    s.release([gone])
    assert update(s, batch, [7, 8]) == {}
    assert s.output_token_ids(stays).tolist() == [8]
    assert step(s).seq_ids.tolist() == [stays]


def test_abort_ends_forks_whose_prompt_is_not_computed() -> None:
    s = scheduler(max_num_batched_tokens=8)
    handle = s.add_request(list(range(12)), n=3)
    step(s)
    s.abort([handle])
    assert {s.finish_reason(handle + i) for i in range(3)} == {FinishReason.ABORT}
    assert s.schedule() is None
    s.check()


def test_a_prompt_with_dormant_forks_cannot_be_finished_alone() -> None:
    s = scheduler()
    handle = s.add_request([1, 2], n=2)
    with pytest.raises(InvalidRequest, match="abort"):
        s.finish(handle, FinishReason.STOP)
    assert s.finish(handle + 1, FinishReason.STOP)
    s.release([handle + 1])
    assert step(s).sample_seq_ids.tolist() == [handle]


def test_a_failed_step_ends_its_sequences_and_the_others_go_on() -> None:
    s = scheduler(max_num_seqs=2)
    inside = [s.add_request([k, k], max_tokens=5) for k in (1, 2)]
    outside = s.add_request([3, 3], max_tokens=2)
    assert s.schedule() is not None
    assert dict(s.fail_step()) == dict.fromkeys(inside, FinishReason.ERROR)
    s.check()
    assert finish_all(s) == {outside: FinishReason.LENGTH}


def test_a_failed_step_registers_nothing() -> None:
    s = scheduler()
    s.add_request(list(range(9)))
    assert s.schedule() is not None
    s.fail_step()
    assert s.block_stats.cached == 0


def test_a_sequence_swapped_out_in_a_failed_step_is_recomputed() -> None:
    s = scheduler(num_device_blocks=4, num_host_blocks=8, max_model_len=16, preemption_mode="swap")
    first, second = (s.add_request([k] * 7, max_tokens=9) for k in (1, 2))
    while True:
        batch = s.schedule()
        assert batch is not None
        if len(batch.swap_out):
            break
        update(s, batch)
    assert dict(s.fail_step()) == {first: FinishReason.ERROR}
    assert s.state(second) is SequenceState.WAITING
    assert s.block_stats.host_used == 0
    s.check()
    assert finish_all(s) == {second: FinishReason.LENGTH}


def test_a_step_must_be_answered_before_the_next() -> None:
    s = scheduler()
    s.add_request([1, 2])
    assert s.schedule() is not None
    with pytest.raises(RuntimeError, match="update"):
        s.schedule()


def test_a_sample_without_a_token_ends_its_sequence_alone() -> None:
    s = scheduler()
    lost, other = s.add_request([1, 2]), s.add_request([3, 4])
    batch = s.schedule()
    assert batch is not None
    assert update(s, batch, [-1, 5]) == {lost: FinishReason.ERROR}
    assert step(s).seq_ids.tolist() == [other]
    assert s.output_token_ids(lost).tolist() == []


def test_a_token_in_flight_is_a_placeholder_and_a_surplus_token_is_dropped() -> None:
    s = scheduler(steps_in_flight=1)
    ends, goes_on = s.add_request([1, 2], max_tokens=9, stop_token_ids=[7]), s.add_request([3, 4], max_tokens=3)
    first, second = s.schedule(), s.schedule()
    assert first is not None
    assert second is not None
    assert (second.token_ids.tolist(), second.positions.tolist()) == ([-1, -1], [2, 2])
    assert (second.state_rows.tolist(), second.sample_positions.tolist()) == ([0, 1], [1, 1])
    with pytest.raises(RuntimeError, match="2 steps"):
        s.schedule()
    assert update(s, first, [7, 5]) == {ends: FinishReason.STOP}
    assert s.block_stats.device_used == 1
    third = s.schedule()
    assert third is not None
    assert third.seq_ids.tolist() == [goes_on]
    assert update(s, second, [8, 6]) == {}
    assert s.output_token_ids(ends).tolist() == [7]
    assert s.schedule() is None, "the last token that max_tokens allows is in flight"
    assert update(s, third, [7]) == {goes_on: FinishReason.LENGTH}
    assert s.num_in_flight == 0


def test_a_request_that_needs_its_token_first_does_not_hold_the_others() -> None:
    s = scheduler(steps_in_flight=1)
    waits, runs = s.add_request([1, 2], plan_ahead=False), s.add_request([3, 4])
    first, second = s.schedule(), s.schedule()
    assert first is not None
    assert second is not None
    assert (first.seq_ids.tolist(), second.seq_ids.tolist()) == ([waits, runs], [runs])
    update(s, first, [5, 6])
    third = s.schedule()
    assert third is not None
    assert (third.seq_ids.tolist(), third.token_ids.tolist()) == ([waits, runs], [5, -1])


@pytest.mark.parametrize("tokens", [[], [1, 2], [-2], [1 << 31]])
def test_a_wrong_update_is_refused_and_changes_nothing(tokens: list[int]) -> None:
    s = scheduler()
    handle = s.add_request([1, 2], max_tokens=1)
    batch = s.schedule()
    assert batch is not None
    with pytest.raises(InvalidRequest):
        s.update(np.array(tokens, np.int64))
    assert update(s, batch, 3) == {handle: FinishReason.LENGTH}


# Refused requests


@pytest.mark.parametrize(
    ("prompt", "options", "error"),
    [
        ([], {}, EmptyPrompt),
        ([1] * 64, {}, PromptTooLong),
        ([1] * 32, {}, RequestNeverFits),
        ([1], {"n": 9}, RequestNeverFits),
        ([1], {"n": 0}, InvalidSamplingParams),
        ([1], {"n": 2, "pooling": True}, InvalidSamplingParams),
        ([1], {"max_tokens": 0}, InvalidSamplingParams),
        ([1], {"max_tokens": 2, "min_tokens": 3}, InvalidSamplingParams),
        ([1], {"min_tokens": -1}, InvalidSamplingParams),
        ([1, 100], {}, TokenOutOfRange),
        ([-1], {}, TokenOutOfRange),
        (np.array([1, 100]), {}, TokenOutOfRange),
        (np.array([1, -5], np.int32), {}, TokenOutOfRange),
        ([1 << 70], {}, TokenOutOfRange),
    ],
)
def test_requests_that_cannot_be_served_are_refused(prompt: Any, options: Any, error: type[HardpointError]) -> None:
    s = scheduler(num_device_blocks=8, vocab_size=100)
    healthy = s.add_request([1, 2], max_tokens=2)
    with pytest.raises(error):
        s.add_request(prompt, **options)
    assert finish_all(s) == {healthy: FinishReason.LENGTH}


def test_the_largest_prompts_that_fit_are_served() -> None:
    s = scheduler(num_device_blocks=8, watermark=0.5)
    handle = s.add_request([1] * 31)
    assert finish_all(s) == {handle: FinishReason.LENGTH}
    assert len(s.output_token_ids(handle)) == 1


@pytest.mark.parametrize("prompt", [["a"], [1.5], np.array([1.5]), np.array([[1]])])
def test_prompts_of_the_wrong_type_are_type_errors(prompt: Any) -> None:
    with pytest.raises(TypeError):
        scheduler().add_request(prompt)


@pytest.mark.parametrize(
    "options",
    [
        {"block_size": 0},
        {"num_device_blocks": 0},
        {"num_device_blocks": 1 << 30},
        {"num_host_blocks": -1},
        {"max_num_seqs": 0},
        {"max_num_batched_tokens": 4},
        {"max_model_len": 1},
        {"watermark": 1.0},
        {"preemption_mode": "both"},
        {"scheduling_policy": "random"},
        {"starvation_limit": 0},
        {"num_lookahead_slots": -1},
        {"enable_chunked_prefill": False},
        {"enable_chunked_prefill": False, "max_num_batched_tokens": 64, "long_prefill_token_threshold": 8},
        {"enable_chunked_prefill": False, "max_num_batched_tokens": 64, "mixed_prefill_tokens": 8},
        {"mixed_prefill_tokens": 0},
    ],
)
def test_contradictory_settings_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        scheduler(**options)


def test_a_fork_without_a_token_ends_with_an_error_alone() -> None:
    s = scheduler()
    forked, fine = s.add_request([4, 5], n=2, max_tokens=4), s.add_request([6], max_tokens=2)
    batch = s.schedule()
    assert batch is not None
    assert update(s, batch, [-1, 7, 8]) == {forked: FinishReason.ERROR}
    batch = s.schedule()
    assert batch is not None
    assert batch.sample_seq_ids.tolist() == [forked + 1, fine]
    assert update(s, batch, [-1, 9]) == {forked + 1: FinishReason.ERROR, fine: FinishReason.LENGTH}
    assert s.output_token_ids(forked).tolist() == []
    assert s.output_token_ids(forked + 1).tolist() == [7]
    assert not s.has_unfinished()
