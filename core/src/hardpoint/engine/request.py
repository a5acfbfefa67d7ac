"""What a client keeps of its requests in progress: prompts, text as it grows, stop strings, and the outputs made of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeAlias, cast

import numpy as np

from hardpoint.engine.commands import Added, Beam, Died, Ended, Event, Lost, StepDone
from hardpoint.engine.detokenizer import Detokenizer, TextStream
from hardpoint.engine.inputs import TokenizedPrompt
from hardpoint.engine.outputs import (
    CompletionOutput,
    FlatLogprobs,
    PoolingOutput,
    PoolingRequestOutput,
    PositionLogprobs,
    PromptPositions,
    RequestMetrics,
    RequestOutput,
    best_completions,
    position_logprobs,
)
from hardpoint.interfaces.batch import FloatArray, PromptLogprobs, TokenLogprobs
from hardpoint.interfaces.errors import InvalidRequest
from hardpoint.sampling import BeamSearchParams, RequestOutputKind, SamplingParams
from hardpoint.scheduler import FinishReason


@dataclass(slots=True)
class Completion:
    """One completion of a request while it grows.

    Tokens, text and log probabilities are filled token by token only where the request needs each token (streaming, stop texts, log
    probabilities); otherwise once, at the end.
    """

    index: int
    stream: TextStream
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] | FlatLogprobs = field(default_factory=list)
    cumulative_logprob: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    shown_tokens: int = 0
    shown_chars: int = 0

    @property
    def finished(self) -> bool:
        """No more tokens will come."""
        return self.finish_reason is not None


Output: TypeAlias = RequestOutput | PoolingRequestOutput[PoolingOutput]


@dataclass(frozen=True, slots=True)
class Recipient:
    """Who is told what becomes of a request; called wherever the client reads the loop's events.

    Attributes:
        deliver: takes what makes the next output, as the request's `output_kind` says; the last one is finished. Called later, it makes
            one output of all that came until then.
        fail: takes the error with which the request ended, after which nothing more comes.
    """

    deliver: Callable[[Callable[[], Output]], object]
    fail: Callable[[Exception], object]


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """What is counted of a generation request that has ended; `reasons` are those of its completions."""

    reasons: Sequence[str]
    prompt_tokens: int
    generated_tokens: int
    metrics: RequestMetrics


@dataclass(slots=True)
class PoolingRequest:
    """A request whose hidden states are pooled, in progress.

    Attributes:
        finish: makes the result of what the worker pooled.
    """

    request_id: str
    key: int
    prompt: TokenizedPrompt
    finish: Callable[[FloatArray], FloatArray]
    recipient: Recipient

    def output(self, ended: Ended | None, event: StepDone | None) -> PoolingRequestOutput[PoolingOutput]:
        """Return its output; without one in the event, of a request that was ended before."""
        pooled = None if ended is None or event is None else event.embeddings.get(ended.seq_id)
        return PoolingRequestOutput(
            request_id=self.request_id,
            outputs=PoolingOutput(np.empty(0, np.float32) if pooled is None else self.finish(pooled)),
            prompt_token_ids=self.prompt.token_ids,
            finish_reason="abort" if pooled is None else "stop",
        )


@dataclass(slots=True)
class BeamRequest:
    """A beam search in progress."""

    request_id: str
    key: int
    prompt: TokenizedPrompt
    params: BeamSearchParams
    detokenizer: Detokenizer | None
    recipient: Recipient
    num_cached_tokens: int = 0
    metrics: RequestMetrics = field(default_factory=lambda: RequestMetrics(arrival_time=time.perf_counter()))

    def first_token(self, num_cached_tokens: int, queue_seconds: float | None) -> None:
        """Note that the first step is done; see `Request.first_token`."""
        self.metrics = replace(self.metrics, first_token_time=time.perf_counter(), queue_seconds=queue_seconds)
        self.num_cached_tokens = num_cached_tokens

    def output(self, ended: Ended | None, event: StepDone | None) -> RequestOutput:
        """Return its output; without one in the event, of a search that was ended before, whose completions are empty."""
        beams = None if ended is None or event is None else event.beams.get(ended.seq_id)
        if beams is None:
            reason = (FinishReason.ABORT if ended is None else ended.reason).name.lower()
            error = None if ended is None else ended.error
            outputs = [
                CompletionOutput(index, "", [], 0.0, [], reason, error) for index in range(self.params.beam_width)
            ]
        else:
            outputs = [self._completion(index, beam) for index, beam in enumerate(beams)]
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt.text,
            prompt_token_ids=self.prompt.token_ids,
            outputs=outputs,
            finished=True,
            metrics=replace(self.metrics, finished_time=time.perf_counter()),
            num_cached_tokens=self.num_cached_tokens,
        )

    def ended(self, ended: Ended, event: StepDone) -> EndedRequest:
        """Return what is counted of it; arguments as for `output`."""
        output = self.output(ended, event)
        assert output.metrics is not None
        reasons = [one.finish_reason for one in output.outputs if one.finish_reason is not None]
        generated = sum(len(one.token_ids) for one in output.outputs)
        return EndedRequest(reasons, len(self.prompt.token_ids), generated, output.metrics)

    def _completion(self, index: int, beam: Beam) -> CompletionOutput:
        token_ids: list[int] = beam.token_ids.tolist()
        logprobs = [self._candidates(*one) for one in zip(token_ids, beam.logprobs, strict=True)]
        end = token_ids[-1] if beam.is_complete else None
        if beam.is_complete and not self.params.include_stop_str_in_output:
            del token_ids[-1], logprobs[-1]
        text = "" if self.detokenizer is None else self.detokenizer.decode(token_ids, skip_special_tokens=False)
        return CompletionOutput(
            index=index,
            text=text,
            token_ids=token_ids,
            cumulative_logprob=beam.cumulative_logprob,
            logprobs=logprobs,
            finish_reason="stop" if beam.is_complete else "length",
            stop_reason=end,
        )

    def _candidates(self, token_id: int, entry: TokenLogprobs) -> PositionLogprobs:
        """Return the token with the others that its beam might have gone on with."""
        place = entry.token_ids[1:].tolist().index(token_id)
        chosen = np.array([1 + place]), np.arange(1, len(entry.token_ids))
        order = np.concatenate(chosen)
        found = TokenLogprobs(entry.token_ids[order], entry.logprobs[order], place + 1)
        return position_logprobs(found, _no_text if self.detokenizer is None else self.detokenizer.token_text)


class Request:
    """The text side of a generation request: its prompt, its parameters, its completions.

    Args:
        key: by which the loop knows it.
        eos_ids: the model's end-of-text tokens.
    """

    def __init__(
        self,
        request_id: str,
        key: int,
        prompt: TokenizedPrompt,
        params: SamplingParams,
        detokenizer: Detokenizer | None,
        eos_ids: frozenset[int],
        recipient: Recipient,
    ) -> None:
        # A copy, since the caller may change the original.
        params = params.clone(detokenize=params.detokenize and detokenizer is not None)
        self.request_id = request_id
        self.key = key
        self.prompt = prompt
        self.params = params
        self.recipient = recipient
        self.metrics = RequestMetrics(arrival_time=time.perf_counter())
        self.num_cached_tokens = 0
        self._text_of = detokenizer.token_text if detokenizer is not None and params.detokenize else _no_text
        self._prompt_logprobs: PromptPositions | None = None
        if params.prompt_logprobs is not None:
            # The prompt's first token has no log probability: no token comes before it.
            without = min(max(params.prompt_logprobs_start, 1), len(prompt.token_ids))
            self._prompt_logprobs = PromptPositions(without, self._text_of, flat=bool(params.flat_logprobs))
        self._eos_ids = eos_ids
        self._stop_ids = params.all_stop_token_ids(eos_ids)
        self.is_streamed = params.output_kind is not RequestOutputKind.FINAL_ONLY
        self._is_delta = params.output_kind is RequestOutputKind.DELTA
        self.completions = [
            Completion(
                index,
                TextStream(detokenizer, prompt.token_ids, params),
                logprobs=FlatLogprobs() if params.flat_logprobs else [],
            )
            for index in range(params.num_sequences)
        ]
        self._unfinished = len(self.completions)

    @property
    def needs_each_token(self) -> bool:
        """Each token must be looked at when it comes, not only at the end."""
        params = self.params
        return self.is_streamed or bool(params.stop_texts) or params.logprobs is not None or params.needs_ranking

    @property
    def finished(self) -> bool:
        """All completions have ended."""
        return not self._unfinished

    def first_token(self, num_cached_tokens: int, queue_seconds: float | None) -> None:
        """Note that the first token is out, how many prompt tokens the prefix cache had, and how long the prompt waited for a step."""
        self.metrics = replace(self.metrics, first_token_time=time.perf_counter(), queue_seconds=queue_seconds)
        self.num_cached_tokens = num_cached_tokens

    def extend_prompt(self, entries: PromptLogprobs) -> None:
        """Take the log probabilities of the prompt's next tokens."""
        assert self._prompt_logprobs is not None
        self._prompt_logprobs.add(entries)

    def append(self, completion: Completion, token_id: int, logprobs: TokenLogprobs | None, *, ends: bool) -> bool:
        """Take the next token of a sequence; returns True when its text has reached a stop text.

        Args:
            ends: the scheduler ended the sequence with this token.
        """
        completion.token_ids.append(token_id)
        if logprobs is not None:
            self._append_logprobs(completion, logprobs)
        stop = completion.stream.append(token_id, is_stop_token=ends and token_id in self._stop_ids)
        if stop is not None:
            completion.stop_reason = stop
        return stop is not None

    def finish(
        self, completion: Completion, reason: FinishReason, token_ids: Sequence[int], error: str | None = None
    ) -> None:
        """End a sequence; `token_ids` are all its tokens, `error` is what was wrong where it ended with one."""
        if not self.needs_each_token:
            ended_by_token = reason is FinishReason.STOP
            for position, token_id in enumerate(token_ids, start=1):
                self.append(completion, token_id, None, ends=ended_by_token and position == len(token_ids))
        completion.finish_reason, completion.stop_reason = reason, error or completion.stop_reason
        found = completion.stream.finish()
        if found is not None:
            completion.finish_reason, completion.stop_reason = FinishReason.STOP, found
        elif reason is FinishReason.STOP and completion.stop_reason is None:
            last = completion.token_ids[-1]
            completion.stop_reason = last if last in self._stop_ids and last not in self._eos_ids else None
        self._unfinished -= 1
        if self.finished:
            self.metrics = replace(self.metrics, finished_time=time.perf_counter())

    def ended(self) -> EndedRequest:
        """Return what is counted of it, once it has ended."""
        reasons = [one.finish_reason.name.lower() for one in self.completions if one.finish_reason is not None]
        generated = sum(len(one.token_ids) for one in self.completions)
        return EndedRequest(reasons, len(self.prompt.token_ids), generated, self.metrics)

    def output(self) -> RequestOutput:
        """Return the request as it stands; of a delta request, what is new since the last output."""
        completions = [self._output_of(completion) for completion in self.completions]
        if self.params.needs_ranking:
            # A completion that was ended before its first token has no rank.
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
            prompt_logprobs=cast("FlatLogprobs | None", self._prompt_logprobs),  # made when it is read
        )

    def _output_of(self, completion: Completion) -> CompletionOutput:
        first_token = completion.shown_tokens if self._is_delta else 0
        first_char = completion.shown_chars if self._is_delta else 0
        text = completion.stream.text
        completion.shown_tokens, completion.shown_chars = len(completion.token_ids), len(text)
        return CompletionOutput(
            index=completion.index,
            text=text[first_char:],
            token_ids=completion.token_ids[first_token:],
            cumulative_logprob=completion.cumulative_logprob,
            logprobs=None if self.params.logprobs is None else completion.logprobs[first_token:],
            finish_reason=None if completion.finish_reason is None else completion.finish_reason.name.lower(),
            stop_reason=completion.stop_reason,
        )

    def _append_logprobs(self, completion: Completion, entry: TokenLogprobs) -> None:
        completion.cumulative_logprob = (completion.cumulative_logprob or 0.0) + float(entry.logprobs[0])
        if self.params.logprobs is not None:
            completion.logprobs.append(position_logprobs(entry, self._text_of))


def _no_text(token_id: int) -> None:
    return None


AnyRequest: TypeAlias = Request | PoolingRequest | BeamRequest


class RequestTable:
    """A client's requests in progress, and what the loop's events make of them. Not safe to use from several threads at once.

    Args:
        note: is told of each generation request that has ended by itself.
    """

    def __init__(self, note: Callable[[EndedRequest], None] | None = None) -> None:
        self._note = note
        self._by_id: dict[str, AnyRequest] = {}
        self._by_key: dict[int, AnyRequest] = {}
        self._first_seq_ids: dict[int, int] = {}
        self._wholes: dict[int, PoolingRequest | BeamRequest] = {}
        self._completions: dict[int, tuple[Request, Completion]] = {}
        self._taking_tokens: dict[int, tuple[Request, Completion]] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_id

    @property
    def ids(self) -> list[str]:
        """Ids of the requests in progress."""
        return list(self._by_id)

    def clear(self) -> None:
        """Forget all requests."""
        for request_id in self.ids:
            self.remove(request_id)

    def add(self, request: AnyRequest) -> None:
        """Take a request, before the loop is told of it; raises InvalidRequest where its id is in use."""
        if request.request_id in self._by_id:
            raise InvalidRequest(
                f"the request id '{request.request_id}' is in use", hint="Give each request an id of its own"
            )
        self._by_id[request.request_id] = self._by_key[request.key] = request

    def remove(self, request_id: str) -> int | None:
        """Forget a request, whatever comes of it; returns its key, None where it is not in progress."""
        request = self._by_id.pop(request_id, None)
        if request is None:
            return None
        del self._by_key[request.key]
        first = self._first_seq_ids.pop(request.key, None)
        if first is None:  # the loop has not added it
            return request.key
        if not isinstance(request, Request):
            self._wholes.pop(first, None)
            return request.key
        for seq_id in range(first, first + len(request.completions)):
            self._completions.pop(seq_id, None)
            self._taking_tokens.pop(seq_id, None)
        return request.key

    def discard(self, request: AnyRequest) -> bool:
        """Forget this very request, and not another that has its id now; returns whether it was in progress."""
        is_here = self._by_key.get(request.key) is request
        if is_here:
            self.remove(request.request_id)
        return is_here

    def abort(self, request_id: str) -> int | None:
        """End a request with what its client knows of it; returns its key, None where it is not in progress."""
        request = self._by_id.get(request_id)
        if isinstance(request, (PoolingRequest, BeamRequest)):
            request.recipient.deliver(partial(request.output, None, None))
        elif request is not None:
            for completion in request.completions:
                if not completion.finished:
                    request.finish(completion, FinishReason.ABORT, ())
            request.recipient.deliver(request.output)
        return self.remove(request_id)

    def apply(self, event: Event) -> list[int]:
        """Pass on what an event brings; returns sequences that must be ended, since their text has reached a stop string."""
        match event:
            case StepDone():
                return self._step_done(event)
            case Added():
                self._added(event)
            case Lost():
                for key in event.keys:
                    self._fail(self._by_key.get(key), event.error)
            case Died():
                for request in list(self._by_id.values()):
                    self._fail(request, event.error)
        return []

    def _added(self, event: Added) -> None:
        request = self._by_key.get(event.key)
        if request is not None:
            self._first_seq_ids[request.key] = event.first_seq_id
        if isinstance(request, (PoolingRequest, BeamRequest)):
            self._wholes[event.first_seq_id] = request
        elif request is not None:
            for seq_id, completion in enumerate(request.completions, start=event.first_seq_id):
                self._completions[seq_id] = request, completion
                if request.needs_each_token:
                    self._taking_tokens[seq_id] = request, completion

    def _fail(self, request: AnyRequest | None, error: Exception) -> None:
        if request is not None:
            self.remove(request.request_id)
            request.recipient.fail(error)

    def _step_done(self, event: StepDone) -> list[int]:
        for seq_id, entries in event.prompt_logprobs.items():
            if seq_id in self._completions:
                self._completions[seq_id][0].extend_prompt(entries)
        for seq_id, num_cached in event.num_cached.items():
            if seq_id in self._completions:
                request, _ = self._completions[seq_id]
                # The time in the queue is the prompt's, which the first sequence computes.
                request.first_token(num_cached, event.queue_seconds.get(self._first_seq_ids[request.key]))
            elif isinstance(search := self._wholes.get(seq_id), BeamRequest):
                search.first_token(num_cached, event.queue_seconds.get(seq_id))
        changed: dict[int, Request] = {}
        stopped: list[int] = []
        if self._taking_tokens:
            self._take_tokens(event, changed, stopped)
        for ended in event.ended:
            if ended.seq_id in self._completions:
                request, _ = self._completions[ended.seq_id]
                self._finish(ended.seq_id, ended.reason, ended.token_ids.tolist(), ended.error)
                changed[request.key] = request
            elif ended.seq_id in self._wholes:
                whole = self._wholes.pop(ended.seq_id)
                self.remove(whole.request_id)
                if isinstance(whole, BeamRequest) and self._note is not None:
                    self._note(whole.ended(ended, event))
                whole.recipient.deliver(partial(whole.output, ended, event))
        for request in changed.values():
            if request.finished and self._note is not None:
                self._note(request.ended())
            if request.is_streamed or request.finished:
                request.recipient.deliver(request.output)
        return stopped

    def _take_tokens(self, event: StepDone, changed: dict[int, Request], stopped: list[int]) -> None:
        """Give the completions that need each token theirs; end those whose text has reached a stop string."""
        ended = {one.seq_id for one in event.ended} if event.ended else ()
        # A sequence with drafts may have several tokens, and ends with the last one.
        last = {seq_id: sample for sample, seq_id in enumerate(event.seq_ids.tolist())} if ended else {}
        taking, logprobs = self._taking_tokens, event.logprobs
        for sample, (seq_id, token_id) in enumerate(zip(event.seq_ids.tolist(), event.token_ids.tolist(), strict=True)):
            entry = taking.get(seq_id)
            if entry is None or token_id < 0:
                continue
            request, completion = entry
            ends = seq_id in ended and last[seq_id] == sample
            if request.append(completion, token_id, logprobs.get(sample) if logprobs else None, ends=ends):
                if not ends:
                    stopped.append(seq_id)
                self._finish(seq_id, FinishReason.STOP, ())
                changed[request.key] = request
            elif request.is_streamed:
                changed[request.key] = request

    def _finish(self, seq_id: int, reason: FinishReason, token_ids: Sequence[int], error: str | None = None) -> None:
        """End one completion, and its request with the last one."""
        request, completion = self._completions.pop(seq_id)
        self._taking_tokens.pop(seq_id, None)
        request.finish(completion, reason, token_ids, error)
        if request.finished:
            self.remove(request.request_id)
