"""The scheduler's face: requests in, step batches out, sampled tokens back in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import IntEnum
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from hardpoint._native import BlockStats, DraftStats, SchedulerCore, SchedulerStats, SequenceState, TierStats
from hardpoint.interfaces.batch import Int32Array, Int64Array, KVGroupSlots, StepBatch, TierMoves
from hardpoint.interfaces.errors import (
    EmptyPrompt,
    InvalidRequest,
    InvalidSamplingParams,
    PromptTooLong,
    RequestNeverFits,
    TokenOutOfRange,
)
from hardpoint.scheduler.config import SchedulerConfig

__all__ = ["FinishReason", "Scheduler", "SequenceState"]

TokenIds: TypeAlias = Sequence[int] | npt.NDArray[np.integer]

_TOKEN_LIMIT = 1 << 31


class FinishReason(IntEnum):
    """Why a sequence ended."""

    STOP = 1
    """The model's end of text, a stop token, or a stop string that the engine found."""
    LENGTH = 2
    """`max_tokens`, the context length, or all slots of the KV cache are used up."""
    ABORT = 3
    POOLED = 4
    """An embedding request whose prompt is computed."""
    ERROR = 5
    """A step failed, so that what the sequence's blocks hold is unknown."""


_REASONS: tuple[FinishReason | None, ...] = (None, *FinishReason)
_NO_PAIRS = np.empty((0, 2), np.int32)
_NO_IDS = np.empty(0, np.int64)
_NO_ROWS = np.empty(0, np.int32)
_MOST_BATCHES = 64  # of different sizes, that a plan keeps

Finished: TypeAlias = list[tuple[int, FinishReason]]
_Moves: TypeAlias = tuple[Int32Array, Int32Array, Int32Array, Int32Array, Int64Array]


class Scheduler:
    """Continuous batching over paged KV blocks.

    `add_request` any time; then in a loop `schedule`, run the batch, `update` with the sampled tokens. With `steps_in_flight` in its
    settings it plans that many steps before the tokens of the first are known: -1 stands for a token that a step in flight is
    sampling, and what was computed for a sequence that ended meanwhile is dropped. A request with
    handle h and n sequences has the sequence ids h, h + 1, ..., h + n - 1, in fork order, from the moment it is added; the
    first computes the prompt, and the others share its blocks from then on. Ids are never used twice. A sequence that has
    ended is kept until `release`.

    Each step serves, in this order and each by rank, decodes, prompts begun before, swapped sequences, and waiting requests.
    Rank is priority (scheduling_policy "priority"), then arrival. When blocks run out, the running sequence of lowest rank is preempted;
    the step then admits nothing. No request starves: the running sequence of highest rank always makes progress, the queue
    is served strictly by rank, and `starvation_limit` limits how often one can be passed over or preempted before it outranks
    the rest. Blocks for all known tokens of a sequence are taken at admission, so a prefill that has begun never waits for
    blocks.

    The result depends on the calls and their arguments alone. Not thread-safe.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self._token_limit = config.vocab_size or _TOKEN_LIMIT
        self._num_added = 0
        self._core = SchedulerCore(config)
        table = self._core.block_table()
        groups = self._core.group_buffers()
        self._plans = [
            _PlanBatches(buffers, table, [(slots[plan], table_of) for table_of, slots in groups])
            for plan, buffers in enumerate(self._core.buffers())
        ]

    # Requests

    def check_fits(self, length: int, n: int = 1, *, pooling: bool = False, beams: bool = False) -> None:
        """Raise EmptyPrompt, PromptTooLong or RequestNeverFits for a prompt of `length` tokens that `add_request` would never take."""
        new_tokens = 0 if pooling else 1
        config = self.config
        if length == 0:
            raise EmptyPrompt(
                "the prompt has no tokens", hint="Give at least one token, such as the model's start of text"
            )
        if length + new_tokens > config.max_model_len:
            raise PromptTooLong(
                "the prompt does not fit the context",
                found=f"{length} tokens, with a context of {config.max_model_len}",
                hint="Shorten the prompt or raise max_model_len",
            )
        if length + new_tokens > (config.beam_tokens(n) if beams else config.pool_tokens):
            raise RequestNeverFits(
                "the prompt does not fit the KV cache",
                found=f"{length} tokens, with {config.num_device_blocks} blocks of {config.block_size}"
                + (f" for {len(config.group_windows)} KV cache groups" if len(config.group_windows) > 1 else "")
                + (f" and {n} beams" if beams else ""),
                hint="Shorten the prompt or give the KV cache more memory",
            )
        if n > config.max_num_seqs:
            raise RequestNeverFits(
                "the request has more sequences than can run at once",
                found=f"n={n}, with max_num_seqs={config.max_num_seqs}",
                hint="Lower n or raise max_num_seqs",
            )

    def add_request(
        self,
        prompt_token_ids: TokenIds,
        *,
        n: int = 1,
        max_tokens: int | None = None,
        min_tokens: int = 0,
        stop_token_ids: Sequence[int] = (),
        priority: int = 0,
        arrival: int | None = None,
        salt: str = "",
        max_cached_tokens: int | None = None,
        pooling: bool = False,
        plan_ahead: bool = True,
        beams: bool = False,
        contents: Sequence[tuple[int, int, int]] = (),
        drafts: bool = False,
    ) -> int:
        """Queue a request.

        Args:
            prompt_token_ids: list of int, or a one-dimensional numpy array of integers.
            n: sequences sampled from the prompt.
            max_tokens: most new tokens of each sequence; None for as many as the context holds. A sequence ends with LENGTH
                when the context, or the whole KV cache, could not hold one token more, whatever `max_tokens` says.
            min_tokens: new tokens before a stop token counts (it is appended all the same).
            stop_token_ids: tokens that end a sequence.
            priority: lower is served earlier (scheduling_policy "priority").
            arrival: place in the order of arrival, see `SchedulerConfig.arrival`; by default, after all requests so far.
            salt: requests share cached prefixes only within one salt (an adapter's name, a tenant's).
            max_cached_tokens: most tokens that the prefix cache may give, where log probabilities of the others are wanted; None for
                all but the last one.
            pooling: no sampling; the request ends when its prompt is computed.
            plan_ahead: False plans each of its steps only when the token before is booked; other requests go on meanwhile.
            beams: the n sequences are those of a beam search: they go on with `advance_beams`, and end with `abort`.
            contents: (start, end, number) of tokens that stand for something else, which requests of the same number there have in
                common: prefixes are shared by these numbers, 0 to 2^31 - 1. Steps have the number in the place of each of the tokens, and
                no token id may be a number's.
            drafts: guesses at its next tokens are computed with a decode's token (`num_speculative_tokens` of the settings), where they
                are worth their rows; `update` takes those that are what the model drew.

        Returns:
            The handle, which is the id of the request's first sequence.

        Raises:
            EmptyPrompt, TokenOutOfRange, InvalidSamplingParams.
            PromptTooLong: the prompt and one new token exceed `max_model_len`.
            RequestNeverFits: the prompt and one new token exceed the KV cache, or n exceeds `max_num_seqs`.
        """
        self.check_fits(len(prompt_token_ids), n, pooling=pooling, beams=beams)
        config = self.config
        if n < 1 or min_tokens < 0 or (max_tokens is not None and (max_tokens < 1 or min_tokens > max_tokens)):
            raise InvalidSamplingParams(
                "n and max_tokens are at least 1, and min_tokens between 0 and max_tokens",
                found=f"n={n}, max_tokens={max_tokens}, min_tokens={min_tokens}",
            )
        if pooling and n != 1:
            raise InvalidSamplingParams("an embedding request has one sequence", found=f"n={n}")
        token_limit = self._token_limit
        if contents:
            prompt_token_ids, token_limit = self._with_contents(prompt_token_ids, contents), _TOKEN_LIMIT
        try:
            handle = self._core.add_request(
                prompt_token_ids,
                token_limit,
                n,
                config.max_model_len if max_tokens is None else max_tokens,
                min_tokens,
                stop_token_ids,
                priority,
                self._num_added if arrival is None else arrival,
                salt,
                config.max_model_len if max_cached_tokens is None else max_cached_tokens,
                pooling,
                plan_ahead,
                beams,
                drafts,
            )
        except IndexError as error:
            raise self._out_of_range(*error.args) from None
        self._num_added += 1
        return handle

    def _with_contents(self, prompt: TokenIds, contents: Sequence[tuple[int, int, int]]) -> Int64Array:
        """Return a prompt with the numbers of what some of its tokens stand for in their place; raises TokenOutOfRange."""
        tokens = np.array(prompt, np.int64)
        bad = np.flatnonzero((tokens < 0) | (tokens >= self._token_limit))
        if len(bad):
            raise self._out_of_range(int(tokens[bad[0]]), int(bad[0]))
        for start, end, number in contents:
            tokens[start:end] = number
        return tokens

    def _out_of_range(self, token: int, position: int) -> TokenOutOfRange:
        return TokenOutOfRange(
            "a token id is not in the vocabulary",
            found=f"{token} at position {position}, with ids in 0 to {self._token_limit - 1}",
        )

    def abort(self, handles: Sequence[int]) -> None:
        """End all sequences of these requests with ABORT, at any time; unknown and ended ones are left as they are.

        Their blocks are free at once. Steps in flight stay as they are, and `update` ignores what was sampled for them. `update`
        does not report them; `release` them like all others.
        """
        self._core.abort(handles)

    def beams_sampled(self, handle: int) -> bool:
        """Whether all sequences of a beam search were sampled since they were advanced."""
        return self._core.beams_sampled(handle)

    def advance_beams(self, handle: int, parents: Sequence[int], token_ids: Sequence[int]) -> None:
        """Let the i-th sequence of a beam search continue that of index `parents[i]` with one more token; blocks are shared as by forks.

        Raises:
            InvalidRequest: not all were sampled, or there is not a parent and a token for each; nothing was changed.
        """
        try:
            self._core.advance_beams(handle, parents, token_ids)
        except ValueError as error:
            raise InvalidRequest(str(error), found=f"request {handle}") from None

    def finish(self, seq_id: int, reason: FinishReason = FinishReason.STOP) -> bool:
        """End one sequence (the engine found a stop string); False when it is unknown or has ended.

        Raises:
            InvalidRequest: its prompt is not computed yet and it has forks, which depend on it; abort the request instead.
        """
        try:
            return self._core.finish(seq_id, int(reason))
        except ValueError as error:
            raise InvalidRequest(str(error), found=f"sequence {seq_id}") from None

    def release(self, seq_ids: Sequence[int]) -> None:
        """Forget ended sequences and their tokens.

        Raises:
            InvalidRequest: one is unknown or has not ended; none was released.
        """
        try:
            self._core.release(seq_ids)
        except ValueError as error:
            raise InvalidRequest(str(error)) from None

    # Steps

    def schedule(self) -> StepBatch | None:
        """Plan the next step; None when nothing can run, or nothing before a step in flight is booked.

        The arrays of the batch are views of the scheduler's own buffers and hold until the step is booked, by `update` or
        `fail_step`; the block table changes with the next `schedule`, and the swap, copy and preemption lists are new ones. With
        steps in flight a step may swap blocks out and compute nothing.

        Raises:
            RuntimeError: more than `steps_in_flight` batches have had neither `update` nor `fail_step`.
        """
        step = self._core.schedule()
        if step is None:
            return None
        return self._planned(*step)

    def _planned(self, sizes: tuple[int, int, int, int, int], has_moves: bool, plan: int) -> StepBatch:
        batch = self._plans[plan].batch(sizes, self._core.moves() if has_moves else None)
        tiers = self._core.tier_moves() if has_moves else None
        return batch if tiers is None else replace(batch, tier_moves=TierMoves(*tiers))

    def store_cached(self) -> StepBatch | None:
        """Plan a step that computes nothing and stores what the prefix cache has on the device in the host's tier.

        None where there is no such tier, or nothing to store. Where the tier has no room for all, that is what was used last.

        Raises:
            RuntimeError: a step is in flight.
        """
        step = self._core.store_cached()
        return None if step is None else self._planned(*step)

    def drop_stored(self, lost: Sequence[tuple[int, int]]) -> None:
        """Forget blocks that the worker could not keep in the tiers: (slot, tag), as in `TierMoves`."""
        self._core.drop_stored(lost)

    def update(
        self, token_ids: Int64Array, drafted: Int64Array = _NO_IDS, failed_loads: Sequence[int] = ()
    ) -> Finished:
        """Book the oldest step in flight: take the tokens of its samples, in order; -1 (it failed) ends its sequence with ERROR.

        Args:
            drafted: `StepOutput.drafted`, of a step whose drafts the worker has made.
            failed_loads: in rising order, rows of the step's `TierMoves.loads` that failed on some rank. Their sequences compute from
                there on.

        Returns:
            (sequence id, reason) of the sequences that ended in this step; they hold no blocks any more.

        Raises:
            InvalidRequest: not one token for each sample, or one below -1, or drafts are missing, or a row that there is not; nothing was
                changed.
        """
        try:
            finished = self._core.update(token_ids, drafted, failed_loads)
        except ValueError as error:
            raise InvalidRequest(str(error)) from None
        return [] if finished is None else _named(finished)

    def kept(self) -> Int32Array | None:
        """Return which samples of the step that was booked last count, int32[k] in rising order; None where all do.

        Samples behind a drafted token that was not sampled, or behind the end of a sequence, do not.
        """
        return self._core.kept()

    def set_step_cost(self, fixed: float, per_token: float) -> None:
        """Say what steps take, in seconds: by it, drafts are as long as they are worth. At first they cost nothing."""
        self._core.set_step_cost(fixed, per_token)

    def fail_step(self) -> Finished:
        """Give up the oldest step, which the worker did not finish: its sequences end with ERROR, the others go on."""
        finished = self._core.fail_step()
        return [] if finished is None else _named(finished)

    @property
    def num_in_flight(self) -> int:
        """How many steps were planned and not booked."""
        return self._core.num_in_flight()

    def has_unfinished(self) -> bool:
        """Whether any request waits, runs or is swapped."""
        return self._core.has_unfinished()

    # Sequences

    def state(self, seq_id: int) -> SequenceState:
        """Where a sequence is; DORMANT is a fork whose prompt is not computed yet. KeyError when unknown, as below."""
        return self._core.state(seq_id)

    def finish_reason(self, seq_id: int) -> FinishReason | None:
        """Why a sequence ended; None while it has not."""
        return _REASONS[self._core.finish_reason(seq_id)]

    def output_token_ids(self, seq_id: int) -> Int32Array:
        """Sampled tokens of a sequence so far, int32[k], a copy."""
        return self._core.output_tokens(seq_id)

    def all_token_ids(self, seq_id: int) -> Int32Array:
        """Prompt and sampled tokens of a sequence so far, int32[k], a copy (empty while it is DORMANT)."""
        return self._core.all_tokens(seq_id)

    def num_cached_tokens(self, seq_id: int) -> int:
        """Prompt tokens that were found in the prefix cache when the sequence was first admitted."""
        return self._core.num_cached_tokens(seq_id)

    def num_preemptions(self, seq_id: int) -> int:
        """How often a sequence was preempted."""
        return self._core.num_preemptions(seq_id)

    # State

    @property
    def stats(self) -> SchedulerStats:
        """Numbers of running, waiting, swapped and unreleased sequences, and preemptions since the beginning."""
        return self._core.stats()

    @property
    def draft_stats(self) -> DraftStats:
        """Counts of drafts and their tokens since the beginning."""
        return self._core.draft_stats()

    @property
    def block_stats(self) -> BlockStats:
        """Counts of the block pools and the prefix cache, see `BlockManager.stats`."""
        return self._core.block_stats()

    @property
    def tier_stats(self) -> TierStats:
        """Blocks in the tiers below the prefix cache now, and counts of blocks since the beginning."""
        return self._core.tier_stats()

    def reset_prefix_cache(self) -> None:
        """Forget all cached contents at once, in the tiers too, as after a change of weights.

        Callable at any time. No request admitted later uses anything computed before; running and swapped sequences keep their
        blocks, which are not shared any more.
        """
        self._core.reset_prefix_cache()

    def recompute_all(self, *, swapped: bool) -> None:
        """Compute all running sequences again from their tokens: what the device's KV blocks hold is lost.

        Running sequences wait in their rank, ahead of later ones, and continue with the same tokens; the prefix cache is reset.
        This is no preemption in the sense of fairness.

        Args:
            swapped: the blocks on the host, and in the tiers below the prefix cache, are lost too, as after a change of weights;
                otherwise swapped sequences and these tiers stay.

        Raises:
            RuntimeError: a step is in flight.
        """
        self._core.recompute_all(swapped)

    def live_blocks(self, *, running: bool) -> Int32Array:
        """Return the device blocks whose contents count, int32[k] in rising order.

        Args:
            running: the computed tokens of running sequences count, beside the prefix cache.
        """
        return self._core.live_blocks(running)

    def check(self) -> None:
        """Verify all invariants of scheduler and blocks; slow, for tests.

        Raises:
            AssertionError: the first that does not hold.
        """
        broken = self._core.check()
        if broken:
            raise AssertionError(broken)


class _PlanBatches:
    """The batches of one plan: views of its buffers, which are kept, since steps have the same sizes again.

    Args:
        buffers: in the order of `SchedulerCore.buffers`.
        groups: (slots, block table) of each KV cache group after the first.
    """

    def __init__(
        self,
        buffers: tuple[npt.NDArray[Any], ...],
        block_table: Int32Array,
        groups: Sequence[tuple[Int32Array, Int32Array]],
    ) -> None:
        self._buffers, self._block_table, self._groups = buffers, block_table, groups
        self._batches: dict[tuple[int, ...], StepBatch] = {}

    def batch(self, sizes: tuple[int, int, int, int, int], moves: _Moves | None) -> StepBatch:
        """Return the batch of a step of these numbers of (tokens, sequences, decodes, samples, sequences with drafts)."""
        batch = self._batches.get(sizes)
        if batch is None:
            if len(self._batches) == _MOST_BATCHES:
                self._batches.clear()
            batch = self._batches[sizes] = self._make(*sizes)
        if moves is None:
            return batch
        swap_out, swap_in, copies, row_copies, preempted = moves
        return replace(
            batch,
            swap_out=swap_out,
            swap_in=swap_in,
            copies=copies,
            row_copies=row_copies,
            preempted=preempted,
        )

    def _make(self, num_tokens: int, num_seqs: int, num_decodes: int, num_samples: int, num_drafted: int) -> StepBatch:
        tokens, seqs, samples = slice(num_tokens), slice(num_seqs), slice(num_samples)
        token_ids, positions, slots, query_start, context_lens, rows, state_rows, seq_ids, *sampled = self._buffers
        sample_rows, sample_seq_ids, sample_state_rows, sample_positions, sample_tokens = sampled
        # Positional, in the order of the fields: keywords would cost as much time as the views.
        return StepBatch(
            token_ids[tokens],
            positions[tokens],
            slots[tokens],
            query_start[: num_seqs + 1],
            context_lens[seqs],
            self._block_table,
            rows[seqs],
            seq_ids[seqs],
            num_decodes,
            sample_rows[samples],
            sample_seq_ids[samples],
            _NO_PAIRS,
            _NO_PAIRS,
            _NO_PAIRS,
            _NO_IDS,
            state_rows[seqs],
            sample_state_rows[samples],
            sample_positions[samples],
            tuple([KVGroupSlots(slots[tokens], table) for slots, table in self._groups]) if self._groups else (),
            _NO_PAIRS,
            sample_tokens[samples] if num_drafted else _NO_ROWS,
        )


def _named(finished: tuple[list[int], list[int]]) -> Finished:
    return [(seq_id, FinishReason(reason)) for seq_id, reason in zip(*finished, strict=True)]
