"""A step's metadata: its division into calls of the attention operator, and the static arrays of steps that are captured."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch

from hardpoint.interfaces import AttentionPlan
from hardpoint.interfaces.errors import InvalidBatch
from hardpoint_ascend.capabilities import MAX_SEQUENCES, MAX_TOKENS

if TYPE_CHECKING:
    from torch import Tensor

    from hardpoint.interfaces.batch import Int32Array


@dataclass(frozen=True)
class Call:
    """Consecutive sequences of a step that the attention operator takes at once.

    Attributes:
        begin, end: their tokens in the step.
        query_ends: end of each sequence's queries, counted from `begin`.
        context_lens: keys of each sequence.
        block_table: int32[sequences, blocks] on the device.
    """

    begin: int
    end: int
    query_ends: list[int]
    context_lens: list[int]
    block_table: Tensor


@dataclass(frozen=True)
class AscendStep:
    """Metadata of one step.

    Attributes:
        plan: what the step keeps to.
        num_tokens: rows of the step's queries, keys and values.
        query_start: int32[sequences + 1], where each sequence's queries begin; those that have none are left out.
        context_lens: int32[sequences], keys of each sequence.
        block_table: int32[sequences, blocks] on the device.
        slots: int32[written] on the device; in a step that can be captured all of them, -1 for padding.
        written: int64[written] on the device, the rows that are written; None for all.
        num_blocks: blocks that a cache must have for the step.
        mask: bool[2048, 2048] on the device, true above the diagonal.
    """

    plan: AttentionPlan
    num_tokens: int
    query_start: Int32Array
    context_lens: Int32Array
    block_table: Tensor
    slots: Tensor
    written: Tensor | None
    num_blocks: int
    mask: Tensor
    _calls: dict[int, tuple[Call, ...]] = field(default_factory=dict)

    def calls(self, cache_blocks: int) -> tuple[Call, ...]:
        """Return how the step is divided for a cache of `cache_blocks` blocks; nearly always into one call.

        The operator takes a limited number of sequences and tokens, and refuses sequences which together have more blocks than the
        cache, even when they share them.
        """
        if cache_blocks not in self._calls:
            blocks = -(-self.context_lens // self.plan.block_size)
            edges, taken = [0], 0
            for seq, count in enumerate(blocks.tolist()):
                first = edges[-1]
                is_full = (
                    taken + count > cache_blocks
                    or seq - first >= MAX_SEQUENCES
                    or self.query_start[seq + 1] - self.query_start[first] > MAX_TOKENS
                )
                if is_full and seq > first:
                    edges.append(seq)
                    taken = 0
                taken += count
            edges.append(len(blocks))
            self._calls[cache_blocks] = tuple(self._call(*pair) for pair in pairwise(edges) if pair[1] > pair[0])
        return self._calls[cache_blocks]

    def _call(self, first: int, last: int) -> Call:
        begin, end = int(self.query_start[first]), int(self.query_start[last])
        return Call(
            begin,
            end,
            (self.query_start[first + 1 : last + 1] - begin).tolist(),
            self.context_lens[first:last].tolist(),
            self.block_table[first:last],
        )


@dataclass(frozen=True)
class StaticStep:
    """Where the steps that are captured, and those that replay them, find their slots and blocks.

    Attributes:
        plan: what the steps keep to.
        slots: int32[sequences] on the device.
        block_table: int32[sequences, blocks of the longest context] on the device.
        mask: as in `AscendStep`.
    """

    plan: AttentionPlan
    slots: Tensor
    block_table: Tensor
    mask: Tensor

    @classmethod
    def room(cls, plan: AttentionPlan, num_seqs: int, mask: Tensor) -> StaticStep:
        """Allocate room for up to the given number of sequences."""
        columns = -(-plan.request.max_context // plan.block_size)
        slots = torch.empty(num_seqs, dtype=torch.int32, device=mask.device)
        table = torch.empty(num_seqs, columns, dtype=torch.int32, device=mask.device)
        return cls(plan, slots, table, mask)

    def has_room(self, plan: AttentionPlan, queries: Int32Array, num_tokens: int) -> bool:
        """Return whether a step is one of decodes, and of padding after them, that fits."""
        return (
            plan is self.plan
            and num_tokens == len(queries) <= len(self.slots)
            and np.array_equal(queries, np.arange(num_tokens) < np.count_nonzero(queries))
        )

    def fill(self, table: Int32Array, context_lens: Int32Array, slots: Int32Array, num_blocks: int) -> AscendStep:
        """Write a step and return it; it holds until the next one is written.

        Args:
            table: int32[decodes, blocks].
            context_lens: int32[decodes].
            slots: int32[tokens], -1 for padding.
            num_blocks: blocks that a cache must have.
        """
        decodes, size, columns = len(table), len(slots), self.block_table.shape[1]
        if table.shape[1] > columns:
            raise InvalidBatch(
                f"a context has up to {self.plan.request.max_context} tokens",
                found=f"one of {int(context_lens.max())} tokens",
            )
        blocks = np.zeros((size, columns), np.int32)
        blocks[:decodes, : table.shape[1]] = table
        lengths = np.ones(size, np.int32)
        lengths[:decodes] = context_lens
        _send(slots, self.slots[:size])
        _send(blocks, self.block_table[:size])
        return AscendStep(
            plan=self.plan,
            num_tokens=size,
            query_start=np.arange(size + 1, dtype=np.int32),
            context_lens=lengths,
            block_table=self.block_table[:size],
            slots=self.slots[:size],
            written=None,
            num_blocks=num_blocks,
            mask=self.mask,
        )


def needed_blocks(
    table: Int32Array, rows: Int32Array, context_lens: Int32Array, block_size: int, unseen: Int32Array
) -> Int32Array:
    """Return int32[sequences, blocks]: each sequence's own blocks, then zeros, since the operator reads no block number's validity.

    Args:
        unseen: int32[sequences], how many of its first blocks are left out.
    """
    needed = -(-context_lens // block_size)
    width = int(needed.max(initial=0))
    if width > table.shape[1]:
        raise InvalidBatch(
            f"a context of {int(context_lens.max())} tokens takes {width} blocks",
            found=f"a block table with {table.shape[1]} columns",
        )
    columns = unseen[:, None] + np.arange(int((needed - unseen).max(initial=0)))
    is_owned = columns < needed[:, None]
    owned = np.where(is_owned, table[rows[:, None], np.where(is_owned, columns, 0)], 0).astype(np.int32)
    if owned.min(initial=0) < 0:
        raise InvalidBatch("blocks are numbered from 0", found=f"block {int(owned.min())} in the block table")
    return owned


def _send(array: Int32Array, tensor: Tensor) -> None:
    """Copy a host's array to the device without waiting for it."""
    host = torch.from_numpy(array)
    tensor.copy_(host.pin_memory() if tensor.device.type != "cpu" else host, non_blocking=True)
