"""One step as a message: the scheduler's arrays in two blocks of numbers, and of the block table only what changed.

The block table is persistent and large; a step changes a few entries of it. The encoder remembers what it sent, and the decoder
keeps a table of its own, so the two belong together from the first step on, and no step may be left out.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import msgspec
import numpy as np

from hardpoint.executor.messages import Buffer, decode, encode
from hardpoint.interfaces.batch import (
    Int32Array,
    SequencePooling,
    SequenceSampling,
    StepBatch,
    StepInput,
)
from hardpoint.interfaces.errors import MalformedMessage

_LONG = ("token_ids", "positions", "seq_ids", "sample_seq_ids", "preempted")
"""int64 arrays, in the order in which they are sent."""

_SHORT = ("slot_mapping", "query_start", "context_lens", "rows", "sample_rows")
"""int32 arrays of one axis."""

_PAIRS = ("swap_out", "swap_in", "copies")
"""int32 arrays of two columns."""


_NOTHING = np.empty(0, np.int32)


class _Step(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """One step.

    Attributes:
        sizes: numbers in each array, in the order of `_LONG`, `_SHORT`, `_PAIRS`, then of the table's changed places and values.
        table: shape of the block table.
        changes: places count within the table as one row of numbers.
    """

    num_decodes: int
    sizes: tuple[int, ...]
    table: tuple[int, int]
    long: Any
    short: Any
    new_sequences: tuple[SequenceSampling, ...]
    finished_seq_ids: tuple[int, ...]
    pooling: dict[int, SequencePooling]


class StepEncoder:
    """Writes the steps of one engine.

    Attributes:
        block_size: tokens per KV block; bounds the part of the table that is compared. 1 is right for any.
    """

    def __init__(self) -> None:
        self.block_size = 1
        self._table: Int32Array = np.empty((0, 0), np.int32)

    def encode(self, step: StepInput) -> list[Buffer]:
        """Return a step as a message; raises MalformedMessage where an array is not what the contract says."""
        batch = step.batch
        places, values = self._changes(batch)
        long = [getattr(batch, name) for name in _LONG]
        short = [getattr(batch, name) for name in _SHORT]
        short += [getattr(batch, name).reshape(-1) for name in _PAIRS]
        short += [places, values]
        try:
            wire = _Step(
                num_decodes=batch.num_decodes,
                sizes=tuple(map(len, long + short)),
                table=batch.block_table.shape,
                long=np.concatenate(long, dtype=np.int64, casting="no"),
                short=np.concatenate(short, dtype=np.int32, casting="no"),
                new_sequences=tuple(map(_with_list, step.new_sequences)),
                finished_seq_ids=step.finished_seq_ids,
                pooling=dict(step.pooling),
            )
        except (TypeError, ValueError) as error:
            raise MalformedMessage("a step's arrays are not as the contract says", found=str(error)) from error
        return encode(wire)

    def _changes(self, batch: StepBatch) -> tuple[Int32Array, Int32Array]:
        """Return places and values of what this step's sequences use of the table and was not sent before.

        Rows are compared from the first to the last that is used, since a slice of the table is no copy.
        """
        table, rows = batch.block_table, batch.rows
        if self._table.shape != table.shape:
            self._table = np.zeros(table.shape, np.int32)
        if not len(rows):
            return _NOTHING, _NOTHING
        used = min(-(-int(batch.context_lens.max()) // self.block_size), table.shape[1])
        first, last = int(rows.min()), int(rows.max())
        current = table[first : last + 1, :used]
        found = np.flatnonzero(current != self._table[first : last + 1, :used])
        if not len(found):
            return _NOTHING, _NOTHING
        row, column = np.divmod(found.astype(np.int32), np.int32(used))
        places = (row + np.int32(first)) * np.int32(table.shape[1]) + column
        values = current[row, column]
        self._table.reshape(-1)[places] = values
        return places, values


class StepDecoder:
    """Reads the steps that one `StepEncoder` wrote."""

    def __init__(self) -> None:
        self._table: Int32Array = np.empty((0, 0), np.int32)

    def decode(self, message: Buffer) -> StepInput:
        """Return the step of a message; raises MalformedMessage.

        `block_table` is one array through all steps, the other arrays are views of the message.
        """
        wire: _Step = decode(message, _Step)
        long = _split(wire.long, np.int64, wire.sizes[: len(_LONG)])
        short = _split(wire.short, np.int32, wire.sizes[len(_LONG) :])
        if len(long) != len(_LONG) or len(short) != len(_SHORT) + len(_PAIRS) + 2 or min(wire.table) < 0:
            raise MalformedMessage("a step has not the arrays of a step", found=f"sizes {wire.sizes}")
        *short, places, values = short
        if self._table.shape != wire.table:
            self._table = np.zeros(wire.table, np.int32)
        try:
            self._table.reshape(-1)[places] = values
            pairs = [array.reshape(-1, 2) for array in short[len(_SHORT) :]]
        except (IndexError, ValueError) as error:
            raise MalformedMessage("a step's block table or pairs do not fit", found=str(error)) from error
        token_ids, positions, seq_ids, sample_seq_ids, preempted = long
        slot_mapping, query_start, context_lens, rows, sample_rows = short[: len(_SHORT)]
        swap_out, swap_in, copies = pairs
        batch = StepBatch(
            token_ids=token_ids,
            positions=positions,
            slot_mapping=slot_mapping,
            query_start=query_start,
            context_lens=context_lens,
            block_table=self._table,
            rows=rows,
            seq_ids=seq_ids,
            num_decodes=wire.num_decodes,
            sample_rows=sample_rows,
            sample_seq_ids=sample_seq_ids,
            swap_out=swap_out,
            swap_in=swap_in,
            copies=copies,
            preempted=preempted,
        )
        return StepInput(batch, wire.new_sequences, wire.finished_seq_ids, wire.pooling)


def _with_list(sampling: SequenceSampling) -> SequenceSampling:
    if isinstance(sampling.prompt_token_ids, (list, tuple)):
        return sampling
    return replace(sampling, prompt_token_ids=[int(token) for token in sampling.prompt_token_ids])


def _split(block: Any, dtype: type[np.generic], sizes: tuple[int, ...]) -> list[Any]:
    if not isinstance(block, np.ndarray) or block.dtype != dtype or block.ndim != 1 or min(sizes, default=0) < 0:
        raise MalformedMessage("a step's numbers are not of their type", found=f"{type(block).__name__}, sizes {sizes}")
    ends = list(accumulate(sizes, initial=0))
    if ends[-1] != len(block):
        raise MalformedMessage("a step's numbers are not as many as it says", found=f"{len(block)}, sizes {sizes}")
    return [block[start:end] for start, end in pairwise(ends)]
