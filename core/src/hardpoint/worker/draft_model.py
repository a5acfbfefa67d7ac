"""A smaller model that guesses what a rank's model will say, while a step is computed that verifies the guesses."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from hardpoint.interfaces.batch import Int32Array, Int64Array, StepBatch
from hardpoint.interfaces.errors import CapabilityRefused, ConfigError
from hardpoint.worker.drafts import as_decodes
from hardpoint.worker.loading import load_rank

if TYPE_CHECKING:
    from contextlib import ExitStack

    from torch import Tensor

    from hardpoint.interfaces.allocator import DeviceAllocator
    from hardpoint.interfaces.attention import AttentionBackend
    from hardpoint.interfaces.collectives import Collectives
    from hardpoint.interfaces.kernels import KernelSet
    from hardpoint.interfaces.platform import Platform
    from hardpoint.interfaces.worker import WorkerContext
    from hardpoint.sampling.sampler import Sampler
    from hardpoint.worker.kv_memory import KVMemory
    from hardpoint.worker.loading import LoadedModel
    from hardpoint.worker.model_runner import ModelRunner, PlainRows
    from hardpoint.worker.weights import Weights


def load_draft(
    context: WorkerContext,
    target: LoadedModel,
    *,
    allocator: DeviceAllocator,
    attention: AttentionBackend,
    kernels: KernelSet | None,
    platform: Platform,
    groups: ExitStack,
) -> tuple[WorkerContext, LoadedModel]:
    """Load the draft model of a worker's configuration, beside the model whose tokens it guesses.

    It runs by the same blocks, for contexts as long, and without graphs and adapters.

    Returns:
        The context that it was loaded with, and the model.

    Raises:
        ConfigError: another vocabulary, or a shorter context.
        CapabilityRefused: one of the two keeps what a guess would change for good, or not all keys in one block table.
        What `load_rank` raises.
    """
    config, info = context.config, target.info
    assert config.draft_model is not None
    own = replace(
        config,
        model=config.draft_model,
        draft_model=None,
        tokenizer=None,
        hf_overrides=None,
        load_format="dummy" if config.load_format == "dummy" else "auto",
        dtype=config.dtype or info.dtype,
        max_model_len=info.max_model_len,
        block_size=target.plan.block_size,
        kv_cache_groups=False,
        max_loras=0,
        # A step of the draft model may have the last guess of each sequence beside the step's own tokens.
        max_num_batched_tokens=config.max_num_batched_tokens + config.max_num_seqs,
        enforce_eager=True,
    )
    context = replace(context, config=own)
    if info.kv_group_windows != (0,):
        raise CapabilityRefused(
            "a draft model is not used here",
            ["the model's layers see unlike windows, and give back the blocks that a draft model would still read"],
            hint="Give disable_hybrid_kv_cache_manager=True, or leave speculative_config out",
        )
    draft = load_rank(
        context,
        allocator=allocator,
        attention=attention,
        kernels=kernels,
        platform=platform,
        groups=groups,
        ranks=target.ranks,
    )
    if draft.info.vocab_size != info.vocab_size:
        raise ConfigError(
            "a draft model has the vocabulary of the model",
            found=f"{draft.info.vocab_size} tokens in {own.model}, and {info.vocab_size} in {config.model}",
            hint="Choose a smaller model of the same family",
        )
    if draft.info.state_bytes or draft.info.whole_prompts or not draft.info.is_generative:
        what = "keeps recurrent states" if draft.info.state_bytes else "generates no text"
        raise CapabilityRefused(
            f"{own.model} is no draft model",
            [f"{draft.info.architecture} {what}"],
            hint="Choose a model whose layers attend to its text",
        )
    return context, draft


_MAX_BEHIND = 32
"""Tokens of a sequence that its draft model leaves for later: few enough that little is lost for the prefix cache when it ends."""


@dataclass(slots=True)
class _Behind:
    """Tokens of a sequence that the draft model has not computed yet, from a position on.

    They are those of steps without guesses, or the last guess, which none was to follow: part of the text where all before it were right.
    """

    position: int
    token_ids: list[int]

    @property
    def end(self) -> int:
        """The position after them."""
        return self.position + len(self.token_ids)


class DraftModel:
    """Makes drafted tokens, with keys and values of its own in the blocks that the model's have.

    It computes what the model computes, prompts included, in a step before the model does, so that what it needs of a sequence is there
    whatever became of the guesses, also in blocks of the prefix cache. Where a step has only decodes, and no guesses pay, it computes
    nothing, and comes after with many tokens at once. A block without its keys and values costs right guesses and nothing else.

    A guess is drawn as the token itself will be: with the same parameters, and the random number of its place. So where the two models'
    distributions are alike, their tokens are mostly the same.

    Ranks that share the model's layers share its layers too. The first of them draws, and tells the others.

    Attributes:
        weights, kv, runner: as the rank's model has them.
    """

    def __init__(
        self,
        weights: Weights,
        kv: KVMemory,
        runner: ModelRunner,
        sampler: Sampler,
        platform: Platform,
        *,
        ranks: Collectives | None,
        is_driver: bool,
        block_size: int,
        max_tokens: int,
    ) -> None:
        """Begin without sequences.

        Args:
            ranks: those that share the model's layers; None where there are no others.
            is_driver: this rank is the one that draws.
            max_tokens: most tokens that the model computes at a time.
        """
        self.weights, self.kv, self.runner = weights, kv, runner
        self._sampler, self._platform = sampler, platform
        self._ranks, self._is_driver = ranks, is_driver
        self._block_size, self._max_tokens = block_size, max_tokens
        self._behind: dict[int, _Behind] = {}

    def forget(self, seq_ids: Iterable[int]) -> None:
        """Forget sequences that have ended."""
        for seq_id in seq_ids:
            self._behind.pop(seq_id, None)

    def draft(self, batch: StepBatch, plain: PlainRows) -> tuple[StepBatch, Int64Array]:
        """Compute a step as far as its tokens are known, and guess the others.

        Args:
            plain: which rows are given the argmax.

        Returns:
            The step with its drafted tokens, and what `StepOutput.drafted` has.
        """
        self.kv.move_blocks(batch)
        single = as_decodes(batch)
        known = np.flatnonzero(single.token_ids[: single.num_decodes] >= 0)
        counts = np.diff(known, append=single.num_decodes) - 1
        firsts, counts = known[counts > 0], counts[counts > 0]
        if not len(firsts) and single.num_decodes == single.num_tokens and self._fall_behind(single):
            return batch, np.empty(0, np.int64)
        start, outputs = self._known_step(single, known, firsts)
        hidden = self.runner.forward(start, self.kv.cache, outputs)
        if not len(firsts):
            return batch, np.empty(0, np.int64)
        token_ids, drafted = batch.token_ids.copy(), np.full(len(batch.sample_rows), -1, np.int64)
        tokens = firsts
        while True:
            # `single` has its decodes first, each of which is sampled: sample `i` is that of token `i`.
            drafted[tokens] = token_ids[tokens + 1] = self._draw(hidden, single, tokens, plain)
            goes_on = counts > tokens - firsts + 1
            self._note_last(single, token_ids, tokens[~goes_on] + 1)
            firsts, counts, tokens = firsts[goes_on], counts[goes_on], tokens[goes_on] + 1
            if not len(tokens):
                return replace(batch, token_ids=token_ids), drafted
            step = _decodes(single, tokens, token_ids[tokens])
            hidden = self.runner.forward(step, self.kv.cache, np.arange(len(tokens), dtype=np.int32))

    def _fall_behind(self, single: StepBatch) -> bool:
        """Leave a step for later; returns False, with nothing done, where some sequence is too far behind."""
        found = (self._behind.get(seq_id) for seq_id in single.seq_ids.tolist())
        if any(one is not None and len(one.token_ids) == _MAX_BEHIND for one in found):
            return False
        for seq_id, position, token in _tokens(single, np.arange(single.num_tokens), single.token_ids):
            behind = self._behind.get(seq_id)
            if behind is None or behind.end != position:
                self._behind[seq_id] = _Behind(position, [token])
            else:
                behind.token_ids.append(token)
        return True

    def _known_step(self, single: StepBatch, known: Int64Array, firsts: Int64Array) -> tuple[StepBatch, Int32Array]:
        """Return the step without unknown tokens, with those that are behind, and where it has the tokens that guesses follow."""
        decodes, prompts = _decodes(single, known, single.token_ids[known]), _prefills(single)
        self.forget(prompts.seq_ids.tolist())
        found = [self._behind.pop(seq_id, None) for seq_id in decodes.seq_ids.tolist()]
        late = [(i, one) for i, one in enumerate(found) if one and one.end == decodes.positions[i]]
        count = 0
        if late:
            tokens = np.array([token for _, one in late for token in one.token_ids], np.int64)
            owners = np.repeat([i for i, _ in late], [len(one.token_ids) for _, one in late])
            before = _decodes(decodes, owners, tokens)
            positions = np.concatenate([np.arange(one.position, one.end) for _, one in late])
            blocks = before.block_table[before.rows, positions // self._block_size]
            slots = (blocks * self._block_size + positions % self._block_size).astype(np.int32)
            contexts = (positions + 1).astype(np.int32)
            before = replace(before, positions=positions, slot_mapping=slots, context_lens=contexts)
            count = len(tokens)
            if count + decodes.num_tokens + prompts.num_tokens <= self._max_tokens:
                decodes = _joined(before, decodes)
            else:
                for start in range(0, count, self._max_tokens):
                    places = np.arange(start, min(count, start + self._max_tokens))
                    part = _decodes(before, places, tokens[places])
                    self.runner.forward(part, self.kv.cache, np.empty(0, np.int32))
                count = 0
        outputs = count + np.searchsorted(known, firsts)
        return (_joined(decodes, prompts) if prompts.num_tokens else decodes), outputs.astype(np.int32)

    def _draw(self, hidden: Tensor, single: StepBatch, tokens: Int64Array, plain: PlainRows) -> Int64Array:
        rows, positions = single.state_rows[tokens], single.sample_positions[tokens]
        if plain.all(rows, positions):
            # All ranks compute the same argmax, so that none has to tell it.
            return self._on_host(self.runner.argmax(hidden))
        logits = self.runner.logits(hidden)
        if self._ranks is None:
            return self._sampled(logits, rows, positions)
        told: Tensor = logits.new_empty(len(rows), dtype=torch.int64)
        if self._is_driver:
            told = self._platform.upload(self._sampled(logits, rows, positions))
        self._ranks.broadcast(told, 0)
        return self._on_host(told)

    def _sampled(self, logits: Tensor, rows: Int32Array, positions: Int32Array) -> Int64Array:
        return self._sampler.guess(logits, rows, positions)

    def _on_host(self, tokens: Tensor) -> Int64Array:
        copied = self._platform.download(tokens)
        self._platform.synchronize()
        drawn: Int64Array = copied.numpy()
        return drawn

    def _note_last(self, single: StepBatch, token_ids: Int64Array, places: Int64Array) -> None:
        for seq_id, position, token in _tokens(single, places, token_ids):
            self._behind[seq_id] = _Behind(position, [token])


def _tokens(single: StepBatch, places: Int64Array, token_ids: Int64Array) -> Iterator[tuple[int, int, int]]:
    """Yield sequence, position and token at places of a step."""
    of = (single.seq_ids[places], single.positions[places], token_ids[places])
    return zip(*(part.tolist() for part in of), strict=True)


def _decodes(single: StepBatch, places: Int64Array, token_ids: Int64Array) -> StepBatch:
    """Return some decodes of a step, with these tokens."""
    count = len(places)
    return replace(
        single,
        token_ids=token_ids,
        positions=single.positions[places],
        slot_mapping=single.slot_mapping[places],
        query_start=np.arange(count + 1, dtype=np.int32),
        context_lens=single.context_lens[places],
        rows=single.rows[places],
        seq_ids=single.seq_ids[places],
        num_decodes=count,
    )


def _prefills(single: StepBatch) -> StepBatch:
    """Return what of a step is no decode."""
    first = single.num_decodes
    return replace(
        single,
        token_ids=single.token_ids[first:],
        positions=single.positions[first:],
        slot_mapping=single.slot_mapping[first:],
        query_start=single.query_start[first:] - first,
        context_lens=single.context_lens[first:],
        rows=single.rows[first:],
        seq_ids=single.seq_ids[first:],
        num_decodes=0,
    )


def _joined(first: StepBatch, second: StepBatch) -> StepBatch:
    """Return decodes, and what follows them over the same block table."""
    return replace(
        second,
        token_ids=np.concatenate((first.token_ids, second.token_ids)),
        positions=np.concatenate((first.positions, second.positions)),
        slot_mapping=np.concatenate((first.slot_mapping, second.slot_mapping)),
        query_start=np.concatenate((first.query_start[:-1], first.num_tokens + second.query_start)).astype(np.int32),
        context_lens=np.concatenate((first.context_lens, second.context_lens)),
        rows=np.concatenate((first.rows, second.rows)),
        seq_ids=np.concatenate((first.seq_ids, second.seq_ids)),
        num_decodes=first.num_decodes + second.num_decodes,
    )
