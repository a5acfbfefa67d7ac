"""Beam search in the loop: which beams go on after a step, and which texts are best at the end. Tokens and scores, no text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from hardpoint.engine.commands import Beam, BeamSearch
from hardpoint.interfaces.batch import Int32Array, Int64Array, TokenLogprobs


@dataclass(frozen=True, slots=True)
class _Step:
    """One token of each beam: int32[width] each, and the candidates that it was one of, by parent."""

    parents: Int32Array
    token_ids: Int32Array
    entries: Sequence[TokenLogprobs]


@dataclass(frozen=True, slots=True)
class _Completed:
    """A beam that an end-of-text token ended after `num_steps` steps."""

    score: float
    cumulative: float
    num_steps: int
    parent: int
    token_id: int
    entry: TokenLogprobs


@dataclass(slots=True)
class Search:
    """One search in progress.

    Each step takes the best `num_candidates` tokens of each beam. One that ends the text completes a copy of its beam; the best `width`
    others, over all beams, are the next beams. Scores are cumulative log probabilities, divided by the number of tokens, those of the
    prompt included and an end-of-text token not, to the power of `length_penalty`: vLLM's rules. The search ends early only where no
    beam can come to be among the best any more.

    Args:
        max_tokens: of each beam, as far as context and cache reach.
    """

    asked: BeamSearch
    prompt_len: int
    max_tokens: int
    pending: dict[int, TokenLogprobs] = field(default_factory=dict)
    _scores: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(1))
    _steps: list[_Step] = field(default_factory=list)
    _completed: list[_Completed] = field(default_factory=list)

    def advance(self, entries: Sequence[TokenLogprobs]) -> tuple[list[int], list[int]] | None:
        """Take one entry for each beam; returns parents and tokens of the next beams, or None where the search has ended.

        Args:
            entries: the first token of each is the sampled one, which does not count; the others are the best, in falling order.
        """
        width, end_ids = self.asked.width, self.asked.eos_token_ids
        if not self._steps:
            entries = entries[:1]  # All begin as the same one.
        token_ids: Int64Array = np.stack([entry.token_ids[1:] for entry in entries])
        totals = self._scores[:, None] + np.stack([entry.logprobs[1:] for entry in entries]).astype(np.float64)
        ends = np.isin(token_ids, end_ids)
        for parent, place in zip(*(found.tolist() for found in np.nonzero(ends)), strict=True):
            cumulative = float(totals[parent, place])
            score = cumulative / self._length(len(self._steps)) ** self.asked.length_penalty
            ended = _Completed(
                score, cumulative, len(self._steps), parent, int(token_ids[parent, place]), entries[parent]
            )
            self._completed.append(ended)
        # A stable sort: of beams with equal scores the earlier one is the better one.
        self._completed.sort(key=lambda one: -one.score)
        del self._completed[width:]
        totals[ends] = -np.inf
        best = np.argsort(-totals, axis=None, kind="stable")[:width]
        parents, places = np.unravel_index(best, totals.shape)
        chosen = token_ids[parents, places].astype(np.int32)
        self._scores = totals[parents, places]
        self._steps.append(_Step(parents.astype(np.int32), chosen, entries))
        if len(self._steps) == self.max_tokens or self._is_decided():
            return None
        return parents.tolist(), chosen.tolist()

    def best(self) -> list[Beam]:
        """Return the best beams, best first."""
        done = len(self._steps)
        scale = self._length(done) ** self.asked.length_penalty
        running = [(float(total) / scale, float(total), beam) for beam, total in enumerate(self._scores)]
        ranked: list[tuple[float, Beam]] = [(one.score, self._ended(one)) for one in self._completed]
        ranked += [(score, self._beam(done, beam, total)) for score, total, beam in running]
        ranked.sort(key=lambda pair: -pair[0])
        return [beam for _, beam in ranked[: self.asked.width]]

    def _length(self, num_tokens: int) -> int:
        return self.prompt_len + num_tokens

    def _is_decided(self) -> bool:
        """Whether `width` completed beams are better than whatever becomes of the others: log probabilities add nothing above 0."""
        if len(self._completed) < self.asked.width:
            return False
        penalty = self.asked.length_penalty
        length = self._length(self.max_tokens if penalty > 0 else len(self._steps))
        return self._completed[-1].score >= float(self._scores[0]) / float(length**penalty)

    def _ended(self, one: _Completed) -> Beam:
        before = self._beam(one.num_steps, one.parent, one.cumulative)
        return Beam(
            np.append(before.token_ids, np.int32(one.token_id)), one.cumulative, [*before.logprobs, one.entry], True
        )

    def _beam(self, num_steps: int, beam: int, cumulative: float) -> Beam:
        """Return a beam as it was after so many steps."""
        token_ids, entries = [], []
        for step in reversed(self._steps[:num_steps]):
            token_ids.append(step.token_ids[beam])
            beam = int(step.parents[beam])
            entries.append(step.entries[beam])
        return Beam(np.array(token_ids[::-1], np.int32), cumulative, entries[::-1], False)
