"""What requests return, under the names that vLLM's users know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's log probability at one position, of the model's own distribution.

    Attributes:
        rank: 1 for the most probable token.
        decoded_token: the token's text alone; None without detokenization.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


PositionLogprobs: TypeAlias = dict[int, Logprob]
"""By token id: the sampled token first, then the most probable ones in falling order."""


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """When things happened to a request, in seconds since the epoch.

    Attributes:
        arrival_time: the engine took the request.
        first_token_time: its first token was out; None before.
        finished_time: it ended; None before.
    """

    arrival_time: float
    first_token_time: float | None = None
    finished_time: float | None = None

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
    logprobs: Sequence[PositionLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def finished(self) -> bool:
        """Whether the completion has ended."""
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The state or the result of a generation request.

    Attributes:
        prompt: its text; None where it was given as token ids.
        outputs: completions, in order of index.
        finished: all completions have ended.
        num_cached_tokens: tokens of the prompt that were found in the prefix cache.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: Sequence[int]
    outputs: Sequence[CompletionOutput]
    finished: bool
    metrics: RequestMetrics | None = None
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """An embedding of hidden_size numbers."""

    embedding: Sequence[float]


@dataclass(frozen=True, slots=True)
class EmbeddingRequestOutput:
    """The result of an embedding request; see RequestOutput."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: Sequence[int]
    finished: bool = True
    metrics: RequestMetrics | None = None
    num_cached_tokens: int = 0
