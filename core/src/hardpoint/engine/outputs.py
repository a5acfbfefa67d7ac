"""What requests return, under the names that vLLM's users know."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias, overload

from hardpoint.interfaces.batch import FloatArray, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's log probability at one position, of the model's own distribution unless `EngineConfig.logprobs_mode` says otherwise.

    Attributes:
        rank: 1 for the most probable token.
        decoded_token: the token's text alone; None without detokenization.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


PositionLogprobs: TypeAlias = dict[int, Logprob]
"""By token id: the sampled token first, then the most probable ones in falling order."""


class FlatLogprobs(Sequence[PositionLogprobs]):
    """Log probabilities of many positions in few arrays; each position is made into its mapping when it is asked for.

    Attributes:
        start_indices, end_indices: of each position, where its tokens are in the arrays that follow; none of a position without any.
        token_ids, logprobs, ranks, decoded_tokens: one entry for each token of each position.
    """

    def __init__(self) -> None:
        self.start_indices: list[int] = []
        self.end_indices: list[int] = []
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.ranks: list[int] = []
        self.decoded_tokens: list[str | None] = []

    def add(self, entry: TokenLogprobs | None, texts: Sequence[str | None] = ()) -> None:
        """Take the next position; None for one without log probabilities. Arguments as for `position_logprobs`."""
        self.start_indices.append(len(self.token_ids))
        if entry is not None:
            token_ids = entry.token_ids.tolist()
            # The token itself is among the best ones once more, or not.
            others = [place for place, token_id in enumerate(token_ids) if place == 0 or token_id != token_ids[0]]
            self.token_ids += [token_ids[place] for place in others]
            self.logprobs += entry.logprobs[others].tolist()
            self.ranks += [entry.rank, *others[1:]]
            self.decoded_tokens += [texts[place] for place in others]
        self.end_indices.append(len(self.token_ids))

    def __len__(self) -> int:
        return len(self.start_indices)

    @overload
    def __getitem__(self, index: int) -> PositionLogprobs: ...

    @overload
    def __getitem__(self, index: slice) -> FlatLogprobs: ...

    def __getitem__(self, index: int | slice) -> PositionLogprobs | FlatLogprobs:
        """Return one position's mapping, empty where it has none, or the log probabilities of several positions."""
        if isinstance(index, slice):
            return self._slice(range(len(self))[index])
        tokens = range(self.start_indices[index], self.end_indices[index])
        return {
            self.token_ids[at]: Logprob(self.logprobs[at], self.ranks[at], self.decoded_tokens[at]) for at in tokens
        }

    def extend(self, other: FlatLogprobs) -> None:
        """Take the positions of another one."""
        for position in range(len(other)):
            self._take(other, position)

    def _slice(self, positions: range) -> FlatLogprobs:
        found = FlatLogprobs()
        for position in positions:
            found._take(self, position)
        return found

    def _take(self, other: FlatLogprobs, position: int) -> None:
        tokens = slice(other.start_indices[position], other.end_indices[position])
        self.start_indices.append(len(self.token_ids))
        self.token_ids += other.token_ids[tokens]
        self.logprobs += other.logprobs[tokens]
        self.ranks += other.ranks[tokens]
        self.decoded_tokens += other.decoded_tokens[tokens]
        self.end_indices.append(len(self.token_ids))


CompletionLogprobs: TypeAlias = Sequence[PositionLogprobs] | FlatLogprobs
"""By position."""


def position_logprobs(entry: TokenLogprobs, texts: Sequence[str | None]) -> PositionLogprobs:
    """Return the log probabilities of one position as results show them.

    Args:
        entry: from the worker; its first token is the sampled one, whose rank it states.
        texts: of each of `entry.token_ids`.
    """
    token_ids, values = entry.token_ids.tolist(), entry.logprobs.tolist()
    result = {token_ids[0]: Logprob(values[0], entry.rank, texts[0])}
    for rank, (token_id, value, text) in enumerate(zip(token_ids[1:], values[1:], texts[1:], strict=True), start=1):
        if token_id != token_ids[0]:
            result[token_id] = Logprob(value, rank, text)
    return result


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """When things happened to a request, in seconds of `time.perf_counter`.

    Attributes:
        arrival_time: the engine took the request.
        first_token_time: its first token was out; None before.
        finished_time: it ended; None before.
        queue_seconds: that it waited for the first step of its prompt; None before the first token.
    """

    arrival_time: float
    first_token_time: float | None = None
    finished_time: float | None = None
    queue_seconds: float | None = None

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first token."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time

    @property
    def decode_time(self) -> float | None:
        """Seconds from the first token to the end."""
        if self.first_token_time is None or self.finished_time is None:
            return None
        return self.finished_time - self.first_token_time


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One completion of a request.

    Attributes:
        index: of the completion in its request.
        text, token_ids, logprobs: everything so far, or with `RequestOutputKind.DELTA` what is new. The token that ended
            the completion is in `token_ids`.
        cumulative_logprob: sum over all tokens so far; None where log probabilities were not asked for.
        logprobs: one entry per token, where asked for.
        finish_reason: "stop" (a stop token or text), "length" (max_tokens, or the context is full), "abort" or "error"; None
            while it runs.
        stop_reason: the stop text or the id of the stop token that ended it; None for the model's end-of-text token.
    """

    index: int
    text: str
    token_ids: Sequence[int]
    cumulative_logprob: float | None = None
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        """Return whether the completion has ended."""
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The state or the result of a generation request.

    Attributes:
        prompt: its text; None where it was given as token ids.
        outputs: completions, in order of index.
        finished: all completions have ended.
        num_cached_tokens: tokens of the prompt that were found in the prefix cache.
        prompt_logprobs: where asked for, one entry for each token of the prompt that was computed so far; None for the first, which
            follows nothing.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: Sequence[int]
    outputs: Sequence[CompletionOutput]
    finished: bool
    metrics: RequestMetrics | None = None
    num_cached_tokens: int = 0
    prompt_logprobs: Sequence[PositionLogprobs | None] | FlatLogprobs | None = None


@dataclass(frozen=True, slots=True)
class BeamSearchSequence:
    """One of the texts that `LLM.beam_search` found.

    Attributes:
        tokens: of the prompt and what follows it, the end-of-text token included.
        logprobs: of each token after the prompt, with the other candidates at its position.
        cum_logprob: sum over the tokens after the prompt.
        text: of all tokens.
        finish_reason: "stop" where an end-of-text token ended it, else "length".
        stop_reason: that token.
    """

    tokens: Sequence[int]
    logprobs: Sequence[PositionLogprobs]
    cum_logprob: float
    text: str
    finish_reason: str
    stop_reason: int | str | None = None


@dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    """The result of a beam search for one prompt: `beam_width` texts, best first."""

    sequences: Sequence[BeamSearchSequence]


@dataclass(frozen=True, slots=True, eq=False)
class EmbeddingOutput:
    """What was made of a prompt: float32[width], with the pooling ALL float32[tokens, width]; see `StepOutput.embeddings`."""

    embedding: FloatArray


@dataclass(frozen=True, slots=True, eq=False)
class EmbeddingRequestOutput:
    """The result of an embedding request; see RequestOutput.

    Attributes:
        finish_reason: "stop", or "abort" for a request that ended before its prompt was computed; its embedding is empty.
    """

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: Sequence[int]
    finished: bool = True
    metrics: RequestMetrics | None = None
    num_cached_tokens: int = 0
    finish_reason: str = "stop"


def best_completions(outputs: Iterable[CompletionOutput], n: int) -> list[CompletionOutput]:
    """Return the n completions with the highest log probability per token, best first, with indices 0 to n - 1.

    Raises:
        ValueError: a completion has no cumulative log probability.
    """
    ranked: list[tuple[float, CompletionOutput]] = []
    for output in outputs:
        if output.cumulative_logprob is None:
            raise ValueError(f"completion {output.index} was sampled without log probabilities and cannot be ranked")
        ranked.append((output.cumulative_logprob / max(len(output.token_ids), 1), output))
    ranked.sort(key=lambda pair: (-pair[0], pair[1].index))
    return [replace(output, index=index) for index, (_, output) in enumerate(ranked[:n])]
