"""What a request asks of sampling, under the names and with the defaults that vLLM's users know."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import IntEnum, StrEnum
from operator import attrgetter
from typing import Annotated, Any, NoReturn, Self, TypeAlias

from msgspec import Meta

from hardpoint.interfaces.batch import LogprobsMode, Pooling, SequenceSampling
from hardpoint.interfaces.errors import InvalidRequest, InvalidSamplingParams
from hardpoint.sampling.random import fork_seed
from hardpoint.sampling.structured import StructuredOutputsParams
from hardpoint.validation import (
    INT32_MAX,
    Int64,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Share,
    Validated,
    shown,
)

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: divided by them, logits leave the range in which float32 tells neighbours apart."""

MAX_PROMPT_LOGPROBS = 100
"""Of a prompt all positions are kept until the request ends."""

MAX_TEXTS, MAX_TEXTS_CHARACTERS = 10_000, 1 << 18
"""How many texts `stop` and `bad_words` may each have, and of how many characters in all. Other requests wait while a request's words
are made tokens, 0.2 s for so many, and while its texts are looked for at each token."""

TruncatedTokens: TypeAlias = Annotated[int, Meta(ge=-1, le=INT32_MAX)]
"""How many tokens of a prompt are used, its last ones; -1 for as many as the context holds."""

_TopK = Annotated[int, Meta(ge=0, le=INT32_MAX, description="0 or -1 keeps all tokens")]
_Penalty = Annotated[float, Meta(ge=-2, le=2)]
_Bias = Annotated[float, Meta(ge=-100, le=100)]


class RequestOutputKind(IntEnum):
    """What each output of a running request carries.

    CUMULATIVE: everything since the start. DELTA: what is new since the last output. FINAL_ONLY: one output, at the end.
    """

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class PoolingUse(StrEnum):
    """What a pooling request is for, by the names that vLLM's users know.

    EMBED: one vector. CLASSIFY: the labels of a text, by the model's head. TOKEN_EMBED, TOKEN_CLASSIFY: the same of each token.
    """

    EMBED = "embed"
    CLASSIFY = "classify"
    TOKEN_EMBED = "token_embed"
    TOKEN_CLASSIFY = "token_classify"

    @property
    def of_tokens(self) -> bool:
        """There is a result for each token."""
        return self in (PoolingUse.TOKEN_EMBED, PoolingUse.TOKEN_CLASSIFY)

    @property
    def labels(self) -> bool:
        """The results are those of a head that classifies."""
        return self in (PoolingUse.CLASSIFY, PoolingUse.TOKEN_CLASSIFY)


@dataclass(frozen=True, slots=True)
class PoolingParams(Validated):
    """What is made of a prompt's hidden states.

    Attributes:
        task: what for; None for what the call or, where that leaves it open, the model is for.
        pooling: which hidden state stands for a text: "last", "cls" or "mean"; None for the model's own way.
        use_activation: scale embeddings to length 1; turn logits of labels into probabilities (softmax, or sigmoid of a single label,
            unless the model's files say otherwise). None for the model's own way, which is to do so unless its files leave it out.
        dimensions: use the first so many elements of embeddings, of models that are trained for it (Matryoshka, arXiv:2205.13147).
        step_tag_id: of labels of tokens, return those of the tokens with this id only.
        returned_token_ids: of the labels, return those with these numbers only.
        truncate_prompt_tokens: use so many tokens of the prompt; -1 for as many as the context holds. Texts lose their ends, of two that
            are scored together the longer one first; prompts of token ids lose their beginning.

    Raises:
        InvalidRequest: a value does not fit.
    """

    _error = InvalidRequest
    _called = "a pooling parameter"

    task: PoolingUse | None = None
    pooling: Pooling | None = None
    use_activation: bool | None = None
    dimensions: PositiveInt | None = None
    step_tag_id: NonNegativeInt | None = None
    returned_token_ids: Sequence[NonNegativeInt] | None = None
    truncate_prompt_tokens: TruncatedTokens | None = None

    def __post_init__(self) -> None:
        self._check_types()
        if self.pooling is Pooling.ALL:
            raise InvalidRequest(
                "pooling='all' is a task",
                found="pooling='all'",
                hint="Give task='token_embed' or task='token_classify'",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams(Validated):
    """How a beam search goes: the rules are vLLM's, see `hardpoint.engine.beam_search`.

    Attributes:
        beam_width: beams that go on side by side, and texts that are returned.
        max_tokens: most tokens of each.
        ignore_eos: an end-of-text token is a token like others.
        temperature: as in `SamplingParams`; it has no effect on log probabilities of the model's own distribution, which are compared.
        length_penalty: power of the length by which cumulative log probabilities are divided; above 0 favours longer texts.
        include_stop_str_in_output: leave the end-of-text token in tokens and text.

    Raises:
        InvalidSamplingParams: a value does not fit.
    """

    _error = InvalidSamplingParams
    _called = "a parameter of beam search"

    beam_width: PositiveInt
    max_tokens: PositiveInt
    ignore_eos: bool = False
    temperature: NonNegativeFloat = 0.0
    length_penalty: Annotated[float, Meta(ge=-100, le=100)] = 1.0
    include_stop_str_in_output: bool = False

    def num_candidates(self, eos_ids: Collection[int]) -> int:
        """Return how many tokens of each beam are candidates: enough that `beam_width` of them do not end the text."""
        return self.beam_width + max(self.beam_width, 0 if self.ignore_eos else len(eos_ids))


@dataclass(slots=True, kw_only=True)
class SamplingParams(Validated):
    """How the tokens of one request are sampled and returned; checked when it is made, and when a parameter is set.

    A request keeps the parameters as they were when it was added. Any sequence is kept as a list, and None as an empty one, except of
    `allowed_token_ids`.

    The processors work in this order, which is vLLM's: `logits_processors`; `allowed_token_ids` and `structured_outputs`; `min_tokens`
    masks the stop tokens; `logit_bias`; `repetition_penalty`, `frequency_penalty`, `presence_penalty`; then, for a temperature of
    zero, the highest logit (the lowest id among equals), or `temperature`, `min_p`, `top_k`, `top_p` (each on what the one before
    left, renormalised) and a draw. Log probabilities are of the model's own distribution, before all of them.

    Attributes:
        n: completions returned for the prompt.
        best_of: completions sampled, of which the n with the highest log probability per token are returned; None for n.
        presence_penalty: subtracted from the logit of each token that has been generated (OpenAI's), in [-2, 2].
        frequency_penalty: subtracted once per time that the token has been generated (OpenAI's), in [-2, 2].
        repetition_penalty: divides positive and multiplies negative logits of tokens in prompt and output
            (Keskar et al., CTRL, 2019); 1 for none.
        temperature: divides the logits; 0 (or below 1e-5) is greedy.
        top_p: the smallest set of most probable tokens whose mass reaches top_p (Holtzman et al., 2020).
        top_k: the k most probable tokens, exactly k, the lower ids first among equals; 0 or -1 for all.
        min_p: tokens at least min_p times as probable as the most probable one.
        seed: of the request's own random stream; the same seed gives the same tokens in any batch. None or -1 for the engine's choice.
        stop: texts at which the completion ends; the text is cut before them. At most 10,000, of 262,144 characters together.
        stop_token_ids: tokens at which the completion ends.
        include_stop_str_in_output: cut after the stop text (and show the stop token) instead of before.
        ignore_eos: generate beyond the end-of-text token.
        max_tokens: most tokens generated; None for what the context length leaves.
        min_tokens: stop tokens cannot be sampled, and stop texts do not count, before this many tokens.
        logprobs: most probable tokens per position whose log probabilities are returned, beside the sampled token's; -1 for all tokens.
        prompt_logprobs: most probable tokens per position of the prompt whose log probabilities are returned, beside the prompt's own;
            at most 100, or -1 for all tokens. The prompt is computed from `prompt_logprobs_start` on, whatever of it the prefix cache has.
        prompt_logprobs_start: position of the first token of the prompt whose log probability is returned; those before it have None,
            and may come from the prefix cache. 0 and 1 are the same: the first token follows nothing.
        flat_logprobs: return log probabilities as `FlatLogprobs`, which cost less than a mapping for each position.
        bad_words: words that must not be generated, each also as it is written after a space. Words of several tokens are looked for as
            `logits_processors` are: the request's next step is not planned before its token is known. At most as many as stop texts.
        extra_args: kept with the parameters for whoever reads them; nothing here does.
        truncate_prompt_tokens: use the last so many tokens of the prompt; -1 for as many as the context holds. The special tokens around a
            text stay.
        detokenize: make text; False returns token ids only.
        skip_special_tokens: leave special tokens out of the text.
        spaces_between_special_tokens: accepted for compatibility. Fast tokenizers, the only ones used here, put no space
            of their own between special tokens, so it has no effect.
        logit_bias: added to the logits, by token id, each in [-100, 100].
        allowed_token_ids: the only tokens that may be sampled.
        output_kind: what each output of a streaming engine carries.
        logits_processors: functions `(token_ids, logits) -> logits`, called one after the other for each token with the ids generated so
            far and float32[vocab_size] on the device, which may be changed in place. They are slow: Python runs for every token, and the
            request's next step is not planned before its token is known; other requests are not held up by that. One that raises ends
            its completion with an error; one that waits for another thread's call of the engine waits for ever, since that call waits
            for the step. Only for a model that runs in this process: functions are not sent to others.
        structured_outputs: what the text must match; see `StructuredOutputsParams`. It ends with a stop token where it may end, and at the
            grammar's end nothing else can follow, also before `min_tokens`. The request's next step is not planned before its token
            is known; other requests are not held up by that. A text that `max_tokens` or a stop text cuts matches only so far.

    Raises:
        InvalidSamplingParams: a value is out of range or contradicts another.
    """

    _error = InvalidSamplingParams
    _called = "a sampling parameter"

    n: PositiveInt = 1
    best_of: PositiveInt | None = None
    presence_penalty: _Penalty = 0.0
    frequency_penalty: _Penalty = 0.0
    repetition_penalty: PositiveFloat = 1.0
    temperature: NonNegativeFloat = 1.0
    top_p: Share = 1.0
    top_k: _TopK = 0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    seed: Int64 | None = None
    stop: str | Sequence[str] | None = field(default_factory=list)
    stop_token_ids: Sequence[NonNegativeInt] | None = field(default_factory=list)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: PositiveInt | None = 16
    min_tokens: NonNegativeInt = 0
    logprobs: Annotated[int, Meta(ge=-1, le=INT32_MAX)] | None = None
    prompt_logprobs: Annotated[int, Meta(ge=-1, le=MAX_PROMPT_LOGPROBS)] | None = None
    prompt_logprobs_start: NonNegativeInt = 0
    flat_logprobs: bool = False
    bad_words: Sequence[str] | None = field(default_factory=list)
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    logit_bias: Mapping[NonNegativeInt, _Bias] | None = field(default_factory=dict)
    allowed_token_ids: Sequence[NonNegativeInt] | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    logits_processors: Sequence[Any] | None = field(default_factory=list)
    structured_outputs: StructuredOutputsParams | None = None
    extra_args: Mapping[str, Any] | None = None
    truncate_prompt_tokens: TruncatedTokens | None = None

    def __post_init__(self) -> None:
        if isinstance(self.top_k, int) and self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        if isinstance(self.seed, int) and self.seed == -1:
            object.__setattr__(self, "seed", None)
        self._check_types()
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", [self.stop])
        for name in _LISTS:
            object.__setattr__(self, name, list(getattr(self, name) or ()))
        if self.logit_bias is None:
            object.__setattr__(self, "logit_bias", {})
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", sorted(set(self.allowed_token_ids)))
        self._check_combinations()

    def __setattr__(self, name: str, value: object) -> None:
        """Set a parameter; raises InvalidSamplingParams, and the object stays as it was."""
        if not hasattr(self, _LAST):  # it is being made
            object.__setattr__(self, name, value)
            return
        changed = self.clone(**{name: value})
        for parameter in fields(self):
            object.__setattr__(self, parameter.name, getattr(changed, parameter.name))

    def _check_combinations(self) -> None:
        if self.best_of is not None:
            if self.n > self.best_of:
                _contradiction("n must be at most best_of", f"n={self.n}, best_of={self.best_of}")
            if self.best_of > self.n and self.is_greedy:
                _contradiction(
                    "best_of above n needs a temperature above 0",
                    f"best_of={self.best_of}, n={self.n}, temperature={self.temperature}",
                    "Greedy completions of one prompt are all the same.",
                )
            if self.best_of > self.n and self.output_kind is RequestOutputKind.DELTA:
                _contradiction(
                    "best_of above n cannot be streamed", "output_kind=DELTA", "The best are known only at the end."
                )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            _contradiction(
                "min_tokens must be at most max_tokens", f"min_tokens={self.min_tokens}, max_tokens={self.max_tokens}"
            )
        _check_size("stop", self.stop_texts)
        _check_size("bad_words", self.bad_words or ())
        if "" in self.stop_texts:
            _contradiction("stop texts must not be empty", shown(self.stop))
        if self.stop_texts and not self.detokenize:
            _contradiction(
                "stop texts need detokenize=True",
                f"stop={list(self.stop_texts)}, detokenize=False",
                "Use stop_token_ids, which need no text.",
            )
        if self.prompt_logprobs_start and self.prompt_logprobs is None:
            _contradiction(
                "prompt_logprobs_start needs prompt_logprobs", f"prompt_logprobs_start={self.prompt_logprobs_start}"
            )
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            _contradiction("allowed_token_ids must name at least one token", "an empty list", "None allows all tokens.")
        for index, processor in enumerate(self.logits_processors or ()):
            if not callable(processor):
                _contradiction(f"logits_processors[{index}] must be a function", shown(processor))
        if any(not word.strip() for word in self.bad_words or ()):
            _contradiction("bad_words must not be empty texts", shown(list(self.bad_words or ())))

    @property
    def is_greedy(self) -> bool:
        """The most probable token is taken, nothing is drawn."""
        return self.temperature < GREEDY_BELOW

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """The stop texts, as a tuple whatever was given."""
        return tuple(self.stop or ())

    @property
    def num_sequences(self) -> int:
        """How many completions are sampled: `best_of`, or n."""
        return self.n if self.best_of is None else self.best_of

    @property
    def needs_ranking(self) -> bool:
        """More completions are sampled than returned, so their cumulative log probabilities are needed."""
        return self.num_sequences > self.n

    def clone(self, **changes: Any) -> Self:
        """Return a copy with some parameters changed, checked like a new one."""
        values = dict(zip(_NAMES, _VALUES(self), strict=True))
        if not changes.keys() <= values.keys():
            return type(self)(**(values | changes))
        is_same = all(value is values[name] for name, value in changes.items())
        can_have_changed = self.logit_bias or self.extra_args or self.allowed_token_ids or any(_VALUES_OF_LISTS(self))
        # Each request makes copies: without the constructor, which sets parameters by `__setattr__`.
        copy = object.__new__(type(self))
        for name, value in (values | changes).items():
            object.__setattr__(copy, name, value)
        # Values that were checked and cannot have changed inside need no second look.
        if not is_same or can_have_changed:
            copy.__post_init__()
        else:
            for name in _LISTS:
                object.__setattr__(copy, name, [])
        return copy

    def check_vocab(self, vocab_size: int) -> None:
        """Check all token ids, and the number of log probabilities, against the model's vocabulary.

        Raises:
            InvalidSamplingParams: an id is not in 0..vocab_size - 1, or `logprobs` or `prompt_logprobs` is above vocab_size.
        """
        for name, token_ids in (
            ("stop_token_ids", self.stop_token_ids),
            ("logit_bias", self.logit_bias),
            ("allowed_token_ids", self.allowed_token_ids),
        ):
            outside = sorted(token_id for token_id in token_ids or () if token_id >= vocab_size)
            if outside:
                _contradiction(f"{name} must name tokens in 0..{vocab_size - 1}", shown(outside))
        for name, count in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if count is not None and count > vocab_size:
                _contradiction(f"{name} must be at most the vocabulary's size, {vocab_size}", repr(count))

    def all_stop_token_ids(self, eos_ids: Iterable[int]) -> frozenset[int]:
        """Return the tokens that end a completion: `stop_token_ids`, and the model's end-of-text ids unless ignored."""
        own = frozenset(self.stop_token_ids or ())
        return own if self.ignore_eos else own | frozenset(eos_ids)

    def to_sequence_sampling(
        self,
        seq_id: int,
        prompt_token_ids: Sequence[int],
        index_of_fork: int,
        default_seed: int,
        eos_ids: Iterable[int],
        grammar: str | None = None,
        *,
        bad_words: Sequence[tuple[int, ...]] = (),
        logprobs_mode: LogprobsMode = LogprobsMode.RAW_LOGPROBS,
        vocab_size: int = INT32_MAX,
    ) -> SequenceSampling:
        """Return what the worker needs to sample one of the request's completions.

        Args:
            index_of_fork: index of the completion, in 0..num_sequences - 1; each has a stream of its own, derived from the seed.
            default_seed: the request's seed where these parameters name none; distinct requests need distinct ones.
            eos_ids: the model's end-of-text tokens.
            grammar: that of `structured_outputs`, as text.
            bad_words: token ids of `bad_words`.
            vocab_size: what -1 stands for in `logprobs`.

        Raises:
            InvalidSamplingParams: what is allowed is only bad words, or stop tokens while `min_tokens` forbids them; or no token could end
                structured outputs.
        """
        stop_token_ids = self.all_stop_token_ids(eos_ids)
        if grammar is not None and not stop_token_ids:
            _contradiction(
                "structured_outputs need a token that ends the text",
                f"none, with ignore_eos={self.ignore_eos} and no stop_token_ids",
                "Leave ignore_eos off, or give stop_token_ids.",
            )
        # A single token needs no look at what came before it.
        bias = dict(self.logit_bias or {}) | {word[0]: -math.inf for word in bad_words if len(word) == 1}
        allowed = None if self.allowed_token_ids is None else tuple(self.allowed_token_ids)
        left = [token_id for token_id in allowed or () if bias.get(token_id) != -math.inf]
        if allowed and not left:
            _contradiction(
                "allowed_token_ids must hold a token that bad_words leave",
                f"allowed_token_ids={shown(list(allowed))} are all bad words",
            )
        if allowed and self.min_tokens and stop_token_ids.issuperset(left):
            _contradiction(
                "allowed_token_ids must hold a token that may be sampled before min_tokens",
                f"allowed_token_ids={shown(left)} are all stop tokens, min_tokens={self.min_tokens}",
            )
        logprobs = 0 if self.logprobs is None and self.needs_ranking else self.logprobs
        if self.needs_ranking and logprobs_mode in (LogprobsMode.RAW_LOGITS, LogprobsMode.PROCESSED_LOGITS):
            _contradiction("best_of above n needs log probabilities", f"logprobs_mode='{logprobs_mode}'")
        return SequenceSampling(
            seq_id=seq_id,
            prompt_token_ids=prompt_token_ids,
            seed=fork_seed(default_seed if self.seed is None else self.seed, index_of_fork),
            temperature=0.0 if self.is_greedy else self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            min_tokens=self.min_tokens if stop_token_ids else 0,
            stop_token_ids=stop_token_ids,
            logit_bias=bias,
            allowed_token_ids=allowed,
            logprobs=vocab_size if logprobs == -1 else logprobs,
            logits_processors=tuple(self.logits_processors or ()),
            grammar=grammar,
            bad_words=tuple(word for word in bad_words if len(word) > 1),
            logprobs_mode=logprobs_mode,
        )


_NAMES = tuple(parameter.name for parameter in fields(SamplingParams))
_VALUES = attrgetter(*_NAMES)
_LAST = _NAMES[-1]
_LISTS = ("stop", "bad_words", "stop_token_ids", "logits_processors")
_VALUES_OF_LISTS = attrgetter(*_LISTS)


def _check_size(name: str, texts: Sequence[str]) -> None:
    """Raise InvalidSamplingParams for more texts, or longer ones, than a request may have."""
    characters = sum(map(len, texts))
    if len(texts) > MAX_TEXTS or characters > MAX_TEXTS_CHARACTERS:
        _contradiction(
            f"{name} must be at most {MAX_TEXTS} texts of {MAX_TEXTS_CHARACTERS} characters together",
            f"{len(texts)} text{'s' if len(texts) != 1 else ''} of {characters} characters",
        )


def _contradiction(problem: str, found: str, hint: str | None = None) -> NoReturn:
    raise InvalidSamplingParams(problem, found=found, hint=hint)
