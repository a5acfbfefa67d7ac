"""Faults of workers."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from hardpoint.interfaces import (
    KV_CACHE,
    WEIGHTS,
    AttentionPlan,
    AttentionRequest,
    DType,
    MemoryChange,
    MemoryProfile,
    MemoryReport,
    ModelInfo,
    Policy,
    Refusal,
    SequenceSampling,
    SleepPlan,
    SleepTier,
    StepBatch,
    StepInput,
    StepOutput,
    WakePlan,
    WeightWrite,
    WorkerContext,
)
from hardpoint.interfaces.errors import (
    CapabilityRefused,
    CorruptWeights,
    DeviceOutOfMemory,
    HardpointError,
    MemoryAsleep,
    MemoryBusy,
    NothingToCollect,
    WeightsMissing,
    WorkerError,
)
from hardpoint_conformance.mutants.derived import Faults, Methods

if TYPE_CHECKING:
    from torch import Tensor

    from hardpoint.interfaces.batch import Int64Array

_FAULTS = Faults("worker")
MUTANTS = _FAULTS.mutants
fault = _FAULTS.fault


def run_step(base: Any, worker: Any, step: StepInput) -> StepOutput:
    """Submit a step to the correct worker, and return its output."""
    base.submit(worker, step)
    output: StepOutput = base.collect(worker)
    return output


def stepping(execute: Callable[[Any, StepInput], StepOutput]) -> Methods:
    """Return the calls of a worker that computes steps by `execute`; where it fails, `collect` does, unless the step was refused."""

    def submit(self: Any, step: StepInput) -> None:
        outcome: StepOutput | Exception
        try:
            outcome = execute(self, step)
        except (MemoryAsleep, MemoryBusy, WeightsMissing):
            raise
        except Exception as error:
            outcome = error
        vars(self).setdefault("_outcomes", deque()).append(outcome)

    def collect(self: Any) -> StepOutput:
        outcomes = vars(self).setdefault("_outcomes", deque())
        if not outcomes:
            raise NothingToCollect("no step was submitted")
        outcome: StepOutput | Exception = outcomes.popleft()
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    return {"submit": submit, "collect": collect}


def other_change(base: Any, other: Callable[[Any, MemoryChange], MemoryChange]) -> Methods:
    """Prepare other sleeps and wakes than those asked for."""

    def begin(self: Any, transaction: int, change: MemoryChange) -> None:
        base.begin(self, transaction, other(self, change))

    return {"begin": begin}


def other_sleep(base: Any, other: Callable[[SleepPlan], SleepPlan]) -> Methods:
    """Prepare other sleeps than those asked for."""
    return other_change(base, lambda _, change: other(change) if isinstance(change, SleepPlan) else change)


def other_end(base: Any, kind: type[MemoryChange], ended: Callable[[Any, MemoryReport], MemoryReport]) -> Methods:
    """Commit sleeps, or wakes, with something else after it."""

    def begin(self: Any, transaction: int, change: MemoryChange) -> None:
        base.begin(self, transaction, change)
        self._begun = change

    def commit(self: Any, transaction: int) -> MemoryReport:
        report: MemoryReport = base.commit(self, transaction)
        return ended(self, report) if isinstance(self._begun, kind) else report

    return {"begin": begin, "commit": commit}


def other_write(base: Any, write: WeightWrite, instead: Callable[..., int]) -> Methods:
    """Write weights otherwise, where they come from `write`; `instead` is given the worker and the call's other arguments."""

    faulty = write

    def write_weights(
        self: Any, write: WeightWrite, weights: Iterable[tuple[str, Tensor]] = (), model: str | None = None
    ) -> int:
        wrong = write is faulty
        count: int = instead(self, weights, model) if wrong else base.write_weights(self, write, weights, model)
        return count

    return {"write_weights": write_weights}


def other_step(base: Any, change: Callable[[StepInput], StepInput]) -> Methods:
    """Execute other steps than those asked for."""

    def execute(self: Any, step: StepInput) -> StepOutput:
        return run_step(base, self, change(step))

    return stepping(execute)


def other_batch(base: Any, change: Callable[[StepBatch], StepBatch]) -> Methods:
    """Execute steps with other batches than those asked for."""
    return other_step(base, lambda step: replace(step, batch=change(step.batch)))


# Steps


@fault("Prompts are sampled after their last token but one.", "tokens.prefill.oracle@1")
def row_before_last_sampled(base: Any) -> Methods:
    def execute(self: Any, step: StepInput) -> StepOutput:
        output = run_step(base, self, step)
        lengths = np.diff(step.batch.query_start)
        if len(step.batch.sample_rows) and lengths.min() > 1:
            shorter = replace(step, batch=_without_last_tokens(step.batch), new_sequences=(), finished_seq_ids=())
            output = run_step(base, self, shorter)
        return output

    return stepping(execute)


def _without_last_tokens(batch: StepBatch) -> StepBatch:
    kept = np.ones(batch.num_tokens, bool)
    kept[batch.query_start[1:] - 1] = False
    return replace(
        batch,
        token_ids=batch.token_ids[kept],
        positions=batch.positions[kept],
        slot_mapping=batch.slot_mapping[kept],
        query_start=(batch.query_start - np.arange(len(batch.query_start))).astype(np.int32),
        context_lens=batch.context_lens - 1,
    )


@fault(
    "Positions are one too large, except the first.",
    "tokens.prefill.oracle@1",
    "tokens.decode.oracle@1",
    "tokens.mixed.oracle@1",
    "tokens.block-size.oracle@1",
    "tokens.head-dim.oracle@1",
    "tokens.groups.oracle@1",
    "stress.interleave.oracle@1",
)
def positions_shifted(base: Any) -> Methods:
    return other_batch(base, lambda batch: replace(batch, positions=batch.positions + (batch.positions > 0)))


@fault("The tokens of a step come in reverse order.", "tokens.batch.oracle@1", "worker.execute.samples@1")
def tokens_in_reverse(base: Any) -> Methods:
    def execute(self: Any, step: StepInput) -> StepOutput:
        output = run_step(base, self, step)
        return replace(output, token_ids=output.token_ids[::-1].copy())

    return stepping(execute)


@fault("The last position of the context is taken for the one before.", "tokens.position.last@1")
def last_position_cut_off(base: Any) -> Methods:
    def execute(self: Any, step: StepInput) -> StepOutput:
        last = self._loaded.model.info.max_model_len - 1
        positions = np.minimum(step.batch.positions, last - 1)
        return run_step(base, self, replace(step, batch=replace(step.batch, positions=positions)))

    return stepping(execute)


@fault("The model's sliding window is not asked of attention.", "tokens.window.oracle@1")
def window_not_asked(base: Any) -> Methods:
    def start(self: Any) -> None:
        base.start(self)
        plan = self._started.attention.plan

        def without(request: AttentionRequest) -> AttentionPlan | Refusal:
            layers = tuple(replace(layer, sliding_window=None) for layer in request.layers)
            made: AttentionPlan | Refusal = plan(replace(request, layers=layers))
            return made

        self._started.attention.plan = without

    return {"start": start}


@fault("A step fails where any block of the cache holds a NaN.", "worker.kv.poison@1")
def whole_cache_checked(base: Any) -> Methods:
    def execute(self: Any, step: StepInput) -> StepOutput:
        if self._loaded.kv.cache.isnan().any():
            raise WorkerError("the KV cache holds NaN")
        return run_step(base, self, step)

    return stepping(execute)


@fault("The KV cache is emptied when a sequence ends.", "worker.execute.abort@1")
def cache_emptied_with_a_sequence(base: Any) -> Methods:
    def execute(self: Any, step: StepInput) -> StepOutput:
        if step.finished_seq_ids:
            self._loaded.kv.cache.zero_()
        return run_step(base, self, step)

    return stepping(execute)


@fault("KV blocks are swapped neither out nor in.", "worker.kv.swap@1")
def swaps_ignored(base: Any) -> Methods:
    return other_batch(base, lambda batch: replace(batch, swap_out=batch.swap_out[:0], swap_in=batch.swap_in[:0]))


@fault("KV blocks are swapped in before others are swapped out to their place.", "worker.kv.moves-in-order@1")
def swap_in_before_out(base: Any) -> Methods:
    def execute(self: Any, step: StepInput) -> StepOutput:
        batch = step.batch
        if len(batch.swap_in) and len(batch.swap_out):
            nothing = {name: getattr(batch, name)[:0] for name in ("token_ids", "positions", "slot_mapping")}
            sequences = {name: getattr(batch, name)[:0] for name in ("context_lens", "rows", "seq_ids", "state_rows")}
            names = ("sample_rows", "sample_seq_ids", "sample_state_rows", "sample_positions", "swap_out", "copies")
            samples = {name: getattr(batch, name)[:0] for name in names}
            first = replace(batch, **nothing, **sequences, **samples, query_start=batch.query_start[:1], num_decodes=0)
            run_step(base, self, StepInput(first))
            step = replace(step, batch=replace(batch, swap_in=batch.swap_in[:0]))
        return run_step(base, self, step)

    return stepping(execute)


@fault("Copies of KV blocks are not made.", "worker.kv.copy@1")
def copies_ignored(base: Any) -> Methods:
    return other_batch(base, lambda batch: replace(batch, copies=batch.copies[:0]))


@fault("The sampling of finished sequences is kept, and used for new ones of the same id.", "worker.execute.id-reuse@1")
def finished_sequences_kept(base: Any) -> Methods:
    def execute(self: Any, step: StepInput) -> StepOutput:
        known = vars(self).setdefault("_known_sampling", {})
        first = tuple(replace(known.setdefault(one.seq_id, one), state_row=one.state_row) for one in step.new_sequences)
        return run_step(base, self, replace(step, new_sequences=first))

    return stepping(execute)


@fault("Every sequence is sampled greedily.", "worker.sampling.seeded@1")
def sampling_ignored(base: Any) -> Methods:
    return _other_sampling(base, lambda one: replace(one, temperature=0.0))


@fault("A sequence's seed is ignored.", "worker.sampling.seeded@1")
def seed_ignored(base: Any) -> Methods:
    seeds = iter(range(1 << 62))
    return _other_sampling(base, lambda one: replace(one, seed=next(seeds)))


def _verifying(base: Any, change: Callable[[Any, StepInput, Int64Array], Int64Array]) -> Methods:
    """Return the calls of a worker that changes what it samples in steps with drafted tokens."""

    def execute(self: Any, step: StepInput) -> StepOutput:
        output = run_step(base, self, step)
        if not len(step.batch.sample_tokens):
            return output
        return replace(output, token_ids=change(self, step, output.token_ids.copy()))

    return stepping(execute)


def _guesses(batch: StepBatch) -> tuple[Int64Array, Int64Array]:
    """Return the samples at whose place there is a guess, and the guesses."""
    places = np.flatnonzero(batch.sample_rows[:-1] == batch.sample_rows[1:])
    return places, batch.token_ids[batch.sample_tokens[places] + 1]


@fault("Drafted tokens are taken that the model did not draw.", "worker.drafts.verified@1")
def drafts_taken(base: Any) -> Methods:
    def change(self: Any, step: StepInput, tokens: Int64Array) -> Int64Array:
        places, guesses = _guesses(step.batch)
        tokens[places] = guesses
        return tokens

    return _verifying(base, change)


@fault("No new token comes after drafted ones that were all right.", "worker.drafts.verified@1")
def bonus_token_forgotten(base: Any) -> Methods:
    def change(self: Any, step: StepInput, tokens: Int64Array) -> Int64Array:
        places, guesses = _guesses(step.batch)
        tokens[places[-1] + 1] = guesses[-1]
        return tokens

    return _verifying(base, change)


@fault(
    "At the place of a wrong guess another token is drawn than the one that showed it to be wrong.",
    "worker.drafts.verified@1",
)
def drawn_anew(base: Any) -> Methods:
    def change(self: Any, step: StepInput, tokens: Int64Array) -> Int64Array:
        places, guesses = _guesses(step.batch)
        wrong = places[tokens[places] != guesses]
        later = replace(step.batch, sample_positions=step.batch.sample_positions + 1000)
        tokens[wrong] = run_step(base, self, StepInput(later)).token_ids[wrong]
        return tokens

    return _verifying(base, change)


@fault("All samples of a sequence with drafted tokens are of its last token.", "worker.drafts.verified@1")
def drafts_sampled_at_the_end(base: Any) -> Methods:
    return other_batch(base, lambda batch: replace(batch, sample_tokens=batch.sample_tokens[:0]))


@fault("Samples of a sequence with drafted tokens share a random number.", "worker.drafts.verified@1")
def random_number_of_drafts_shared(base: Any) -> Methods:
    def shared(batch: StepBatch) -> StepBatch:
        if not len(batch.sample_tokens):
            return batch
        first = np.searchsorted(batch.sample_rows, batch.sample_rows)
        return replace(batch, sample_positions=batch.sample_positions[first])

    return other_batch(base, shared)


@fault("Restrictions of the tokens that may be sampled are ignored.", "worker.sampling.limits@1")
def allowed_tokens_ignored(base: Any) -> Methods:
    return _other_sampling(base, lambda one: replace(one, allowed_token_ids=None))


@fault("`top_k` is ignored.", "worker.sampling.top-k@1")
def top_k_ignored(base: Any) -> Methods:
    return _other_sampling(base, lambda one: replace(one, top_k=0))


def _other_sampling(base: Any, change: Callable[[SequenceSampling], SequenceSampling]) -> Methods:
    return other_step(base, lambda step: replace(step, new_sequences=tuple(map(change, step.new_sequences))))


@fault("Prompts of embedding requests give the same embedding.", "worker.execute.pooling@1")
def embeddings_alike(base: Any) -> Methods:
    def execute(self: Any, step: StepInput) -> StepOutput:
        output = run_step(base, self, step)
        return replace(output, embeddings={key: np.ones_like(one) for key, one in output.embeddings.items()})

    return stepping(execute)


@fault("Embeddings that are given for tokens are passed over.", "worker.execute.embedded@1")
def given_embeddings_ignored(base: Any) -> Methods:
    return other_step(base, lambda step: replace(step, embedded=()))


@fault("A step without tokens fails.", "worker.execute.empty@1")
def empty_step_fails(base: Any) -> Methods:
    def execute(self: Any, step: StepInput) -> StepOutput:
        if step.batch.num_tokens == 0:
            raise IndexError("list index out of range")
        return run_step(base, self, step)

    return stepping(execute)


@fault("Positions of a prefill chunk count from the chunk's first token.", "tokens.chunked.oracle@1")
def chunk_positions_restart(base: Any) -> Methods:
    def change(batch: StepBatch) -> StepBatch:
        lengths = np.diff(batch.query_start)
        starts = np.repeat(np.where(lengths > 1, batch.positions[batch.query_start[:-1]], 0), lengths)
        return replace(batch, positions=batch.positions - starts)

    return other_batch(base, change)


@fault("A prompt with several forks gives one token.", "worker.execute.forks@1")
def forks_sampled_once(base: Any) -> Methods:
    def execute(self: Any, step: StepInput) -> StepOutput:
        output = run_step(base, self, step)
        _, first = np.unique(step.batch.sample_rows, return_index=True)
        return replace(output, token_ids=output.token_ids[np.sort(first)])

    return stepping(execute)


@fault("Errors in a step are lost; it gives zeros.", "worker.execute.failure@1")
def step_errors_lost(base: Any) -> Methods:
    def execute(self: Any, step: StepInput) -> StepOutput:
        try:
            output = run_step(base, self, step)
        except Exception:
            output = StepOutput(token_ids=np.zeros(len(step.batch.sample_rows), np.int64))
        return output

    return stepping(execute)


@fault("A step that is submitted too early takes the place of the one before.", "worker.steps.order@1")
def early_step_replaces(base: Any) -> Methods:
    def submit(self: Any, step: StepInput) -> None:
        try:
            base.submit(self, step)
        except WorkerError:
            base.collect(self)
            base.submit(self, step)

    return {"submit": submit}


@fault("Where no step was submitted, an empty output is collected.", "worker.steps.order@1")
def nothing_collected(base: Any) -> Methods:
    def collect(self: Any) -> StepOutput:
        try:
            output: StepOutput = base.collect(self)
        except NothingToCollect:
            output = StepOutput(np.empty(0, np.int64))
        return output

    return {"collect": collect}


@fault("What fails in a step is raised when it is submitted.", "worker.execute.failure@1")
def step_fails_early(base: Any) -> Methods:
    def submit(self: Any, step: StepInput) -> None:
        self._output = run_step(base, self, step)

    def collect(self: Any) -> StepOutput:
        output: StepOutput = self._output
        return output

    return {"submit": submit, "collect": collect}


# Sleep


@fault("A step while memory is asleep gives tokens.", "worker.sleep.asleep@1")
def asleep_step_gives_tokens(base: Any) -> Methods:
    def execute(self: Any, step: StepInput) -> StepOutput:
        try:
            output = run_step(base, self, step)
        except MemoryAsleep:
            output = StepOutput(token_ids=np.zeros(len(step.batch.sample_rows), np.int64))
        return output

    return stepping(execute)


@fault("A wake does not restore the weights.", "tokens.sleep.level1@1")
def weights_not_restored(base: Any) -> Methods:
    discarding = other_sleep(base, lambda plan: replace(plan, policies={**plan.policies, WEIGHTS: Policy.DISCARD}))
    return {**weights_missing_served(base), **discarding}


@fault(
    "After a sleep that discarded the weights, steps are served without new ones.",
    "worker.sleep.level2-missing@1",
    "worker.sleep.level2-return@1",
)
def weights_missing_served(base: Any) -> Methods:
    def commit(self: Any, transaction: int) -> MemoryReport:
        report: MemoryReport = base.commit(self, transaction)
        status = self.status()
        if status.missing_weights and WEIGHTS not in status.memory.asleep:
            self.write_weights(WeightWrite.DECLARE)
        return report

    return {"commit": commit}


@fault("Steps with missing weights are refused with an error of no type.", "worker.sleep.level2-missing@1")
def weights_missing_untyped(base: Any) -> Methods:
    def execute(self: Any, step: StepInput) -> StepOutput:
        try:
            output = run_step(base, self, step)
        except WeightsMissing as error:
            raise RuntimeError("CUDA error") from error
        return output

    return stepping(execute)


@fault("A worker's sleep gives nothing back.", "worker.sleep.books@1")
def worker_never_sleeps(base: Any) -> Methods:
    def begin(self: Any, transaction: int, change: MemoryChange) -> None:
        pass

    def commit(self: Any, transaction: int) -> MemoryReport:
        return MemoryReport(preserved=0, discarded=0, skipped=0, seconds={"total": 0.0}, free_before=0, free_after=0)

    return {"begin": begin, "commit": commit}


@fault("A second sleep reports what the first one did.", "worker.sleep.repeated@1")
def second_sleep_reports_first(base: Any) -> Methods:
    def kept(self: Any, report: MemoryReport) -> MemoryReport:
        first: MemoryReport = vars(self).setdefault("_first_report", report)
        return first

    return other_end(base, SleepPlan, kept)


@fault("Unknown tags are left out of a sleep.", "worker.sleep.unknown-tag@1")
def worker_ignores_unknown_tags(base: Any) -> Methods:
    def known(self: Any, change: MemoryChange) -> MemoryChange:
        if isinstance(change, SleepPlan) and change.tags is not None:
            return replace(change, tags=change.tags & set(self.status().memory.tags))
        return change

    return other_change(base, known)


@fault("Weights without a source are taken to the host without a word.", "worker.sleep.source-void@1")
def source_tier_falls_back(base: Any) -> Methods:
    def begin(self: Any, transaction: int, change: MemoryChange) -> None:
        try:
            base.begin(self, transaction, change)
        except CapabilityRefused:
            if not isinstance(change, SleepPlan):
                raise
            self._transactions._last = transaction - 1
            base.begin(self, transaction, replace(change, tier=SleepTier.HOST))

    return {"begin": begin}


@fault("Every wake leaves some memory behind.", "stress.sleep.cycles@1")
def wake_leaks(base: Any) -> Methods:
    def leaking(self: Any, report: MemoryReport) -> MemoryReport:
        left = self._started.allocator.empty((1 << 20,), DType.UINT8, KV_CACHE, Policy.DISCARD)
        vars(self).setdefault("_left", []).append(left)
        return report

    return other_end(base, WakePlan, leaking)


# Weights


@fault("New weights are counted and not used.", "worker.weights.update@1", "stress.sleep.mixed-cycles@1")
def updates_ignored(base: Any) -> Methods:
    return other_write(base, WeightWrite.UPDATE, lambda _, weights, __: len(list(weights)))


@fault("An update of the weights does not void their backups.", "worker.sleep.update-survives@1")
def updates_lost_by_sleep(base: Any) -> Methods:
    def unmarked(self: Any, weights: Iterable[tuple[str, Tensor]], _: str | None) -> int:
        allocator = self._started.allocator
        mark, allocator.__class__.mark_written = allocator.__class__.mark_written, lambda *_: None
        try:
            count: int = base.write_weights(self, WeightWrite.UPDATE, weights)
            return count
        finally:
            allocator.__class__.mark_written = mark

    return other_write(base, WeightWrite.UPDATE, unmarked)


@fault("A reload counts the weights and loads none.", "worker.weights.reload@1", "tokens.sleep.level2-reload@1")
def reload_does_nothing(base: Any) -> Methods:
    def counted(self: Any, *_: object) -> int:
        count = len(self.status().missing_weights)
        self.write_weights(WeightWrite.DECLARE)
        return count

    return other_write(base, WeightWrite.RELOAD, counted)


@fault("No weights are ever missing.", "worker.sleep.level2-missing@1")
def missing_weights_hidden(base: Any) -> Methods:
    return {"status": lambda self: replace(base.status(self), missing_weights=frozenset())}


@fault("A reload that fails returns nothing, without an error.", "worker.weights.reload-refused@1")
def reload_errors_lost(base: Any) -> Methods:
    return _errors_lost(base, WeightWrite.RELOAD)


@fault("An update with a tensor that is not the model's is left without an error.", "worker.weights.update-refused@1")
def update_errors_lost(base: Any) -> Methods:
    return _errors_lost(base, WeightWrite.UPDATE)


def _errors_lost(base: Any, write: WeightWrite) -> Methods:
    def silent(self: Any, weights: Iterable[tuple[str, Tensor]], model: str | None) -> int:
        try:
            count: int = base.write_weights(self, write, weights, model)
        except HardpointError:
            count = 0
        return count

    return other_write(base, write, silent)


# Life


@fault("The constructor starts the device.", "worker.construct.no-device@1")
def constructor_starts_device(base: Any) -> Methods:
    def init(self: Any, context: WorkerContext) -> None:
        base.__init__(self, context)
        base.start(self)

    return {"__init__": init, "start": lambda self: None}


@fault("An unknown model fails with an error of no type.", "worker.refuse.model@1")
def unknown_model_untyped(base: Any) -> Methods:
    def load(self: Any) -> ModelInfo:
        try:
            info: ModelInfo = base.load(self)
        except HardpointError as error:
            raise AttributeError("'NoneType' object has no attribute 'config'") from error
        return info

    return {"load": load}


@fault(
    "The profile says that a step takes nothing and all memory is free.",
    "worker.profile.within-total@1",
)
def profile_reports_nothing(base: Any) -> Methods:
    def profile(self: Any) -> MemoryProfile:
        found: MemoryProfile = base.profile(self)
        return replace(found, used=0, peak=0, current=0)

    return {"profile": profile}


@fault("The profile leaves its KV cache behind.", "worker.kv.books@1")
def profile_leaks(base: Any) -> Methods:
    kept: list[Tensor] = []

    def profile(self: Any) -> MemoryProfile:
        kept.append(self._started.allocator.empty((1 << 20,), DType.UINT8, KV_CACHE))
        found: MemoryProfile = base.profile(self)
        return found

    return {"profile": profile}


@fault("A worker that was shut down keeps its memory.", "worker.shutdown.gives-back@1")
def shutdown_leaks(base: Any) -> Methods:
    kept: list[Any] = []

    def shutdown(self: Any) -> None:
        kept.append(vars(self).copy())
        base.shutdown(self)

    return {"shutdown": shutdown}


@fault("A second shutdown fails.", "worker.shutdown.twice@1")
def second_shutdown_fails(base: Any) -> Methods:
    def shutdown(self: Any) -> None:
        if vars(self).setdefault("_was_shut_down", False):
            raise RuntimeError("the context is destroyed")
        self._was_shut_down = True
        base.shutdown(self)

    return {"shutdown": shutdown}


@fault("The vocabulary is reported one token larger than it is.", "worker.load.model-info@1")
def vocabulary_size_wrong(base: Any) -> Methods:
    def load(self: Any) -> ModelInfo:
        info: ModelInfo = base.load(self)
        return replace(info, vocab_size=info.vocab_size + 1)

    return {"load": load}


@fault("A process can have one worker only, and no second one after it.", "worker.process.second@1")
def one_worker_per_process(base: Any) -> Methods:
    started: list[int] = []

    def start(self: Any) -> None:
        started.append(1)
        if len(started) > 1:
            raise RuntimeError("the device is in use")
        base.start(self)

    return {"start": start}


@fault("The device's parts are made twice.", "worker.lifecycle.parts@1")
def parts_made_twice(base: Any) -> Methods:
    def start(self: Any) -> None:
        base.start(self)
        base.start(self)

    return {"start": start}


@fault("A step before the model is loaded is an error of no type.", "worker.lifecycle.order@1")
def early_step_untyped(base: Any) -> Methods:
    def execute(self: Any, step: StepInput) -> StepOutput:
        try:
            output = run_step(base, self, step)
        except WorkerError as error:
            raise AttributeError("'NoneType' object has no attribute 'run'") from error
        return output

    return stepping(execute)


@fault("Where the KV cache does not fit, one of a single block is taken.", "worker.kv.too-large@1")
def kv_cache_too_large_shrinks(base: Any) -> Methods:
    def initialize_kv(self: Any, num_device_blocks: int, num_host_blocks: int) -> None:
        try:
            base.initialize_kv(self, num_device_blocks, num_host_blocks)
        except DeviceOutOfMemory:
            base.initialize_kv(self, 1, num_host_blocks)

    return {"initialize_kv": initialize_kv}


# Settings and results


def _other_config(base: Any, **settings: Any) -> Methods:
    def init(self: Any, context: WorkerContext) -> None:
        base.__init__(self, replace(context, config=replace(context.config, **settings)))

    return {"__init__": init}


@fault("The block size that was asked for is replaced by the backend's own.", "worker.refuse.block-size@1")
def block_size_ignored(base: Any) -> Methods:
    return _other_config(base, block_size=None)


@fault("The type that was asked for is replaced by the model's.", "worker.refuse.dtype@1")
def dtype_ignored(base: Any) -> Methods:
    return _other_config(base, dtype=None)


@fault("The longest context that was asked for is ignored.", "worker.refuse.context@1")
def context_ignored(base: Any) -> Methods:
    return _other_config(base, max_model_len=None)


@fault("The share of memory that was asked for is ignored.", "worker.profile.utilization@1")
def utilization_ignored(base: Any) -> Methods:
    return _other_config(base, memory_utilization=None)


@fault("Dummy weights are the same for every seed.", "worker.load.dummy@1")
def dummy_seed_ignored(base: Any) -> Methods:
    return _other_config(base, seed=0)


@fault("The KV cache is half as large as asked for.", "worker.kv.books@1")
def kv_cache_halved(base: Any) -> Methods:
    def initialize_kv(self: Any, num_device_blocks: int, num_host_blocks: int) -> None:
        base.initialize_kv(self, num_device_blocks // 2, num_host_blocks)

    return {"initialize_kv": initialize_kv}


@fault("Log probabilities are not normalised.", "tokens.logprobs.oracle@1")
def logprobs_not_normalised(base: Any) -> Methods:
    return _other_logprobs(base, lambda values, _: values + np.float32(1.0))


@fault("The last bit of log probabilities differs in the first steps.", "determinism.worker.run-to-run@1")
def first_logprobs_differ(base: Any) -> Methods:
    runs = iter(range(1 << 62))
    return _other_logprobs(base, lambda values, _: np.nextafter(values, np.float32(0)) if next(runs) < 3 else values)


@fault(
    "The last bit of log probabilities differs in steps of several sequences.", "determinism.worker.batch-invariant@1"
)
def logprobs_of_batches_differ(base: Any) -> Methods:
    def change(values: Any, step: StepInput) -> Any:
        return np.nextafter(values, np.float32(0)) if step.batch.num_seqs > 1 else values

    return _other_logprobs(base, change)


def _other_logprobs(base: Any, change: Callable[[Any, StepInput], Any]) -> Methods:
    def execute(self: Any, step: StepInput) -> StepOutput:
        output = run_step(base, self, step)
        changed = {row: replace(one, logprobs=change(one.logprobs, step)) for row, one in output.logprobs.items()}
        return replace(output, logprobs=changed)

    return stepping(execute)


@fault("After an update that broke off, the half-written weights are served.", "worker.weights.update-failure@1")
def half_updated_weights_served(base: Any) -> Methods:
    def served(self: Any, weights: Iterable[tuple[str, Tensor]], _: str | None) -> int:
        try:
            count: int = base.write_weights(self, WeightWrite.UPDATE, weights)
            return count
        finally:
            self.write_weights(WeightWrite.DECLARE)

    return other_write(base, WeightWrite.UPDATE, served)


@fault("A wake of the weights wakes all.", "worker.sleep.partial-wake@1")
def partial_wake_wakes_all(base: Any) -> Methods:
    def whole(self: Any, change: MemoryChange) -> MemoryChange:
        known = change.tags is not None and change.tags <= set(self.status().memory.tags)
        return WakePlan() if known and isinstance(change, WakePlan) else change

    return other_change(base, whole)


@fault("A sleep of the KV cache takes the weights along.", "tokens.sleep.kv-recompute@1")
def cache_takes_weights_along(base: Any) -> Methods:
    return other_sleep(base, lambda plan: replace(plan, tags=None) if plan.tags == frozenset({KV_CACHE}) else plan)


@fault("A report does not count what a kept backup holds already.", "worker.sleep.backup-clean@1")
def kept_backup_not_counted(base: Any) -> Methods:
    return other_end(base, SleepPlan, lambda _, report: replace(report, skipped=0))


@fault("Live KV blocks are not preserved.", "tokens.sleep.kv-live@1", "worker.sleep.addresses@1")
def live_blocks_ignored(base: Any) -> Methods:
    return other_sleep(base, forgetting_blocks)


def forgetting_blocks(plan: SleepPlan) -> SleepPlan:
    """Return a plan in which no KV block is live."""
    return replace(plan, live_blocks=None if plan.live_blocks is None else ())


@fault("Weights that are damaged fail with an error of no type.", "worker.weights.corrupt@1")
def corrupt_weights_untyped(base: Any) -> Methods:
    def load(self: Any) -> ModelInfo:
        try:
            info: ModelInfo = base.load(self)
        except CorruptWeights as error:
            raise RuntimeError("bad file") from error
        return info

    return {"load": load}


@fault("The end of one worker is the end of all of the process.", "worker.process.side-by-side@1")
def workers_end_together(base: Any) -> Methods:
    started: list[Any] = []

    def start(self: Any) -> None:
        started.append(self)
        base.start(self)

    def shutdown(self: Any) -> None:
        while started:
            base.shutdown(started.pop())

    return {"start": start, "shutdown": shutdown}


@fault("Every worker leaves a file open.", "stress.worker.restarts@1")
def worker_leaves_a_file_open(base: Any) -> Methods:
    def start(self: Any) -> None:
        os.open(os.devnull, os.O_RDONLY)
        base.start(self)

    return {"start": start}


@fault("The type of the KV cache that was asked for is replaced by the model's.", "worker.refuse.kv-dtype@1")
def kv_dtype_ignored(base: Any) -> Methods:
    return _other_config(base, kv_dtype=None)


@fault("A worker is made for small steps, whatever is asked for.", "worker.profile.monotone@1")
def step_size_ignored(base: Any) -> Methods:
    return _other_config(base, max_num_batched_tokens=64, max_num_seqs=8)
