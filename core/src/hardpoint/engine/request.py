"""What the engine keeps of a request in progress, and the outputs made of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from hardpoint.engine.detokenizer import Detokenizer, decode
from hardpoint.engine.inputs import TokenizedPrompt
from hardpoint.engine.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from hardpoint.interfaces.batch import TokenLogprobs
from hardpoint.sampling import RequestOutputKind, SamplingParams
from hardpoint.scheduler import FinishReason

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(slots=True)
class SequenceState:
    """One completion of a request while it grows.

    `token_ids`, text and log probabilities are filled token by token only where the request is followed (streaming, stop strings,
    log probabilities); otherwise once, at the end.
    """

    seq_id: int
    index: int
    detokenizer: Detokenizer
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    reported_tokens: int = 0
    reported_chars: int = 0

    @property
    def finished(self) -> bool:
        """No more tokens will come."""
        return self.finish_reason is not None


class RequestState:
    """A request in progress: its prompt, its parameters, its completions."""

    def __init__(
        self,
        request_id: str,
        prompt: TokenizedPrompt,
        params: SamplingParams,
        seq_ids: Sequence[int],
        tokenizer: PreTrainedTokenizerBase | None,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.params = params
        self.metrics = RequestMetrics(arrival_time=time.time())
        self.num_cached_tokens = 0
        self._tokenizer = tokenizer
        self.sequences = [
            SequenceState(seq_id, index, Detokenizer(tokenizer, prompt.token_ids, params))
            for index, seq_id in enumerate(seq_ids)
        ]

    @property
    def is_followed(self) -> bool:
        """Each token must be looked at when it comes, not only at the end."""
        params = self.params
        wants_text = params.detokenize and bool(params.stop_texts)
        wants_logprobs = params.logprobs is not None or params.needs_ranking
        return params.output_kind is not RequestOutputKind.FINAL_ONLY or wants_text or wants_logprobs

    @property
    def finished(self) -> bool:
        """All completions have ended."""
        return all(sequence.finished for sequence in self.sequences)

    def first_token(self, num_cached_tokens: int) -> None:
        """Note that the first token is out, and how many prompt tokens the prefix cache had."""
        self.metrics = replace(self.metrics, first_token_time=time.time())
        self.num_cached_tokens = num_cached_tokens

    def append(
        self, sequence: SequenceState, token_id: int, logprobs: TokenLogprobs | None, is_stop_token: bool
    ) -> bool:
        """Take a followed sequence's next token; returns True when it completes a stop string."""
        sequence.token_ids.append(token_id)
        if logprobs is not None:
            self._append_logprobs(sequence, logprobs)
        stop = sequence.detokenizer.append(token_id, is_stop_token=is_stop_token)
        if stop is not None:
            sequence.stop_reason = stop
        return stop is not None

    def finish(
        self, sequence: SequenceState, reason: FinishReason, token_ids: list[int], eos_ids: frozenset[int]
    ) -> None:
        """End a sequence; `token_ids` are all its tokens."""
        if not self.is_followed:
            sequence.token_ids.extend(token_ids)
            is_stopped = reason is FinishReason.STOP
            sequence.detokenizer.extend(token_ids[:-1] if is_stopped else token_ids)
            if is_stopped:
                sequence.detokenizer.append(token_ids[-1], is_stop_token=True)
        stop = sequence.detokenizer.finish()
        if stop is not None:
            sequence.stop_reason, reason = stop, FinishReason.STOP
        sequence.finish_reason = reason
        if reason is FinishReason.STOP and sequence.stop_reason is None and sequence.token_ids:
            last = sequence.token_ids[-1]
            explicit = last in (self.params.stop_token_ids or ())
            sequence.stop_reason = last if explicit and last not in eos_ids else None
        self.metrics = replace(self.metrics, finished_time=time.time())

    def output(self) -> RequestOutput:
        """Return the request as it stands; of a delta request, what is new since the last output."""
        delta = self.params.output_kind is RequestOutputKind.DELTA
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt.text,
            prompt_token_ids=self.prompt.token_ids,
            outputs=[self._completion(sequence, rank, delta) for rank, sequence in enumerate(self._best())],
            finished=self.finished,
            metrics=self.metrics,
            num_cached_tokens=self.num_cached_tokens,
        )

    def _best(self) -> list[SequenceState]:
        """Return the completions to show: all, or the n with the highest mean log probability per token of best_of."""
        if not self.params.needs_ranking or not self.finished:
            return self.sequences[: self.params.n]
        return sorted(self.sequences, key=_mean_logprob, reverse=True)[: self.params.n]

    def _completion(self, sequence: SequenceState, index: int, delta: bool) -> CompletionOutput:
        since_token = sequence.reported_tokens if delta else 0
        since_char = sequence.reported_chars if delta else 0
        text = sequence.detokenizer.text(final=sequence.finished)
        logprobs = sequence.logprobs if self.params.logprobs is not None else None
        completion = CompletionOutput(
            index=index,
            text=text[since_char:],
            token_ids=sequence.token_ids[since_token:],
            cumulative_logprob=sequence.cumulative_logprob,
            logprobs=None if logprobs is None else logprobs[since_token:],
            finish_reason=None if sequence.finish_reason is None else sequence.finish_reason.name.lower(),
            stop_reason=sequence.stop_reason,
        )
        sequence.reported_tokens, sequence.reported_chars = len(sequence.token_ids), len(text)
        return completion

    def _append_logprobs(self, sequence: SequenceState, logprobs: TokenLogprobs) -> None:
        sampled = float(logprobs.logprobs[0])
        sequence.cumulative_logprob = (sequence.cumulative_logprob or 0.0) + sampled
        if self.params.logprobs is None:
            return
        if sequence.logprobs is None:
            sequence.logprobs = []
        ranks = (logprobs.rank, *range(1, len(logprobs.token_ids)))
        entries: dict[int, Logprob] = {}
        for token_id, value, rank in zip(logprobs.token_ids.tolist(), logprobs.logprobs.tolist(), ranks, strict=True):
            if token_id not in entries:
                entries[token_id] = Logprob(logprob=value, rank=rank, decoded_token=self._decode(token_id))
        sequence.logprobs.append(entries)

    def _decode(self, token_id: int) -> str | None:
        if self._tokenizer is None or not self.params.detokenize:
            return None
        return decode(self._tokenizer, [token_id])


def _mean_logprob(sequence: SequenceState) -> float:
    return (sequence.cumulative_logprob or 0.0) / max(len(sequence.token_ids), 1)
