"""What the engine keeps of a request in progress, and the outputs made of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from hardpoint.engine.detokenizer import Detokenizer, TextStream
from hardpoint.engine.inputs import TokenizedPrompt
from hardpoint.engine.outputs import (
    CompletionOutput,
    PositionLogprobs,
    RequestMetrics,
    RequestOutput,
    best_completions,
    position_logprobs,
)
from hardpoint.interfaces.batch import TokenLogprobs
from hardpoint.sampling import RequestOutputKind, SamplingParams
from hardpoint.scheduler import FinishReason


@dataclass(slots=True)
class SequenceState:
    """One completion of a request while it grows.

    Tokens, text and log probabilities are filled token by token only where the request is followed (streaming, stop texts, log
    probabilities); otherwise once, at the end.
    """

    seq_id: int
    index: int
    stream: TextStream
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    cumulative_logprob: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    shown_tokens: int = 0
    shown_chars: int = 0

    @property
    def finished(self) -> bool:
        """No more tokens will come."""
        return self.finish_reason is not None


class RequestState:
    """A request in progress: its prompt, its parameters, its completions.

    Args:
        seq_ids: of its sequences, in fork order.
        eos_ids: the model's end-of-text tokens.
    """

    def __init__(
        self,
        request_id: str,
        prompt: TokenizedPrompt,
        params: SamplingParams,
        seq_ids: Sequence[int],
        detokenizer: Detokenizer | None,
        eos_ids: frozenset[int],
    ) -> None:
        if detokenizer is None:
            params = params.clone(detokenize=False)
        self.request_id = request_id
        self.prompt = prompt
        self.params = params
        self.metrics = RequestMetrics(arrival_time=time.perf_counter())
        self.num_cached_tokens = 0
        self._detokenizer = detokenizer
        self._eos_ids = eos_ids
        self._stop_ids = params.all_stop_token_ids(eos_ids)
        self.sequences = [
            SequenceState(seq_id, index, TextStream(detokenizer, prompt.token_ids, params))
            for index, seq_id in enumerate(seq_ids)
        ]

    @property
    def is_followed(self) -> bool:
        """Each token must be looked at when it comes, not only at the end."""
        params = self.params
        return (
            params.output_kind is not RequestOutputKind.FINAL_ONLY
            or bool(params.stop_texts)
            or params.logprobs is not None
            or params.needs_ranking
        )

    @property
    def finished(self) -> bool:
        """All completions have ended."""
        return all(sequence.finished for sequence in self.sequences)

    def first_token(self, num_cached_tokens: int) -> None:
        """Note that the first token is out, and how many prompt tokens the prefix cache had."""
        self.metrics = replace(self.metrics, first_token_time=time.perf_counter())
        self.num_cached_tokens = num_cached_tokens

    def append(self, sequence: SequenceState, token_id: int, logprobs: TokenLogprobs | None, *, ends: bool) -> bool:
        """Take a followed sequence's next token; returns True when its text has reached a stop text.

        Args:
            ends: the scheduler ended the sequence with this token.
        """
        sequence.token_ids.append(token_id)
        if logprobs is not None:
            self._append_logprobs(sequence, logprobs)
        stop = sequence.stream.append(token_id, is_stop_token=ends and token_id in self._stop_ids)
        if stop is not None:
            sequence.stop_reason = stop
        return stop is not None

    def finish(self, sequence: SequenceState, reason: FinishReason, token_ids: Sequence[int]) -> None:
        """End a sequence; `token_ids` are all its tokens."""
        if not self.is_followed:
            ended_by_token = reason is FinishReason.STOP
            for position, token_id in enumerate(token_ids, start=1):
                self.append(sequence, token_id, None, ends=ended_by_token and position == len(token_ids))
        sequence.finish_reason = reason
        found = sequence.stream.finish()
        if found is not None:
            sequence.finish_reason, sequence.stop_reason = FinishReason.STOP, found
        elif reason is FinishReason.STOP and sequence.stop_reason is None:
            last = sequence.token_ids[-1]
            sequence.stop_reason = last if last in self._stop_ids and last not in self._eos_ids else None
        if self.finished:
            self.metrics = replace(self.metrics, finished_time=time.perf_counter())

    def output(self) -> RequestOutput:
        """Return the request as it stands; of a delta request, what is new since the last output."""
        completions = [self._completion(sequence) for sequence in self.sequences]
        if self.params.needs_ranking:
            # One that was ended before its first token has no rank.
            ranked = self.finished and all(one.cumulative_logprob is not None for one in completions)
            completions = best_completions(completions, self.params.n) if ranked else completions[: self.params.n]
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt.text,
            prompt_token_ids=self.prompt.token_ids,
            outputs=completions,
            finished=self.finished,
            metrics=self.metrics,
            num_cached_tokens=self.num_cached_tokens,
        )

    def _completion(self, sequence: SequenceState) -> CompletionOutput:
        is_delta = self.params.output_kind is RequestOutputKind.DELTA
        first_token = sequence.shown_tokens if is_delta else 0
        first_char = sequence.shown_chars if is_delta else 0
        text = sequence.stream.text
        sequence.shown_tokens, sequence.shown_chars = len(sequence.token_ids), len(text)
        return CompletionOutput(
            index=sequence.index,
            text=text[first_char:],
            token_ids=sequence.token_ids[first_token:],
            cumulative_logprob=sequence.cumulative_logprob,
            logprobs=None if self.params.logprobs is None else sequence.logprobs[first_token:],
            finish_reason=None if sequence.finish_reason is None else sequence.finish_reason.name.lower(),
            stop_reason=sequence.stop_reason,
        )

    def _append_logprobs(self, sequence: SequenceState, entry: TokenLogprobs) -> None:
        sequence.cumulative_logprob = (sequence.cumulative_logprob or 0.0) + float(entry.logprobs[0])
        if self.params.logprobs is not None:
            sequence.logprobs.append(position_logprobs(entry, [self._text_of(t) for t in entry.token_ids.tolist()]))

    def _text_of(self, token_id: int) -> str | None:
        if self._detokenizer is None or not self.params.detokenize:
            return None
        return self._detokenizer.token_text(token_id)
