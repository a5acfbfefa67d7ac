"""One step and its output as messages: the scheduler's arrays one after the other, and of the block table only what changed.

The block table is persistent and large; a step changes a few entries of it. The encoder remembers what it sent, and the decoder
keeps a table of its own, so the two belong together from the first step on, and no step may be left out.

This is on the way of every step, so it has a form of its own: a row of 64-bit numbers (decodes, shape of the table, bytes of what comes
last, numbers in each array), the int64 arrays, the int32 arrays, and last, where there is any, what belongs to single sequences.
"""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from hardpoint.executor.messages import Buffer, decode, encode
from hardpoint.interfaces.batch import (
    FloatArray,
    Int32Array,
    SequencePooling,
    SequenceSampling,
    StepBatch,
    StepInput,
    StepOutput,
    TokenLogprobs,
)
from hardpoint.interfaces.errors import MalformedMessage

_NUM_LONG, _NUM_SHORT = 5, 10
_SIZES = 4 + _NUM_LONG + _NUM_SHORT
_HEADER = struct.Struct(f"<{_SIZES}q")
_LONG = [np.dtype(np.int64)] * _NUM_LONG
_SHORT = [np.dtype(np.int32)] * _NUM_SHORT
_OUTPUT_HEADER = struct.Struct("<qq")
_NOTHING = np.empty(0, np.int32)


class _Sequences(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """What belongs to single sequences; most steps have none of it."""

    new: tuple[SequenceSampling, ...] = ()
    finished: tuple[int, ...] = ()
    pooling: dict[int, SequencePooling] = {}


class _Extras(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """What few outputs have."""

    logprobs: dict[int, TokenLogprobs]
    embeddings: dict[int, FloatArray]


def encode_output(output: StepOutput) -> list[Buffer]:
    """Return a step's output as a message: numbers of tokens and of bytes that follow them, tokens, and the rest if there is any."""
    tokens = np.ascontiguousarray(output.token_ids, np.int64)
    rest = b""
    if output.logprobs or output.embeddings:
        rest = b"".join(encode(_Extras(dict(output.logprobs), dict(output.embeddings))))
    return [b"".join([_OUTPUT_HEADER.pack(len(tokens), len(rest)), tokens.data, rest])]


def decode_output(message: Buffer) -> StepOutput:
    """Return the output of a message; raises MalformedMessage."""
    try:
        count, rest = _OUTPUT_HEADER.unpack_from(message)
        end = _OUTPUT_HEADER.size + 8 * count
        if min(count, rest) < 0 or end + rest != len(message):
            raise ValueError(f"{count} tokens and {rest} bytes in a message of {len(message)} bytes")
        tokens = np.frombuffer(message, np.int64, count, _OUTPUT_HEADER.size)
    except (struct.error, ValueError) as error:
        raise MalformedMessage("a step's output is not understood", found=str(error)) from error
    if not rest:
        return StepOutput(tokens)
    extras: _Extras = decode(memoryview(message)[end:], _Extras)
    return StepOutput(tokens, extras.logprobs, extras.embeddings)


class StepEncoder:
    """Writes the steps of one engine.

    Attributes:
        block_size: tokens per KV block; bounds the part of the table that is compared. 1 is right for any.
    """

    def __init__(self) -> None:
        self.block_size = 1
        self._table: Int32Array = np.zeros((0, 0), np.int32)

    def encode(self, step: StepInput) -> list[Buffer]:
        """Return a step as a message; raises MalformedMessage where an array is not what the contract says."""
        batch = step.batch
        rows, columns = batch.block_table.shape
        long: list[Any] = [batch.token_ids, batch.positions, batch.seq_ids, batch.sample_seq_ids, batch.preempted]
        short: list[Any] = [batch.slot_mapping, batch.query_start, batch.context_lens, batch.rows, batch.sample_rows]
        short += [batch.swap_out, batch.swap_in, batch.copies]
        short += self._changes(batch)
        if [array.dtype for array in long] != _LONG or [array.dtype for array in short] != _SHORT:
            found = ", ".join(str(array.dtype) for array in (*long, *short))
            raise MalformedMessage("a step's arrays are not as the contract says", found=found)
        last = b""
        if step.new_sequences or step.finished_seq_ids or step.pooling:
            new = tuple(map(_with_list, step.new_sequences))
            last = b"".join(encode(_Sequences(new, step.finished_seq_ids, dict(step.pooling))))
        sizes = [array.size for array in (*long, *short)]
        try:
            return [b"".join([_HEADER.pack(batch.num_decodes, rows, columns, len(last), *sizes), *long, *short, last])]
        except (BufferError, TypeError) as error:
            raise MalformedMessage("a step's arrays are not dense", found=str(error)) from error

    def _changes(self, batch: StepBatch) -> tuple[Int32Array, Int32Array]:
        """Return places and values of what this step's sequences use of the table and was not sent before.

        A place counts within the table as one row. Rows are compared from the first to the last that is used, since a slice of the table
        is no copy.
        """
        table, rows = batch.block_table, batch.rows
        if self._table.shape != table.shape:
            self._table = np.zeros(table.shape, np.int32)
        if not len(rows):
            return _NOTHING, _NOTHING
        used = min(-(-int(np.maximum.reduce(batch.context_lens)) // self.block_size), table.shape[1])
        first, end = int(np.minimum.reduce(rows)), int(np.maximum.reduce(rows)) + 1
        current = table[first:end, :used]
        found = (current != self._table[first:end, :used]).reshape(-1).nonzero()[0]
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
        self._table: Int32Array = np.zeros((0, 0), np.int32)

    def decode(self, message: Buffer) -> StepInput:
        """Return the step of a message; raises MalformedMessage.

        `block_table` is one array through all steps, the other arrays are views of the message.
        """
        try:
            num_decodes, *shape, last, long_sizes, short_sizes = _sizes(message)
            long, start = _split(message, np.int64, long_sizes, _HEADER.size)
            short, start = _split(message, np.int32, short_sizes, start)
            *short, places, values = short
            if self._table.shape != tuple(shape):
                self._table = np.zeros(shape, np.int32)
            if len(places):
                self._table.reshape(-1)[places] = values
            swap_out, swap_in, copies = (pairs.reshape(-1, 2) for pairs in short[5:])
        except (struct.error, IndexError, ValueError, OverflowError, MemoryError) as error:
            raise MalformedMessage("a step is not understood", found=str(error)) from error
        token_ids, positions, seq_ids, sample_seq_ids, preempted = long
        batch = StepBatch(
            token_ids=token_ids,
            positions=positions,
            slot_mapping=short[0],
            query_start=short[1],
            context_lens=short[2],
            block_table=self._table,
            rows=short[3],
            seq_ids=seq_ids,
            num_decodes=num_decodes,
            sample_rows=short[4],
            sample_seq_ids=sample_seq_ids,
            swap_out=swap_out,
            swap_in=swap_in,
            copies=copies,
            preempted=preempted,
        )
        if not last:
            return StepInput(batch)
        sequences: _Sequences = decode(memoryview(message)[start:], _Sequences)
        return StepInput(batch, sequences.new, sequences.finished, sequences.pooling)


def _with_list(sampling: SequenceSampling) -> SequenceSampling:
    if isinstance(sampling.prompt_token_ids, (list, tuple)):
        return sampling
    return replace(sampling, prompt_token_ids=[int(token) for token in sampling.prompt_token_ids])


def _sizes(message: Buffer) -> tuple[Any, ...]:
    """Return the numbers of the header, the arrays' sizes as two tuples; raises ValueError where they are not the message's."""
    numbers = _HEADER.unpack_from(message)
    last, long, short = numbers[3], numbers[4 : 4 + _NUM_LONG], numbers[4 + _NUM_LONG :]
    size = _HEADER.size + 8 * sum(long) + 4 * sum(short) + last
    if min(numbers) < 0 or size != len(message):
        raise ValueError(f"numbers {numbers} in a message of {len(message)} bytes")
    return (*numbers[:4], long, short)


def _split(message: Buffer, dtype: Any, sizes: tuple[int, ...], start: int) -> tuple[list[Any], int]:
    """Return arrays of a message from byte `start` on, and where they end."""
    block = np.frombuffer(message, dtype, sum(sizes), start)
    arrays, begin = [], 0
    for size in sizes:
        arrays.append(block[begin : begin + size])
        begin += size
    return arrays, start + block.nbytes
