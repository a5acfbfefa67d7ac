"""A step's metadata on the device: what kernels will read, at addresses that captured launches keep."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hardpoint.interfaces import AttentionLayer, AttentionPlan, AttentionRequest, DType, KVCacheSpec, StepBatch
from hardpoint.interfaces.errors import InvalidBatch
from hardpoint.triton.step import Geometry, Step, StepBuilder
from hardpoint.triton.work import SplitRule

BLOCK_SIZE = 16
RULE = SplitRule(block_n=16, min_tiles=2, max_splits=4)


def builder(*, window: int | None = None, other: int | None = 0, kernel_writes: bool = False) -> StepBuilder:
    layers = (AttentionLayer(4, 2, 16, 0.25, window), AttentionLayer(2, 2, 16, 0.25, window if other == 0 else other))
    request = AttentionRequest(layers, DType.FLOAT16, DType.FLOAT16, BLOCK_SIZE, 256)
    plan = AttentionPlan(request, KVCacheSpec(2, BLOCK_SIZE, 2, 16, DType.FLOAT16))
    geometry = Geometry.of(plan, RULE, prefill_rows=32, programs=1000)
    return StepBuilder(plan, geometry, torch.device("cpu"), kernel_writes)


def batch(queries: list[int], contexts: list[int], **changed: Any) -> StepBatch:
    """Return a batch whose sequences lie in the table's rows in falling order; sequence s has the blocks 10 s, 10 s + 1, ..."""
    seqs, tokens = len(queries), sum(queries)
    table = np.zeros((seqs + 1, 20), np.int32)
    rows = np.arange(seqs, 0, -1, dtype=np.int32)
    for seq, row in enumerate(rows):
        table[row] = 10 * seq + np.arange(20)
    nothing = np.zeros((0, 2), np.int32)
    values: dict[str, Any] = {
        "token_ids": np.zeros(tokens, np.int64),
        "positions": np.zeros(tokens, np.int64),
        "slot_mapping": np.arange(tokens, dtype=np.int32),
        "query_start": np.cumsum([0, *queries]).astype(np.int32),
        "context_lens": np.array(contexts, np.int32),
        "block_table": table,
        "rows": rows,
        "seq_ids": np.arange(seqs, dtype=np.int64),
        "num_decodes": next(
            (i for i, (q, c) in enumerate(zip(queries, contexts, strict=True)) if q != 1 or c < 2), seqs
        ),
        "sample_rows": np.zeros(0, np.int32),
        "sample_seq_ids": np.zeros(0, np.int64),
        "swap_out": nothing,
        "swap_in": nothing,
        "copies": nothing,
        "preempted": np.zeros(0, np.int64),
    }
    return StepBatch(**(values | changed))


def decoded(step: Step) -> list[list[int]]:
    return step.items[: 2 * int(step.header[0])].view(-1, 2).tolist()


def tables(step: Step, contexts: list[int]) -> list[list[int]]:
    width = int(step.header[1])
    return [step.tables[seq * width :][: -(-c // BLOCK_SIZE)].tolist() for seq, c in enumerate(contexts)]


def test_metadata_of_a_mixed_step() -> None:
    contexts = [100, 20, 60, 5]
    step = builder().build(batch([1, 1, 40, 5], contexts))
    assert step.slots[:47].tolist() == list(range(47))
    assert step.contexts[:4].tolist() == contexts
    assert step.starts[:5].tolist() == [0, 1, 2, 42, 47]
    # 100 keys are 7 tiles of 16, in parts of two.
    assert decoded(step) == [[0, 0], [0, 1], [0, 2], [0, 3], [1, 0]]
    assert tables(step, contexts) == [list(range(7)), [10, 11], [20, 21, 22, 23], [30]]
    # Rows of the tiles are heads of tokens: a group of two has twice as many as a group of one.
    assert {group: len(items) // 2 for group, items in step.prefills.items()} == {1: 3, 2: 4}
    assert step.partials.values.shape == (2, 4, 4, 16)
    assert step.programs == 5 * 2


def test_arrays_begin_at_sixteen_bytes() -> None:
    step = builder().build(batch([1, 3, 1], [7, 9, 1]))
    for part in (step.slots, step.contexts, step.starts, step.items, step.tables, *step.prefills.values()):
        assert part.data_ptr() % 16 == step.header.data_ptr() % 16


def test_metadata_do_not_follow_the_scheduler_s_buffers() -> None:
    made = batch([1, 1], [30, 40])
    step = builder().build(made)
    made.context_lens[:] = 0
    made.block_table[:] = 0
    assert step.contexts[:2].tolist() == [30, 40]
    assert tables(step, [30, 40]) == [[0, 1], [10, 11, 12]]


def test_windows_of_all_layers_shorten_the_list_of_work() -> None:
    assert len(decoded(builder().build(batch([1], [250])))) == 4
    assert len(decoded(builder(window=40).build(batch([1], [250])))) == 2


def test_the_list_of_work_has_the_parts_of_every_layer() -> None:
    # 130 keys are 9 tiles in parts of three; the last 110 lie in 8 tiles, in parts of two.
    made = builder(window=110, other=None)
    assert len(decoded(made.build(batch([1], [130])))) == 4


class Writes(TorchDispatchMode):
    """The names of the operators that wrote to a tensor's memory."""

    def __init__(self) -> None:
        super().__init__()
        self.by_address: dict[int, set[str]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self.by_address.setdefault(value.data_ptr(), set()).add(str(func.overloadpacket))
        if kwargs and "out" in kwargs:
            self.by_address.setdefault(kwargs["out"].data_ptr(), set()).add(str(func.overloadpacket))
        return result


@pytest.mark.parametrize(("kernel_writes", "writer"), [(False, "aten.copy_"), (True, "aten.add")])
def test_metadata_of_captured_steps_are_written_by_a_kernel_where_launches_miss_copies(
    kernel_writes: bool, writer: str
) -> None:
    made = builder(kernel_writes=kernel_writes)
    made.reserve(4)
    made.build(batch([1], [20]))
    with Writes() as writes:
        step = made.build(batch([1, 1], [30, 40]))
    assert writes.by_address[step.header.data_ptr()] == {writer}
    assert step.contexts[:2].tolist() == [30, 40]
    own = made.build(batch([3], [3]))  # not captured: its kernels are launched after the copy, and see it
    assert own.contexts[:1].tolist() == [3]


def test_reserved_metadata_stay_at_their_addresses() -> None:
    made = builder()
    made.reserve(4)
    one = made.build(batch([1, 1, 1], [200, 20, 30]))
    places = [part.data_ptr() for part in (one.header, one.slots, one.contexts, one.items, one.tables)]
    scratch = one.partials.values.data_ptr()
    other = made.build(batch([1, 1], [40, 256]))
    assert places == [
        part.data_ptr() for part in (other.header, other.slots, other.contexts, other.items, other.tables)
    ]
    assert other.partials.values.data_ptr() == scratch
    # The captured step reads the new batch, and nothing of the sequences that are gone.
    assert one.contexts[:4].tolist() == [40, 256, 0, 0]
    assert one.slots[:4].tolist() == [0, 1, -1, -1]
    assert decoded(one) == [[0, 0], [0, 1], [1, 0], [1, 1], [1, 2], [1, 3]]
    assert tables(one, [40, 256]) == [[0, 1, 2], list(range(10, 26))]


def test_padding_of_a_captured_step_has_no_work() -> None:
    made = builder()
    made.reserve(4)
    padded = batch([1, 1, 0], [40, 50, 0], slot_mapping=np.array([5, 6, -1], np.int32), token_ids=np.zeros(3, np.int64))
    step = made.build(padded)
    assert step.num_decodes == 3
    assert {seq for seq, _ in decoded(step)} == {0, 1}
    assert step.slots[:4].tolist() == [5, 6, -1, -1]


@pytest.mark.parametrize("queries", [[1, 2], [1] * 5], ids=["prompt", "too-many"])
def test_steps_that_were_not_reserved_for_have_metadata_of_their_own(queries: list[int]) -> None:
    made = builder()
    made.reserve(4)
    static = made.build(batch([1], [20]))
    step = made.build(batch(queries, [30] * len(queries)))
    assert step.header.data_ptr() != static.header.data_ptr()
    assert static.contexts[:1].tolist() == [20]


def mixed(queries: list[int], contexts: list[int], tokens: int, seqs: int) -> StepBatch:
    """Return a batch padded to so many tokens and sequences."""
    empty, decodes = [0] * (seqs - len(queries)), sum(q == 1 for q in queries)
    slots = np.full(tokens, -1, np.int32)
    slots[: sum(queries)] = np.arange(sum(queries))
    padding = {"slot_mapping": slots, "token_ids": np.zeros(tokens, np.int64), "num_decodes": decodes}
    return batch([*queries, *empty], [*contexts, *empty], **padding)


def test_reserved_metadata_of_steps_with_prompts_stay_at_their_addresses() -> None:
    made = builder()
    made.reserve(4)
    made.reserve_mixed(4, [2, 64])
    one = made.build(mixed([], [], 64, 5))
    other = made.build(mixed([1, 40, 5], [200, 60, 5], 64, 5))

    def arrays(step: Step) -> list[Any]:
        parts = (step.header, step.slots, step.contexts, step.starts, step.items, step.decode_contexts, step.tables)
        return [*parts, *step.prefills.values(), step.partials.values]

    for before, after in zip(arrays(one), arrays(other), strict=True):
        assert (before.data_ptr(), before.shape) == (after.data_ptr(), after.shape)
    assert (one.programs, one.num_decodes, one.num_tokens) == (other.programs, other.num_decodes, other.num_tokens)
    # The captured step reads the new batch, and nothing of the one before.
    assert one.slots[:64].tolist() == [*range(46), *[-1] * 18]
    assert one.contexts[:5].tolist() == [200, 60, 5, 0, 0]
    assert one.decode_contexts[:5].tolist() == [200, 0, 0, 0, 0]
    assert one.starts[:6].tolist() == [0, 1, 41, 46, 46, 46]
    assert {seq for seq, _ in decoded(one)} == {0}
    tiles = {group: items.view(-1, 2).tolist() for group, items in one.prefills.items()}
    assert tiles == {1: [[1, 1], [1, 0], [2, 0], *[[4, 0]] * 3], 2: [[1, 2], [1, 1], [1, 0], [2, 0], *[[4, 0]] * 4]}
    assert tables(one, [200, 60, 5]) == [list(range(13)), [10, 11, 12, 13], [20]]
    # Nothing of the last sequence is before the first query, which kernels read for a tile without any.
    made.build(mixed([], [], 64, 5))
    assert one.starts[:6].tolist() == [0, 0, 0, 0, 1, 1]


def test_steps_are_captured_ones_by_their_tokens_and_sequences_alone() -> None:
    made = builder()
    made.reserve(4)
    made.reserve_mixed(4, [2, 64])
    small, large = made.build(mixed([], [], 2, 3)), made.build(mixed([], [], 64, 5))
    decodes = made.build(batch([1, 1, 1], [30, 40, 50]))
    assert [step.num_decodes for step in (small, large, decodes)] == [2, 4, 3]
    assert [bool(step.prefills) for step in (small, large, decodes)] == [True, True, False]
    # They are never in use together.
    assert len({step.header.data_ptr() for step in (small, large, decodes)}) == 1
    for own in (
        batch([1, 40], [30, 40]),
        batch([61, 1, 1, 1], [61, 1, 1, 1]),
        batch([60, 1, 1, 1, 1], [60, 1, 1, 1, 1]),
    ):
        assert made.build(own).header.data_ptr() != large.header.data_ptr()
    made.reserve(4)  # for graphs that are captured anew
    assert made.build(mixed([3], [3], 64, 5)).header.data_ptr() != large.header.data_ptr()


@pytest.mark.parametrize(
    ("what", "changed"),
    [
        ("slot_mapping", {"slot_mapping": np.zeros(3, np.int32)}),
        ("context_lens", {"context_lens": np.zeros(1, np.int32)}),
        ("rising", {"query_start": np.array([0, 2, 1], np.int32)}),
        ("one query", {"query_start": np.array([0, 0, 2], np.int32)}),
        ("includes its queries", {"context_lens": np.array([0, 30], np.int32)}),
        ("rows", {"rows": np.array([0, 3], np.int32)}),
        ("rows", {"rows": np.array([-1, 1], np.int32)}),
        ("up to 256", {"context_lens": np.array([257, 30], np.int32)}),
        ("numbered from 0", {"block_table": np.full((3, 20), -1, np.int32)}),
        ("two dimensions", {"block_table": np.zeros(20, np.int32)}),
    ],
)
def test_arrays_that_do_not_fit_together_are_refused(what: str, changed: dict[str, Any]) -> None:
    with pytest.raises(InvalidBatch, match=what):
        builder().build(batch([1, 1], [20, 30], **changed))


def test_entries_beyond_a_context_are_not_looked_at() -> None:
    made = batch([1], [20])
    made.block_table[:, 2:] = -7
    assert tables(builder().build(made), [20]) == [[0, 1]]


def test_an_empty_step_has_no_work() -> None:
    step = builder().build(batch([], []))
    assert (step.programs, step.prefills, step.num_tokens) == (0, {}, 0)
