"""What goes into the engine's loop and what comes out of it: commands of its clients, and the events of its steps.

A client names a request by a key that it chooses; the loop answers with the ids of the request's sequences, in `Added`, before
any token of theirs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from hardpoint.engine.sleep import SleepMode, SleepParticipant, SleepRequest, check_participant
from hardpoint.interfaces.batch import (
    EmbeddingSource,
    FloatArray,
    Int32Array,
    Int64Array,
    Pooling,
    PoolingTask,
    PromptLogprobs,
    SequenceSampling,
    TokenLogprobs,
)
from hardpoint.interfaces.errors import EngineDead
from hardpoint.scheduler import FinishReason

if TYPE_CHECKING:
    from torch import Tensor


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """A value whose kind is its name in another process, too."""


_keys = itertools.count(1)


def _key() -> int:
    return next(_keys)


class BeamSearch(_Message, frozen=True):
    """How the sequences of a request search together; see `BeamSearchParams`.

    Attributes:
        eos_token_ids: the tokens that complete a beam.
    """

    width: int
    length_penalty: float
    eos_token_ids: tuple[int, ...]


class EmbeddedSpans(_Message, frozen=True):
    """A source of embeddings that stand in the place of those of a prompt's tokens.

    Attributes:
        digest: of everything that its embeddings follow from. Sources of one digest are the same to the prefix cache.
        spans: (start, end) of the tokens, in order; together as many as the source has embeddings.
    """

    digest: bytes
    source: EmbeddingSource
    spans: tuple[tuple[int, int], ...]


class Generate(_Message, frozen=True):
    """Queue a generation request.

    Attributes:
        key: the client's own number of the request.
        sampling: of each of its sequences, without prompt, id and row, which the loop fills in.
        stop_token_ids, max_tokens, min_tokens, priority, salt: see `Scheduler.add_request`.
        prompt_logprobs, prompt_logprobs_start: see `SamplingParams`.
        beams: the sequences are those of a beam search.
        embedded: what the prompt has beside tokens.
        positions: int64[3, tokens] by time, row and column, for models that place the tokens of pictures so; those that follow the prompt
            go on from the greatest. None where a token's position is its number.
        adapter: name of the LoRA adapter that the tokens go through; empty for none.
    """

    key: int
    prompt_token_ids: Sequence[int]
    sampling: tuple[SequenceSampling, ...]
    stop_token_ids: tuple[int, ...] = ()
    max_tokens: int | None = None
    min_tokens: int = 0
    priority: int = 0
    salt: str = ""
    prompt_logprobs: int | None = None
    prompt_logprobs_start: int = 0
    beams: BeamSearch | None = None
    embedded: tuple[EmbeddedSpans, ...] = ()
    positions: Int64Array | None = None
    adapter: str = ""


class Embed(_Message, frozen=True):
    """Queue a request whose hidden states are pooled; see `SequencePooling`."""

    key: int
    prompt_token_ids: Sequence[int]
    pooling: Pooling = Pooling.LAST
    task: PoolingTask = PoolingTask.EMBED
    second_text: int = 0


class Abort(_Message, frozen=True):
    """End requests; those that have ended are passed over. Nothing more comes of them."""

    keys: tuple[int, ...]


class Finish(_Message, frozen=True):
    """End sequences whose text has reached a stop string; those that have ended are passed over. Nothing more comes of them."""

    seq_ids: tuple[int, ...]


class Sleep(_Message, frozen=True):
    """Put the engine to sleep: a SleepReport. With the mode WAIT it is answered when all requests have ended.

    Attributes:
        key: the client's own number, by which `GiveUp` names it.
    """

    request: SleepRequest
    key: int = msgspec.field(default_factory=_key)


class Pause(_Message, frozen=True):
    """Compute no more steps; all memory stays: a SleepReport. `Sleep` at level 0 is the same, with other defaults.

    Attributes:
        before: a sleep that is to follow; where it is not possible, this one is refused.
        key: as of `Sleep`.
    """

    mode: SleepMode = SleepMode.KEEP
    drain_timeout: float | None = None
    before: SleepRequest | None = None
    key: int = msgspec.field(default_factory=_key)


class Resume(_Message, frozen=True):
    """Compute steps again after a pause, and give up a sleep that waits for requests; raises EngineAsleep where memory is asleep."""


class GiveUp(_Message, frozen=True):
    """Give up the sleep or pause of this key while it waits for requests; one that waits for another's is left alone."""

    key: int


class Wake(_Message, frozen=True):
    """Take memory again, of these tags or of all: a WakeReport."""

    tags: frozenset[str] | None = None


class UpdateWeights(_Message, frozen=True):
    """Replace weights: how many were used."""

    weights: Iterable[tuple[str, Tensor]]


class ReloadWeights(_Message, frozen=True):
    """Load the weights again: how many tensors."""

    model: str | None = None


class DeclareWeightsValid(_Message, frozen=True):
    """Say that the weights are right as they stand."""


class GetStats(_Message, frozen=True):
    """Ask for the counters: EngineStats."""


class GetStatus(_Message, frozen=True):
    """Ask for the state of the life cycle: SleepStatus."""


class ResetPrefixCache(_Message, frozen=True):
    """Forget all cached prompt beginnings."""


class RegisterParticipant(_Message, frozen=True):
    """Let something take part in sleep and wake; raises ConfigError for what cannot."""

    participant: SleepParticipant

    def __post_init__(self) -> None:
        check_participant(self.participant)


class LoadAdapter(_Message, frozen=True):
    """Load a LoRA adapter from a folder; nothing where it is loaded from there already. Raises InvalidAdapter, AdapterInUse."""

    name: str
    path: str


class UnloadAdapter(_Message, frozen=True):
    """Forget a LoRA adapter; raises AdapterNotFound, AdapterInUse."""

    name: str


class ListAdapters(_Message, frozen=True):
    """Ask for the names of the adapters that are loaded: a list."""


class StartProfile(_Message, frozen=True):
    """Let every rank record what its host and device do."""

    folder: str


class StopProfile(_Message, frozen=True):
    """Let every rank write what it recorded: the paths of the files."""


class CheckStep(_Message, frozen=True):
    """Ask whether a request is in progress; raises EngineAsleep, WeightsMissing or EngineDead in a state without steps."""


class ShutDown(_Message, frozen=True):
    """End the engine: its requests are dropped, its memory is given back. It is the last command."""


Command: TypeAlias = (
    Generate
    | Embed
    | Abort
    | Finish
    | Sleep
    | Pause
    | Resume
    | GiveUp
    | Wake
    | UpdateWeights
    | ReloadWeights
    | DeclareWeightsValid
    | GetStats
    | GetStatus
    | ResetPrefixCache
    | RegisterParticipant
    | LoadAdapter
    | UnloadAdapter
    | ListAdapters
    | StartProfile
    | StopProfile
    | CheckStep
    | ShutDown
)


class Added(_Message, frozen=True):
    """A request was queued; its sequences are `first_seq_id` and those that follow it."""

    key: int
    first_seq_id: int


class Ended(_Message, frozen=True):
    """A sequence ended.

    Attributes:
        token_ids: int32[k], all that it produced.
        error: of a sequence that ended with an error, what was wrong.
    """

    seq_id: int
    reason: FinishReason
    token_ids: Int32Array
    error: str | None = None


class Beam(_Message, frozen=True):
    """One of the texts that a beam search found.

    Attributes:
        token_ids: int32[k], the end-of-text token included.
        logprobs: of each position, the candidates that its token was one of.
        is_complete: an end-of-text token ended it.
    """

    token_ids: Int32Array
    cumulative_logprob: float
    logprobs: Sequence[TokenLogprobs]
    is_complete: bool


class StepDone(_Message, frozen=True):
    """What one step brought.

    Attributes:
        seq_ids, token_ids: int64[S], one entry per sample, in order; some may be of sequences that had ended. A token of -1 could not be
            sampled, and its sequence ended with an error.
        logprobs: by index in 0..S.
        num_cached: of sequences that were sampled for the first time: prompt tokens found in the prefix cache.
        ended: sequences that ended with this step.
        embeddings: by sequence.
        prompt_logprobs: by the first sequence of a request, those of the prompt's tokens that follow what came before, from its second.
        queue_seconds: of sequences that were sampled for the first time: from their arrival in the loop to the first step of their prompt.
        beams: by the first sequence of a beam search that ended, the texts that it found, best first.
    """

    seq_ids: Int64Array
    token_ids: Int64Array
    logprobs: Mapping[int, TokenLogprobs] = {}  # msgspec copies it
    num_cached: Mapping[int, int] = {}
    ended: Sequence[Ended] = ()
    embeddings: Mapping[int, FloatArray] = {}
    prompt_logprobs: Mapping[int, PromptLogprobs] = {}
    queue_seconds: Mapping[int, float] = {}
    beams: Mapping[int, Sequence[Beam]] = {}


class Lost(_Message, frozen=True):
    """A step failed, and with it these requests, with all their sequences; the others go on."""

    keys: tuple[int, ...]
    error: Exception


class Died(_Message, frozen=True):
    """The loop has ended or cannot go on, and all requests have ended with it."""

    error: EngineDead


Event: TypeAlias = Added | StepDone | Lost | Died

Reply: TypeAlias = Any
"""What a command is answered with, as its docstring says; None where it says nothing."""
