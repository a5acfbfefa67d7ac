"""Running a loaded model: a step is launched, and its output built once the device has come to its end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from hardpoint.interfaces.attention import AttentionBackend, AttentionPlan
from hardpoint.interfaces.batch import (
    Int32Array,
    Int64Array,
    Pooling,
    PromptLogprobs,
    SequenceSampling,
    StepBatch,
    StepInput,
    StepOutput,
    in_groups,
)
from hardpoint.interfaces.errors import OutputFailed
from hardpoint.interfaces.platform import Event, Platform
from hardpoint.interfaces.worker import WorkerConfig
from hardpoint.sampling.sampler import SampledTokens, Sampler
from hardpoint.worker.drafts import as_decodes
from hardpoint.worker.dummy_batches import dummy_batch, dummy_decode
from hardpoint.worker.embedding_cache import EmbeddingCache
from hardpoint.worker.kv_groups import in_chunks
from hardpoint.worker.kv_memory import KVMemory
from hardpoint.worker.kv_tiers import TierWork
from hardpoint.worker.loading import LoadedModel
from hardpoint.worker.pooler import Pooler
from hardpoint.worker.ranks import parallel_rank_of
from hardpoint.worker.step_graphs import StepCapture, StepGraphs

if TYPE_CHECKING:
    from torch import Tensor

    from hardpoint.worker.draft_model import DraftModel

T = TypeVar("T")

_NO_TOKENS: Int64Array = np.empty(0, np.int64)
_NEVER = np.iinfo(np.int64).max

_LONG_CONTEXT = 1024
"""Tokens of a context that attention is sure to divide where it divides any."""
_SCORED_ROWS = 64
"""Tokens of a prompt whose logits are there at one time; no more than a step samples, which is what the profile has measured."""


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step whose work is queued on the device.

    Attributes:
        sampled: its tokens; None on ranks that do not sample it.
        embeddings: by sequence id, float32[hidden_size], on their way to the host.
        scores: by sequence id, blocks of what `PromptLogprobs` has, on their way to the host.
        drafted: see `StepOutput`.
        done: the end of the step's work; None where all work is done already.
        tiers: moves of blocks to and from the tiers.
    """

    done: Event | None
    sampled: SampledTokens | None = None
    embeddings: dict[int, Tensor] = field(default_factory=dict)
    scores: dict[int, list[tuple[Tensor, Tensor, Tensor]]] = field(default_factory=dict)
    drafted: Int64Array = field(default_factory=lambda: _NO_TOKENS)
    tiers: TierWork | None = None

    def collect(self) -> StepOutput:
        """Wait for the step's end and return its output; raises what the device failed with."""
        if self.done is not None:
            self.done.synchronize()
        output = self._output()
        return output if self.tiers is None else replace(output, tiers=self.tiers.report())

    def _output(self) -> StepOutput:
        embeddings = {seq_id: vector.numpy() for seq_id, vector in self.embeddings.items()}
        scores = {
            seq_id: PromptLogprobs(*(torch.cat(parts).numpy() for parts in zip(*blocks, strict=True)))
            for seq_id, blocks in self.scores.items()
        }
        if self.sampled is None:
            return StepOutput(_NO_TOKENS, embeddings=embeddings, prompt_logprobs=scores)
        sampled = self.sampled.collect()
        return StepOutput(sampled.token_ids, sampled.logprobs, embeddings, sampled.failed, scores, self.drafted)


class ModelRunner:
    """A rank's steps: blocks are moved, the model runs, eagerly or by a captured graph, and the driver samples and pools.

    What sequences need from one step to the next is here: rows of the sampler, chunked prompts' poolings. All work of a step is queued
    on the device in the order of the steps, and the host waits for none of it: a step may use tokens, blocks and rows that one before it
    is still writing.
    """

    def __init__(
        self,
        config: WorkerConfig,
        loaded: LoadedModel,
        *,
        attention: AttentionBackend,
        capture: StepCapture,
        kv: KVMemory,
        sampler: Sampler,
        platform: Platform,
        draft: DraftModel | None = None,
    ) -> None:
        """Begin without sequences, and capture nothing yet.

        Args:
            draft: makes the drafted tokens of steps; None where they come with them.
        """
        self._model, self._groups, self._adapters = loaded.model, loaded.groups, loaded.adapters
        self._attention, self._capture, self._kv = attention, capture, kv
        self._sampler, self._platform, self._draft = sampler, platform, draft
        self._pooler, self._plain = Pooler(), PlainRows()
        self._embedding_cache = EmbeddingCache(loaded.model, platform, loaded.info.dtype.to_torch())
        self._embeds = parallel_rank_of(config).is_first
        self._is_driver = config.rank == config.driver_rank
        self._scored_rows = min(_SCORED_ROWS, config.max_num_samples)
        self._max_tokens = config.max_num_batched_tokens
        self._graphs: StepGraphs | None = None
        self._graphed_cache: Tensor | None = None

    # Steps

    def launch(self, step: StepInput) -> LaunchedStep:
        """Queue one step: swap, copy, compute and sample; see `Worker.submit`."""
        tiers = self._kv.move_tiers(step.batch.tier_moves)
        if self._draft is not None:
            # A block that the draft model cannot load costs right guesses and nothing else, so that its report is dropped.
            self._draft.kv.move_tiers(step.batch.tier_moves)
        self._pooler.remove(step.finished_seq_ids)
        self._plain.write(step.new_sequences)
        if self._is_driver:
            self._sampler.compile_grammars(step.new_sequences)
        batch, drafted, cache = step.batch, _NO_TOKENS, self._kv.cache
        if self._draft is not None:
            self._draft.forget(step.finished_seq_ids)
            batch, drafted = self._draft.draft(batch, self._plain)
        has_guesses = len(batch.sample_tokens) > 0
        batch = as_decodes(batch)
        if batch is not step.batch:
            step = replace(step, batch=batch)
        self._kv.move_blocks(batch)
        embedded = self._embedding_cache.of_step(step) if self._embeds else None
        if batch.num_tokens == 0:
            return LaunchedStep(self._platform.record_event(), tiers=tiers)
        last = batch.sampled_tokens()
        if has_guesses and self._is_driver and self._draft is None:
            self._prefetch_masks(batch, last)
        # A step that pools or scores wants all tokens' hidden states, and samples from some of them.
        wants_all = bool(step.pooling or step.scoring)
        hidden_rows = np.arange(batch.num_tokens, dtype=np.int32) if wants_all else last
        # Looked up before the model runs, which drives the host's arrays from the processor's caches.
        rows, positions = batch.sample_state_rows, batch.sample_positions
        is_plain = self._plain.all(rows, positions)
        with nullcontext(False) if self._adapters is None else self._adapters.during(step) as is_adapted:
            hidden = self.forward(
                batch, cache, hidden_rows, _token_types(step), embedded, step.positions, is_adapted=is_adapted
            )
        scores = self._scores(step, hidden)
        if not len(last):
            embeddings = self._catching_output_failure(lambda: self._embeddings(step, hidden))
            return LaunchedStep(self._platform.record_event(), embeddings=embeddings, scores=scores, tiers=tiers)
        embeddings = self._embeddings(step, hidden)
        if wants_all and hidden.shape[0]:
            hidden = hidden.index_select(0, self._platform.upload(last))
        result = self.argmax(hidden) if is_plain else self.logits(hidden)
        if not self._is_driver:
            return LaunchedStep(self._platform.record_event(), tiers=tiers)

        def sample() -> SampledTokens:
            self._sampler.set_rows(step.new_sequences)
            return self._sampler.take(result, rows) if is_plain else self._sampler.sample(result, rows, positions)

        sampled = self._catching_output_failure(sample)
        return LaunchedStep(self._platform.record_event(), sampled, embeddings, scores, drafted, tiers)

    def forward(
        self,
        batch: StepBatch,
        cache: Tensor,
        rows: Int32Array | None = None,
        token_types: Int64Array | None = None,
        embedded: tuple[Tensor, Tensor] | None = None,
        positions: Int64Array | None = None,
        *,
        is_adapted: bool = False,
    ) -> Tensor:
        """Run the model on one step and return hidden states; see `RunnableModel.run`.

        Args:
            cache: the whole KV cache.
            rows: token indices, by default those that are sampled.
            token_types: int64[T], where some are not 0.
            embedded: see `RunnableModel.run`.
            positions: see `StepInput.positions`.
            is_adapted: some tokens go through adapters, which captured graphs do without.
        """
        with torch.inference_mode():
            self._platform.check_computes()
            if rows is None:
                rows = batch.sampled_tokens()
            early = self._tokens_in_flight(batch)
            is_plain = embedded is None and positions is None and token_types is None and not is_adapted
            graphs = self._graphs if cache is self._graphed_cache and is_plain else None
            if graphs is not None and (hidden := graphs.replay(batch, rows, early)) is not None:
                return hidden
            upload = self._platform.upload
            metadata = self._prepare(batch)
            token_ids, places = upload(batch.token_ids), upload(batch.positions if positions is None else positions)
            if early is not None:
                token_ids.index_copy_(0, *early)
            types = None if token_types is None else upload(token_types)
            return self._model.run(token_ids, places, metadata, cache, upload(rows), types, embedded)

    def _prepare(self, batch: StepBatch) -> tuple[Any, ...]:
        """Return the step's metadata of each KV cache group, and of the states where the model has any."""
        of_groups = tuple(
            self._attention.prepare(group.plan, in_chunks(step, group.chunk, group.plan.block_size))
            for group, step in zip(self._groups, batch.by_group(), strict=True)
        )
        states = self._kv.states
        return of_groups if states is None else (*of_groups, states.prepare(batch))

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Return float32[rows, vocab_size] of hidden states; all ranks of a stage call it alike."""
        return self._model.logits(hidden)

    @torch.inference_mode()
    def argmax(self, hidden: Tensor) -> Tensor:
        """Return int64[rows], the tokens of the highest logits; all ranks of a stage call it alike."""
        return self._model.argmax(hidden)

    def _tokens_in_flight(self, batch: StepBatch) -> tuple[Tensor, Tensor] | None:
        """Return where the step has tokens that steps in flight sample, and which they are, int64[k] both on the device."""
        if not self._platform.steps_in_flight or batch.token_ids.min() >= 0:
            return None
        places = np.flatnonzero(batch.token_ids < 0)
        sequences = np.searchsorted(batch.query_start, places, side="right") - 1
        return self._platform.upload(places), self._sampler.last_tokens(batch.state_rows[sequences])

    def _prefetch_masks(self, batch: StepBatch, last: Int32Array) -> None:
        """Tell the sampler what is guessed: of a sequence with several samples, the tokens that those after the first follow."""
        rows = batch.sample_state_rows
        is_guess = np.zeros(len(rows), np.bool_)
        is_guess[1:] = rows[1:] == rows[:-1]
        self._sampler.prefetch_masks(rows[is_guess], batch.token_ids[last[is_guess]])

    def _catching_output_failure(self, make: Callable[[], T]) -> T:
        """Return what a rank makes of a step when it needs the others no more; raises OutputFailed for what fails in it.

        A device that failed in what was queued before says so when it is waited for, and that is no failed output.
        """
        try:
            return make()
        except Exception as error:
            self._platform.synchronize()
            raise OutputFailed.after(error) from error

    def _embeddings(self, step: StepInput, hidden: Tensor) -> dict[int, Tensor]:
        """Return what is made of the prompts that end in a step, on its way to the host, on the driver."""
        embeddings: dict[int, Tensor] = {}
        if not step.pooling or not self._is_driver:
            return embeddings
        batch = step.batch
        for row, seq_id in enumerate(batch.seq_ids.tolist()):
            request = step.pooling.get(seq_id)
            if request is None:
                continue
            chunk = hidden[batch.query_start[row] : batch.query_start[row + 1]]
            context = int(batch.context_lens[row])
            pooled = self._pooler.add(
                seq_id, request.pooling, chunk, ends=context == request.prompt_len, starts=context == len(chunk)
            )
            if pooled is not None:
                rows = self._model.pooled(pooled, request.task).float()
                embeddings[seq_id] = self._platform.download(rows if request.pooling is Pooling.ALL else rows[0])
        return embeddings

    def _scores(self, step: StepInput, hidden: Tensor) -> dict[int, list[tuple[Tensor, Tensor, Tensor]]]:
        """Return the log probabilities of prompts that a step asks for, on the driver; all ranks of a stage compute the logits."""
        scores: dict[int, list[tuple[Tensor, Tensor, Tensor]]] = {}
        if not step.scoring or not hidden.shape[0]:
            return scores
        batch = step.batch
        scored: dict[int, Tensor] = {}
        by_count: defaultdict[int, list[int]] = defaultdict(list)
        for row, seq_id in enumerate(batch.seq_ids.tolist()):
            asked = step.scoring.get(seq_id)
            if asked is not None:
                start = int(batch.query_start[row]) + asked.first
                scored[seq_id] = hidden[start : start + len(asked.targets)]
                by_count[asked.count].append(seq_id)
        for count, seq_ids in by_count.items():
            together = self._scores_together(
                [scored[one] for one in seq_ids], [step.scoring[one].targets for one in seq_ids], count
            )
            for place, seq_id in enumerate(seq_ids):
                blocks = (
                    self._blocks_of_scores(scored[seq_id], step.scoring[seq_id].targets, count)
                    if together is None
                    else [together[place]]
                )
                if self._is_driver:
                    scores[seq_id] = blocks
        return scores

    @torch.inference_mode()
    def _scores_together(
        self, hidden: list[Tensor], targets: list[Int64Array], count: int
    ) -> list[tuple[Tensor, Tensor, Tensor]] | None:
        """Return each sequence's scores, on their way to the host, computed in one call; None where the model cannot."""
        found = self._model.logprobs(torch.cat(hidden), self._platform.upload(np.concatenate(targets)), count)
        if found is None:
            return None
        lengths = [len(one) for one in targets]
        ids, values, ranks = (torch.split(self._platform.download(part), lengths) for part in found)
        return list(zip(ids, values, ranks, strict=True))

    @torch.inference_mode()
    def _blocks_of_scores(self, hidden: Tensor, targets: Int64Array, count: int) -> list[tuple[Tensor, Tensor, Tensor]]:
        blocks: list[tuple[Tensor, Tensor, Tensor]] = []
        rows = self._scored_rows
        for at in range(0, len(targets), rows):
            logits = self.logits(hidden[at : at + rows])
            if self._is_driver:
                blocks.append(self._sampler.score(logits, targets[at : at + rows], count))
        return blocks

    def forget_embeddings(self) -> None:
        """Drop the embeddings of all sources."""
        self._embedding_cache.clear()

    # Graphs

    def warm_up(self) -> None:
        """Run what compiles at its first use, so that no request waits for it, then capture steps where there are to be graphs.

        Raises GraphCaptureFailed.
        """
        self.drop_graphs()
        cache, plan = self._kv.cache, self._groups[0].plan
        if self._platform.compiles:
            self._run_small_steps(cache, plan)
        self._platform.synchronize()
        if not plan.request.bidirectional:
            self._graphs, self._graphed_cache = self._capture.capture(cache), cache

    def _run_small_steps(self, cache: Tensor, plan: AttentionPlan) -> None:
        """Run a prefill, a decode with a short context, one whose context is attended in several parts, and a copy of a block."""
        blocks, num_groups = cache.shape[1 + plan.kv_cache.axes.index("block")], len(self._groups)
        longest = min(_LONG_CONTEXT, plan.request.max_context, blocks // num_groups * plan.block_size)
        short = min(16, longest, plan.block_size, self._max_tokens)
        prompt = dummy_batch(num_tokens=short, max_len=short, block_size=plan.block_size, max_seqs=1)
        decodes = [dummy_decode(context, plan.block_size) for context in (1, longest)]
        for batch in [prompt] if plan.request.bidirectional else [prompt, *decodes]:
            self.argmax(self.forward(in_groups(batch, num_groups, plan.block_size), cache))
        if blocks > 1 and not plan.request.bidirectional:
            self._attention.copy_blocks(cache, np.array([[0, blocks - 1]], np.int32))

    def drop_graphs(self) -> None:
        """Drop the graphs and their memory, if there are any."""
        graphs, self._graphs, self._graphed_cache = self._graphs, None, None
        if graphs is not None:
            graphs.reset()

    def graph_bytes(self) -> int | None:
        """Return the device bytes that the graphs hold now, None where there are none."""
        return None if self._graphs is None else self._graphs.resident_bytes()


class PlainRows:
    """From which token on the sequence of each row of the state table is given the argmax of its unchanged logits.

    All ranks know it alike, so that they compute the same output of a step, which only the driver samples.
    """

    def __init__(self) -> None:
        self._first: Int64Array = np.zeros(0, np.int64)

    def write(self, sequences: Sequence[SequenceSampling]) -> None:
        """Begin sequences, each in its `state_row`; raises ValueError where one has none."""
        for sampling in sequences:
            row = sampling.state_row
            if row < 0:
                raise ValueError(f"sequence {sampling.seq_id} has no row of the worker's state")
            if row >= len(self._first):
                self._first = np.concatenate((self._first, np.zeros(max(64, row + 1), np.int64)))
            self._first[row] = sampling.min_tokens if sampling.is_pure_greedy else _NEVER

    def all(self, rows: Int32Array, positions: Int32Array) -> bool:
        """Whether the next token of all these rows is such; `positions` are how many tokens their sequences have."""
        return bool((positions >= self._first[rows]).all())


def _token_types(step: StepInput) -> Int64Array | None:
    """Return to which of two texts each token of a step belongs, None where all are of the first."""
    if not step.pooling or not any(request.second_text for request in step.pooling.values()):
        return None
    batch = step.batch
    types = np.zeros(batch.num_tokens, np.int64)
    for row, seq_id in enumerate(batch.seq_ids.tolist()):
        second = step.pooling[seq_id].second_text if seq_id in step.pooling else 0
        if second:
            tokens = slice(batch.query_start[row], batch.query_start[row + 1])
            types[tokens] = batch.positions[tokens] >= second
    return types
