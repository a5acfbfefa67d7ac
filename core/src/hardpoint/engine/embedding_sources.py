"""What prompts have in the place of tokens' embeddings: which tokens, of which sources, and which sources the workers hold."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from hardpoint.interfaces.batch import EmbeddedTokens, EmbeddingSource, Int64Array, StepBatch
from hardpoint.interfaces.errors import InvalidRequest

if TYPE_CHECKING:
    from hardpoint.engine.commands import EmbeddedSpans

_LAST_NUMBER = (1 << 31) - 1
_REMEMBERED = 1 << 16
"""Digests whose number is kept after the last prompt that had them, so that later prompts find what the prefix cache has."""


@dataclass(frozen=True, slots=True)
class _Span:
    """Tokens start to end of a prompt, which have the embeddings of a source from `row` on."""

    start: int
    end: int
    number: int
    row: int


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A prompt with embeddings of sources.

    Attributes:
        token_ids: the prompt's own, also of the tokens whose embeddings are others.
        positions: see `Generate.positions`.
    """

    token_ids: Int64Array
    spans: tuple[_Span, ...]
    sources: dict[int, EmbeddingSource]
    positions: Int64Array | None = None


@dataclass(slots=True)
class StepEmbeddings:
    """The parts of a `StepInput` of the same names."""

    embedded: list[EmbeddedTokens] = field(default_factory=list)
    new_sources: dict[int, EmbeddingSource] = field(default_factory=dict)
    dropped_sources: tuple[int, ...] = ()
    positions: Int64Array | None = None


class EmbeddingSources:
    """The sources of the prompts in progress, and of the workers' caches of embeddings.

    A source has a number, one for each digest, which stands for its tokens in the prefix cache: no two that differ have the same, so a
    prefix is found only where all its sources are the same too. Workers get a source with the step that computes the first of its tokens
    that the KV cache does not have, and hold its embeddings for the following steps and requests: the most recently used ones, within
    `max_bytes`, and beyond that only what one step needs.

    Args:
        first_number: above all token ids.
        row_bytes: of one embedding.
    """

    def __init__(self, first_number: int, row_bytes: int, max_bytes: int) -> None:
        self._first_number, self._row_bytes, self._max_bytes = first_number, row_bytes, max_bytes
        self._next_number = first_number
        self._numbers: OrderedDict[bytes, int] = OrderedDict()
        self._prompts: dict[int, _Prompt] = {}
        self._held: OrderedDict[int, int] = OrderedDict()
        self._held_bytes = 0
        self._dropped: list[int] = []

    def number(self, embedded: EmbeddedSpans) -> int:
        """Return the number of a source."""
        number = self._numbers.pop(embedded.digest, None)
        if number is None:
            if self._next_number > _LAST_NUMBER:
                raise InvalidRequest(
                    "the engine has no number left for embeddings it has not seen",
                    found=f"{_LAST_NUMBER + 1 - self._first_number} are in use",
                    hint="Make the engine anew",
                )
            number = self._next_number
            self._next_number += 1
        self._numbers[embedded.digest] = number
        if len(self._numbers) > _REMEMBERED:
            # The oldest source's prefixes are not found any more: if it comes again, it gets another number.
            self._numbers.popitem(last=False)
        return number

    def contents(self, embedded: Sequence[EmbeddedSpans]) -> list[tuple[int, int, int]]:
        """Return (start, end, number) of each span, as `Scheduler.add_request` takes them."""
        return [(start, end, number) for one in embedded for number in [self.number(one)] for start, end in one.spans]

    def add(
        self,
        seq_ids: Iterable[int],
        token_ids: Sequence[int],
        embedded: Sequence[EmbeddedSpans],
        contents: Sequence[tuple[int, int, int]],
        positions: Int64Array | None = None,
    ) -> None:
        """Take a prompt of these sequences."""
        sources: dict[int, EmbeddingSource] = {}
        spans: list[_Span] = []
        numbers = iter(contents)
        for one in embedded:
            row = 0
            for start, end in one.spans:
                number = next(numbers)[2]
                sources[number] = one.source
                spans.append(_Span(start, end, number, row))
                row += end - start
        prompt = _Prompt(
            np.asarray(token_ids, np.int64), tuple(sorted(spans, key=lambda span: span.start)), sources, positions
        )
        self._prompts.update(dict.fromkeys(seq_ids, prompt))

    def remove(self, seq_id: int) -> None:
        """Forget a sequence; what the workers hold stays for others."""
        self._prompts.pop(seq_id, None)

    def forget_held(self, refused: StepEmbeddings | None = None) -> None:
        """Note that nobody knows what the workers hold: they drop all, and get what they need again.

        Args:
            refused: of a step that they may not have begun.
        """
        self._dropped += self._held
        if refused is not None:
            self._dropped += refused.dropped_sources
        self._held.clear()
        self._held_bytes = 0

    def of_step(self, batch: StepBatch) -> StepEmbeddings | None:
        """Return what a step has of sources, and give their tokens, which the scheduler counts by number, their own ids again.

        None where it has nothing of any, as most steps.
        """
        if not self._prompts and not self._dropped:
            return None
        step = StepEmbeddings()
        for row, seq_id in enumerate(batch.seq_ids.tolist()):
            prompt = self._prompts.get(seq_id)
            if prompt is not None:
                first, end = int(batch.query_start[row]), int(batch.context_lens[row])
                self._add_tokens(
                    step, batch.token_ids, prompt, first, end - (int(batch.query_start[row + 1]) - first), end
                )
                if prompt.positions is not None:
                    _add_positions(step, batch, prompt.positions, first, int(batch.query_start[row + 1]))
        used = {one.source for one in step.embedded}
        for number in [number for number in self._held if number not in used]:
            if self._held_bytes <= self._max_bytes:
                break
            self._held_bytes -= self._held.pop(number)
            self._dropped.append(number)
        step.dropped_sources, self._dropped = tuple(self._dropped), []
        return step if step.embedded or step.dropped_sources or step.positions is not None else None

    def _add_tokens(
        self, step: StepEmbeddings, token_ids: Int64Array, prompt: _Prompt, first: int, start: int, end: int
    ) -> None:
        """Add the tokens start to end of a prompt, which are those of the step from `first` on."""
        for span in prompt.spans:
            begin, stop = max(span.start, start), min(span.end, end)
            if begin >= stop:
                continue
            at = first + begin - start
            token_ids[at : at + stop - begin] = prompt.token_ids[begin:stop]
            step.embedded.append(EmbeddedTokens(at, stop - begin, span.number, span.row + begin - span.start))
            if span.number in self._held:
                self._held.move_to_end(span.number)
                continue
            source = prompt.sources[span.number]
            step.new_sources[span.number] = source
            self._held[span.number] = source.num_rows * self._row_bytes
            self._held_bytes += self._held[span.number]


def _add_positions(step: StepEmbeddings, batch: StepBatch, positions: Int64Array, first: int, end: int) -> None:
    """Give the tokens first to end of a step, which are of one sequence, the positions that the prompt's have, or that follow from them."""
    length = positions.shape[1]
    numbers = batch.positions[first:end].copy()
    # Tokens after the prompt have the same position on all three axes, like all tokens that stand for no picture.
    batch.positions[first:end] += np.where(numbers < length, 0, int(positions.max()) + 1 - length)
    inside = numbers < length
    if step.positions is None:
        if not inside.any():
            return
        step.positions = np.broadcast_to(batch.positions, (3, batch.num_tokens)).copy()
    step.positions[:, first:end] = batch.positions[first:end]
    step.positions[:, first:end][:, inside] = positions[:, numbers[inside]]


def digest_of(source: EmbeddingSource, name: str | None = None) -> bytes:
    """Return the SHA-256 of what a source's embeddings follow from: its arrays, or the name that a caller gives their content."""
    digest = hashlib.sha256(f"{source.kind} {source.num_rows}".encode())
    if name is not None:
        digest.update(b" named " + name.encode("utf-8", "surrogatepass"))
        return digest.digest()
    for key, array in sorted(source.arrays.items()):
        digest.update(f" {key} {array.dtype.str} {array.shape} ".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.digest()
