"""What requests return, under the names that vLLM's users know."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any, Generic, Self, TypeAlias, TypeVar, overload

import numpy as np

from hardpoint.interfaces.batch import FloatArray, PromptLogprobs, TokenLogprobs

TextOf: TypeAlias = Callable[[int], str | None]
"""Gives the text of a token alone; None without detokenization."""


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

    def add_empty(self, positions: int) -> None:
        """Take so many positions without log probabilities."""
        self.start_indices += [len(self.token_ids)] * positions
        self.end_indices += [len(self.token_ids)] * positions

    def append(self, position: PositionLogprobs) -> None:
        """Take the next position."""
        self.start_indices.append(len(self.token_ids))
        self.token_ids += position
        for one in position.values():
            self.logprobs.append(one.logprob)
            self.ranks.append(one.rank)
            self.decoded_tokens.append(one.decoded_token)
        self.end_indices.append(len(self.token_ids))

    def add(self, entries: PromptLogprobs, text_of: TextOf) -> None:
        """Take the next positions, of a prompt."""
        ids = entries.token_ids
        # The prompt's token comes first; where it is among the best ones as well, it is there twice, and stays once.
        kept = ids != ids[:, :1]
        kept[:, 0] = True
        ranks = np.broadcast_to(np.arange(ids.shape[1]), ids.shape).copy()
        ranks[:, 0] = entries.ranks
        ends = len(self.token_ids) + np.cumsum(kept.sum(axis=1))
        token_ids: list[int] = ids[kept].tolist()
        self.start_indices += [len(self.token_ids), *ends[:-1].tolist()] if len(ends) else []
        self.end_indices += ends.tolist()
        self.token_ids += token_ids
        self.logprobs += entries.logprobs[kept].tolist()
        self.ranks += ranks[kept].tolist()
        self.decoded_tokens += [text_of(token_id) for token_id in token_ids]

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


def position_logprobs(entry: TokenLogprobs, text_of: TextOf) -> PositionLogprobs:
    """Return the log probabilities of one position as results show them.

    Args:
        entry: from the worker; its first token is the sampled one, whose rank it states.
    """
    return _mapping(entry.token_ids.tolist(), entry.logprobs.tolist(), entry.rank, text_of)


def _mapping(token_ids: list[int], values: list[float], rank: int, text_of: TextOf) -> PositionLogprobs:
    first = token_ids[0]
    result = {first: Logprob(values[0], rank, text_of(first))}
    for place in range(1, len(token_ids)):
        token_id = token_ids[place]
        if token_id != first:
            result[token_id] = Logprob(values[place], place, text_of(token_id))
    return result


class PromptPositions:
    """Log probabilities of a prompt's tokens as the worker gives them, made into what results show when they are first read.

    Args:
        without: positions that have none, before all others.
        flat: results show them as `FlatLogprobs`.
    """

    def __init__(self, without: int, text_of: TextOf, *, flat: bool) -> None:
        self._text_of = text_of
        self._waiting: list[PromptLogprobs] = []
        self._mappings: list[PositionLogprobs | None] = [None] * without
        self._flat = FlatLogprobs() if flat else None
        if self._flat is not None:
            self._flat.add_empty(without)
        # Guards `_waiting` and what is made of it: several threads may read one result.
        self._lock = threading.Lock()

    def add(self, entries: PromptLogprobs) -> None:
        """Take those of the next tokens."""
        with self._lock:
            self._waiting.append(entries)

    def made(self) -> list[PositionLogprobs | None] | FlatLogprobs:
        """Return those of all tokens so far, the same object each time."""
        with self._lock:
            for entries in self._waiting:
                if self._flat is not None:
                    self._flat.add(entries, self._text_of)
                else:
                    rows = entries.token_ids.tolist(), entries.logprobs.tolist(), entries.ranks.tolist()
                    self._mappings += [_mapping(*row, self._text_of) for row in zip(*rows, strict=True)]
            self._waiting.clear()
        return self._mappings if self._flat is None else self._flat


class _MadeWhenRead:
    """A dataclass's slot that may be given `PromptPositions`, and gives what is made of them."""

    def __init__(self, slot: Any) -> None:
        self._slot = slot

    def __get__(self, instance: object | None, owner: type) -> Any:
        if instance is None:
            return self
        value = self._slot.__get__(instance, owner)
        return value.made() if isinstance(value, PromptPositions) else value

    def __set__(self, instance: object, value: object) -> None:
        self._slot.__set__(instance, value)


C = TypeVar("C")


def _made_quickly(cls: type[C]) -> type[C]:
    """Give a frozen dataclass with slots a constructor that fills the slots themselves.

    Its own does that by `object.__setattr__`, which takes twice as long: 1 µs of each token that is streamed.
    """
    parameters, names = [], dict[str, Any]()
    for field in fields(cls):  # type: ignore[arg-type]  # a dataclass
        names[f"_set_{field.name}"] = vars(cls)[field.name].__set__
        names[f"_default_{field.name}"] = field.default
        parameters.append(field.name + ("" if field.default is MISSING else f"=_default_{field.name}"))
    body = "".join(f"    _set_{field.name}(self, {field.name})\n" for field in fields(cls))  # type: ignore[arg-type]
    exec(f"def __init__(self, {', '.join(parameters)}):\n{body}", names)  # as dataclasses makes it
    setattr(cls, "__init__", names["__init__"])  # noqa: B010  # mypy knows no other way
    return cls


def _made_when_read(name: str) -> Callable[[type[C]], type[C]]:
    def decorate(cls: type[C]) -> type[C]:
        setattr(cls, name, _MadeWhenRead(vars(cls)[name]))
        return cls

    return decorate


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


@_made_quickly
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
        stop_reason: the stop text or the id of the stop token that ended it; None for the model's end-of-text token. With the finish
            reason "error", what was wrong.
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


@_made_when_read("prompt_logprobs")
@_made_quickly
@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The state or the result of a generation request.

    Attributes:
        prompt: its text; None where it was given as token ids.
        outputs: completions, in order of index.
        finished: all completions have ended.
        num_cached_tokens: tokens of the prompt that were found in the prefix cache.
        prompt_logprobs: where asked for, one entry for each token of the prompt that was computed so far; None for the first, which
            follows nothing, and for those before `SamplingParams.prompt_logprobs_start`.
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
        finish_reason: "stop" where an end-of-text token ended it, else "length"; "error" where no token could be sampled.
        stop_reason: that token, or what was wrong.
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
class PoolingOutput:
    """What was made of a prompt: float32[width], or with a task of tokens float32[tokens, width]; nothing of one that was aborted."""

    data: FloatArray


@dataclass(frozen=True, slots=True, eq=False)
class EmbeddingOutput:
    """The embedding of a prompt, float32[width]."""

    embedding: FloatArray

    @property
    def hidden_size(self) -> int:
        """Elements of the embedding."""
        return len(self.embedding)


@dataclass(frozen=True, slots=True)
class ClassificationOutput:
    """The labels of a prompt: a probability for each, or its logit with `use_activation=False`."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        """How many labels there are."""
        return len(self.probs)


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    """How well two texts fit: the probability or logit of the model's only label, or the cosine of two embeddings."""

    score: float


T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True, eq=False)
class PoolingRequestOutput(Generic[T]):
    """The result of a pooling request; see RequestOutput.

    Attributes:
        finish_reason: "stop", or "abort" for a request that ended before its prompt was computed, of which nothing was made.
    """

    request_id: str
    outputs: T
    prompt_token_ids: Sequence[int]
    finished: bool = True
    metrics: RequestMetrics | None = None
    num_cached_tokens: int = 0
    finish_reason: str = "stop"

    def _as(self, kind: type[R], outputs: Any) -> R:
        shared = {one.name: getattr(self, one.name) for one in fields(self)}
        return kind(**shared | {"outputs": outputs})


class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput]):
    """The result of `embed`."""

    __slots__ = ()

    @classmethod
    def from_base(cls, output: PoolingRequestOutput[PoolingOutput]) -> Self:
        """Return a pooling request's result as an embedding."""
        return output._as(cls, EmbeddingOutput(output.outputs.data))


class ClassificationRequestOutput(PoolingRequestOutput[ClassificationOutput]):
    """The result of `classify`."""

    __slots__ = ()

    @classmethod
    def from_base(cls, output: PoolingRequestOutput[PoolingOutput]) -> Self:
        """Return a pooling request's result as labels."""
        return output._as(cls, ClassificationOutput(output.outputs.data.tolist()))


class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput]):
    """The result of `score`."""

    __slots__ = ()

    @classmethod
    def from_base(cls, output: PoolingRequestOutput[PoolingOutput]) -> Self:
        """Return the result of a pooling request with one value as a score; not a number where the request was aborted."""
        data = output.outputs.data
        return output._as(cls, ScoringOutput(float(data.item()) if data.size else math.nan))


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
