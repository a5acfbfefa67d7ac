"""Which decodes are captured, and how steps are padded to them."""

from __future__ import annotations

import itertools
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hardpoint.interfaces import StepBatch
from hardpoint.interfaces.batch import in_groups
from hardpoint.worker.step_graphs import GraphShape, PaddedStep, graph_sizes, mixed_sizes

SIZE = 6
TABLE = np.arange(8 * 4, dtype=np.int32).reshape(8, 4)


@pytest.mark.parametrize(
    ("most", "sizes"),
    [
        (1, (1,)),
        (3, (1, 2, 3)),
        (8, (1, 2, 4, 8)),
        (20, (1, 2, 4, 8, 16, 20)),
        (48, (1, 2, 4, 8, 16, 32, 48)),
    ],
)
def test_sizes_end_with_the_most_that_a_step_can_have(most: int, sizes: tuple[int, ...]) -> None:
    assert graph_sizes(most) == sizes


def test_steps_of_more_than_512_sequences_are_not_captured() -> None:
    assert graph_sizes(4096) == graph_sizes(512)
    assert graph_sizes(512)[-2:] == (496, 512)


@pytest.mark.parametrize(
    ("most", "sizes"),
    [(1, (1,)), (16, (16,)), (40, (16, 32, 40)), (256, (16, 32, 64, 128, 192, 256))],
)
def test_steps_with_prompts_end_with_the_most_tokens_that_a_step_can_have(most: int, sizes: tuple[int, ...]) -> None:
    assert mixed_sizes(most) == sizes


def test_steps_of_more_than_2048_tokens_are_not_captured() -> None:
    sizes = mixed_sizes(8192)
    assert sizes[-1] == 2048
    # Beyond what the weights' bytes take anyway, padding is less than half of the tokens.
    assert all(larger <= 1.5 * smaller for smaller, larger in itertools.pairwise(sizes) if smaller >= 128)


def test_a_step_with_prompts_has_no_more_sequences_and_samples_than_tokens() -> None:
    small, large = GraphShape.of_tokens(16, 72), GraphShape.of_tokens(512, 72)
    assert (small.seqs, small.rows, large.seqs, large.rows) == (17, 16, 73, 72)
    keys = {GraphShape.of_decodes(16).key, small.key, large.key}
    assert len(keys) == 3


def decodes(rows: list[int], contexts: list[int]) -> StepBatch:
    count = len(rows)
    lengths = np.asarray(contexts[:count], np.int32)
    nothing = np.zeros((0, 2), np.int32)
    return StepBatch(
        token_ids=np.arange(count, dtype=np.int64) + 100,
        positions=lengths.astype(np.int64) - 1,
        slot_mapping=lengths + 7,
        query_start=np.arange(count + 1, dtype=np.int32),
        context_lens=lengths,
        block_table=TABLE,
        rows=np.asarray(rows, np.int32),
        seq_ids=np.arange(count, dtype=np.int64),
        num_decodes=count,
        sample_rows=np.arange(count, dtype=np.int32),
        sample_seq_ids=np.arange(count, dtype=np.int64),
        swap_out=nothing,
        swap_in=nothing,
        copies=nothing,
        preempted=np.zeros(0, np.int64),
    )


def padded() -> PaddedStep:
    buffer = np.full(2 * SIZE, -9, np.int64)
    return PaddedStep(buffer[:SIZE], buffer[SIZE:], (8, 4))


def plain(step: StepBatch) -> dict[str, Any]:
    return {field.name: np.asarray(getattr(step, field.name)).tolist() for field in fields(step)}


BATCHES = st.lists(
    st.permutations(range(8)).flatmap(
        lambda rows: st.tuples(
            st.integers(1, SIZE).map(lambda count: rows[:count]), st.lists(st.integers(1, 16), min_size=8, max_size=8)
        )
    ),
    min_size=1,
    max_size=5,
)


@given(BATCHES)
def test_a_step_holds_its_batch_and_padding_and_nothing_of_those_before(batches: Any) -> None:
    step = padded()
    for rows, contexts in batches:
        batch = decodes(rows, contexts)
        count, found = len(rows), step.fill(batch)
        for name in ("token_ids", "positions", "slot_mapping", "context_lens", "rows"):
            assert getattr(found, name)[:count].tolist() == getattr(batch, name).tolist()
        assert found.query_start.tolist() == [*range(count + 1), *[count] * (SIZE - count)]
        assert found.slot_mapping[count:].tolist() == [-1] * (SIZE - count)
        assert not found.context_lens[count:].any()
        assert (found.num_decodes, found.num_tokens, found.num_seqs) == (count, SIZE, SIZE)
        assert found.block_table is TABLE
        assert plain(found) == plain(padded().fill(batch))


@given(st.lists(st.lists(st.integers(1, 4), max_size=3), min_size=1, max_size=5))
def test_a_step_with_prompts_holds_its_batch_and_padding_and_nothing_of_those_before(batches: list[list[int]]) -> None:
    tokens, seqs = 12, 4
    buffer = np.full(2 * tokens, -9, np.int64)
    step = PaddedStep(buffer[:tokens], buffer[tokens:], (8, 4), 2, seqs)
    for queries in batches:
        count, used = len(queries), sum(queries)
        one = decodes([*range(count)], [9, 9, 9])
        batch = replace(
            one,
            token_ids=np.arange(used, dtype=np.int64) + 50,
            positions=np.arange(used, dtype=np.int64),
            slot_mapping=np.arange(used, dtype=np.int32),
            query_start=np.cumsum([0, *queries]).astype(np.int32),
            num_decodes=0,
        )
        found = step.fill(in_groups(batch, 2, 4))
        assert found.query_start.tolist() == [*batch.query_start.tolist(), *[used] * (seqs - count)]
        assert found.token_ids.tolist() == [*batch.token_ids.tolist(), *[0] * (tokens - used)]
        assert found.positions.tolist() == [*range(used), *[0] * (tokens - used)]
        assert found.context_lens.tolist() == [*[9] * count, *[0] * (seqs - count)]
        for own in found.by_group():
            assert set(own.slot_mapping[used:].tolist()) <= {-1}
            assert (own.slot_mapping[:used] >= 0).all()


def test_every_kv_cache_group_has_its_slots_and_table() -> None:
    buffer = np.zeros(2 * SIZE, np.int64)
    step = PaddedStep(buffer[:SIZE], buffer[SIZE:], (8, 4), num_groups=3)
    for rows in ([2, 5, 0], [1]):
        batch = in_groups(decodes(rows, [9, 4, 16]), 3, 4)
        found, count = step.fill(batch), len(rows)
        for own, wanted in zip(found.by_group(), batch.by_group(), strict=True):
            assert own.slot_mapping.tolist() == [*wanted.slot_mapping.tolist(), *[-1] * (SIZE - count)]
            assert own.block_table is wanted.block_table


def test_a_step_is_all_padding_before_its_first_batch() -> None:
    empty = padded().empty
    assert (empty.num_decodes, empty.query_start.tolist()) == (0, [0] * (SIZE + 1))
    assert set(empty.slot_mapping.tolist()) == {-1}
    assert not empty.token_ids.any()
    assert empty.block_table.shape == TABLE.shape


def test_another_block_table_takes_the_place_of_the_one_before() -> None:
    step, other = padded(), TABLE.copy()
    step.fill(decodes([1], [4]))
    batch = decodes([1], [4])
    object.__setattr__(batch, "block_table", other)
    assert step.fill(batch).block_table is other
