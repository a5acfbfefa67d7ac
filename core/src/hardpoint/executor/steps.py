"""One step and its output as messages: the scheduler's arrays one after the other, and of the block table only what changed.

The block table is persistent and large; a step changes a few entries of it. The encoder remembers what it sent, and the decoder
keeps a table of its own, so the two belong together from the first step on, and no step may be left out.

This is on the way of every step, so it has a form of its own (core/native/step_message.hpp), written and read by native code.
"""

from __future__ import annotations

import struct
from dataclasses import replace

import msgspec
import numpy as np

from hardpoint._native import StepPacker, StepUnpacker
from hardpoint.executor.messages import Buffer, decode, encode
from hardpoint.interfaces.batch import (
    EmbeddedTokens,
    EmbeddingSource,
    FloatArray,
    Int32Array,
    Int64Array,
    KVGroupSlots,
    PromptLogprobs,
    PromptScoring,
    SequencePooling,
    SequenceSampling,
    StepBatch,
    StepInput,
    StepOutput,
    TierMoves,
    TierReport,
    TokenLogprobs,
)
from hardpoint.interfaces.errors import MalformedMessage

_OUTPUT_HEADER = struct.Struct("<qq")
_NO_LONGS, _NO_SHORTS = np.zeros(0, np.int64), np.zeros(0, np.int32)


class _Sequences(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """What belongs to single sequences or KV cache groups; most steps have none of it."""

    new: tuple[SequenceSampling, ...] = ()
    finished: tuple[int, ...] = ()
    pooling: dict[int, SequencePooling] = {}
    groups: tuple[bytes, ...] = ()
    """Steps of the KV cache groups after the first, with slots, contexts and rows alone."""
    scoring: dict[int, PromptScoring] = {}
    row_copies: tuple[tuple[int, int], ...] = ()
    embedded: tuple[EmbeddedTokens, ...] = ()
    new_sources: dict[int, EmbeddingSource] = {}
    dropped_sources: tuple[int, ...] = ()
    positions: Int64Array | None = None
    adapters: dict[int, int] = {}
    sample_tokens: Int32Array | None = None
    tier_moves: TierMoves | None = None


class _Extras(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """What few outputs have."""

    logprobs: dict[int, TokenLogprobs]
    embeddings: dict[int, FloatArray]
    failed: dict[int, str] = {}
    prompt_logprobs: dict[int, PromptLogprobs] = {}
    drafted: Int64Array | None = None
    tiers: TierReport | None = None


def encode_output(output: StepOutput) -> list[Buffer]:
    """Return a step's output as a message: numbers of tokens and of bytes that follow them, tokens, and the rest if there is any."""
    tokens = np.ascontiguousarray(output.token_ids, np.int64)
    rest = b""
    if (
        output.logprobs
        or output.embeddings
        or output.failed
        or output.prompt_logprobs
        or len(output.drafted)
        or output.tiers is not None
    ):
        logprobs, embeddings = dict(output.logprobs), dict(output.embeddings)
        drafted = output.drafted if len(output.drafted) else None
        scores = dict(output.prompt_logprobs)
        extras = _Extras(logprobs, embeddings, dict(output.failed), scores, drafted, output.tiers)
        rest = b"".join(encode(extras))
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
    drafted, scores = _NO_LONGS if extras.drafted is None else extras.drafted, extras.prompt_logprobs
    return StepOutput(tokens, extras.logprobs, extras.embeddings, extras.failed, scores, drafted, extras.tiers)


class StepEncoder:
    """Writes the steps of one engine.

    Attributes:
        block_size: tokens per KV block; bounds the part of the table that is compared. 1 is right for any.
    """

    def __init__(self) -> None:
        self.block_size = 1
        self._packer = StepPacker()
        self._group_packers: list[StepPacker] = []

    def encode(self, step: StepInput) -> list[Buffer]:
        """Return a step as a message, which counts as sent when `commit` is called.

        Raises MalformedMessage where an array is not what the contract says.
        """
        batch = step.batch
        last = b""
        try:
            has_pairs = len(batch.row_copies) > 0
            if (
                step.new_sequences
                or step.finished_seq_ids
                or step.pooling
                or step.scoring
                or batch.more_groups
                or has_pairs
                or step.embedded
                or step.dropped_sources
                or step.positions is not None
                or step.adapters
                or len(batch.sample_tokens)
                or batch.tier_moves is not None
            ):
                new = tuple(map(_with_list, step.new_sequences))
                groups = self._encode_groups(batch)
                pooling, scoring = dict(step.pooling), dict(step.scoring)
                pairs = tuple(map(tuple, batch.row_copies.tolist()))
                sequences = _Sequences(
                    new,
                    step.finished_seq_ids,
                    pooling,
                    groups,
                    scoring,
                    pairs,
                    step.embedded,
                    dict(step.new_sources),
                    step.dropped_sources,
                    step.positions,
                    dict(step.adapters),
                    batch.sample_tokens if len(batch.sample_tokens) else None,
                    batch.tier_moves,
                )
                last = b"".join(encode(sequences))
            message = self._packer.pack(
                self.block_size,
                batch.num_decodes,
                batch.block_table,
                (batch.token_ids, batch.positions, batch.seq_ids, batch.sample_seq_ids, batch.preempted),
                (
                    batch.slot_mapping,
                    batch.query_start,
                    batch.context_lens,
                    batch.rows,
                    batch.sample_rows,
                    batch.state_rows,
                    batch.sample_state_rows,
                    batch.sample_positions,
                    batch.swap_out,
                    batch.swap_in,
                    batch.copies,
                ),
                last,
            )
        except (TypeError, ValueError) as error:
            raise MalformedMessage("a step's arrays are not as the contract says", found=str(error)) from error
        return [message]

    def commit(self) -> None:
        """Count the last message as sent; one that never left has changed nothing."""
        self._packer.commit()
        for packer in self._group_packers:
            packer.commit()

    def _encode_groups(self, batch: StepBatch) -> tuple[bytes, ...]:
        while len(self._group_packers) < len(batch.more_groups):
            self._group_packers.append(StepPacker())
        return tuple(
            packer.pack(
                self.block_size,
                0,
                group.block_table,
                (_NO_LONGS,) * 5,
                (group.slot_mapping, _NO_SHORTS, batch.context_lens, batch.rows, *(_NO_SHORTS,) * 7),
                b"",
            )
            for packer, group in zip(self._group_packers, batch.more_groups, strict=False)
        )


class StepDecoder:
    """Reads the steps that one `StepEncoder` wrote."""

    def __init__(self) -> None:
        self._unpacker = StepUnpacker()
        self._group_unpackers: list[StepUnpacker] = []

    def decode(self, message: Buffer) -> StepInput:
        """Return the step of a message; raises MalformedMessage.

        `block_table` is one array through all steps, the other arrays are views of the message.
        """
        try:
            num_decodes, table, longs, shorts, end = self._unpacker.unpack(message)
        except (ValueError, MemoryError) as error:
            raise MalformedMessage("a step is not understood", found=str(error)) from error
        token_ids, positions, seq_ids, sample_seq_ids, preempted = longs
        slot_mapping, query_start, context_lens, rows, sample_rows = shorts[:5]
        state_rows, sample_state_rows, sample_positions, swap_out, swap_in, copies = shorts[5:]
        batch = StepBatch(
            token_ids,
            positions,
            slot_mapping,
            query_start,
            context_lens,
            table,
            rows,
            seq_ids,
            num_decodes,
            sample_rows,
            sample_seq_ids,
            swap_out,
            swap_in,
            copies,
            preempted,
            state_rows,
            sample_state_rows,
            sample_positions,
        )
        if end == len(message):
            return StepInput(batch)
        sequences: _Sequences = decode(memoryview(message)[end:], _Sequences)
        if sequences.groups:
            batch.more_groups = self._decode_groups(sequences.groups)
        if sequences.row_copies:
            batch.row_copies = np.array(sequences.row_copies, np.int32)
        if sequences.sample_tokens is not None:
            batch.sample_tokens = sequences.sample_tokens
        batch.tier_moves = sequences.tier_moves
        return StepInput(
            batch,
            sequences.new,
            sequences.finished,
            sequences.pooling,
            sequences.scoring,
            sequences.embedded,
            sequences.new_sources,
            sequences.dropped_sources,
            sequences.positions,
            sequences.adapters,
        )

    def _decode_groups(self, messages: tuple[bytes, ...]) -> tuple[KVGroupSlots, ...]:
        while len(self._group_unpackers) < len(messages):
            self._group_unpackers.append(StepUnpacker())
        groups = []
        try:
            for unpacker, message in zip(self._group_unpackers, messages, strict=False):
                _, table, _, shorts, _ = unpacker.unpack(message)
                groups.append(KVGroupSlots(shorts[0], table))
        except (ValueError, MemoryError) as error:
            raise MalformedMessage("a step is not understood", found=str(error)) from error
        return tuple(groups)


def _with_list(sampling: SequenceSampling) -> SequenceSampling:
    if isinstance(sampling.prompt_token_ids, (list, tuple)):
        return sampling
    return replace(sampling, prompt_token_ids=[int(token) for token in sampling.prompt_token_ids])
