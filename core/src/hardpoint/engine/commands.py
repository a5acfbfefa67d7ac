"""What goes into the engine's loop and what comes out of it: commands of its clients, and the events of its steps.

A client names a request by a key that it chooses; the loop answers with the ids of the request's sequences, in `Added`, before
any token of theirs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from hardpoint.engine.sleep import SleepParticipant, SleepRequest
from hardpoint.interfaces.batch import FloatArray, Int32Array, Int64Array, Pooling, SequenceSampling, TokenLogprobs
from hardpoint.interfaces.errors import EngineDead
from hardpoint.scheduler import FinishReason

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Generate:
    """Queue a generation request.

    Attributes:
        key: the client's own number of the request.
        sampling: of each of its sequences, without prompt, id and row, which the loop fills in.
        stop_token_ids, max_tokens, min_tokens, priority, salt: see `Scheduler.add_request`.
    """

    key: int
    prompt_token_ids: Sequence[int]
    sampling: tuple[SequenceSampling, ...]
    stop_token_ids: tuple[int, ...] = ()
    max_tokens: int | None = None
    min_tokens: int = 0
    priority: int = 0
    salt: str = ""


@dataclass(frozen=True, slots=True)
class Embed:
    """Queue an embedding request."""

    key: int
    prompt_token_ids: Sequence[int]
    pooling: Pooling = Pooling.LAST


@dataclass(frozen=True, slots=True)
class Abort:
    """End requests; those that have ended are passed over. Nothing more comes of them."""

    keys: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Finish:
    """End sequences whose text has reached a stop string; those that have ended are passed over. Nothing more comes of them."""

    seq_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Sleep:
    """Put the engine to sleep: a SleepReport. With the mode WAIT it is answered when all requests have ended."""

    request: SleepRequest


@dataclass(frozen=True, slots=True)
class Wake:
    """Take memory again, of these tags or of all: a WakeReport."""

    tags: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class UpdateWeights:
    """Replace weights: how many were used."""

    weights: Iterable[tuple[str, Tensor]]


@dataclass(frozen=True, slots=True)
class ReloadWeights:
    """Load the weights again: how many tensors."""

    model: str | None = None


@dataclass(frozen=True, slots=True)
class DeclareWeightsValid:
    """Say that the weights are right as they stand."""


@dataclass(frozen=True, slots=True)
class GetStats:
    """Ask for the counters: EngineStats."""


@dataclass(frozen=True, slots=True)
class GetStatus:
    """Ask for the state of the life cycle: SleepStatus."""


@dataclass(frozen=True, slots=True)
class ResetPrefixCache:
    """Forget all cached prompt beginnings."""


@dataclass(frozen=True, slots=True)
class RegisterParticipant:
    """Let something take part in sleep and wake; only where the loop is in the client's process."""

    participant: SleepParticipant


Command: TypeAlias = (
    Generate
    | Embed
    | Abort
    | Finish
    | Sleep
    | Wake
    | UpdateWeights
    | ReloadWeights
    | DeclareWeightsValid
    | GetStats
    | GetStatus
    | ResetPrefixCache
    | RegisterParticipant
)


@dataclass(frozen=True, slots=True)
class Added:
    """A request was queued; its sequences are `first_seq_id` and those that follow it."""

    key: int
    first_seq_id: int


@dataclass(frozen=True, slots=True)
class Ended:
    """A sequence ended.

    Attributes:
        token_ids: int32[k], all that it produced.
    """

    seq_id: int
    reason: FinishReason
    token_ids: Int32Array


@dataclass(frozen=True, slots=True)
class StepDone:
    """What one step brought.

    Attributes:
        seq_ids, token_ids: int64[S], one entry per sample, in order; some may be of sequences that had ended. A token of -1 could not be
            sampled, and its sequence ended with an error.
        logprobs: by index in 0..S.
        num_cached: of sequences that were sampled for the first time: prompt tokens found in the prefix cache.
        ended: sequences that ended with this step.
        embeddings: by sequence.
    """

    seq_ids: Int64Array
    token_ids: Int64Array
    logprobs: Mapping[int, TokenLogprobs] = field(default_factory=dict)
    num_cached: Mapping[int, int] = field(default_factory=dict)
    ended: Sequence[Ended] = ()
    embeddings: Mapping[int, FloatArray] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Lost:
    """A step failed, and with it these requests, with all their sequences; the others go on."""

    keys: tuple[int, ...]
    error: Exception


@dataclass(frozen=True, slots=True)
class Died:
    """The loop has ended or cannot go on, and all requests have ended with it."""

    error: EngineDead


Event: TypeAlias = Added | StepDone | Lost | Died

Reply: TypeAlias = Any
"""What a command is answered with, as its docstring says; None where it says nothing."""
