"""What a request asks of sampling, under the names and with the defaults that vLLM's users know."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, NoReturn, Self

from hardpoint.interfaces.batch import Pooling, SequenceSampling
from hardpoint.interfaces.errors import InvalidSamplingParams
from hardpoint.sampling.random import fork_seed

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: divided by them, logits leave the range in which float32 tells neighbours apart."""

MAX_LOGIT_BIAS = 100.0


class RequestOutputKind(Enum):
    """What each output of a running request carries.

    CUMULATIVE: everything since the start. DELTA: what is new since the last output. FINAL_ONLY: one output, at the end.
    """

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass(frozen=True, slots=True)
class PoolingParams:
    """How an embedding is made.

    Attributes:
        pooling: of the hidden states; None for the model's own way.
        normalize: scale the embedding to length 1.
    """

    pooling: Pooling | None = None
    normalize: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are sampled and returned; checked when it is made.

    The processors work in this order, which is vLLM's: `allowed_token_ids`; `min_tokens` masks the stop tokens; `logit_bias`;
    `repetition_penalty`, `frequency_penalty`, `presence_penalty`; then, for a temperature of zero, the highest logit (the
    lowest id among equals), or `temperature`, `min_p`, `top_k`, `top_p` (each on what the one before left, renormalised) and
    a draw. Log probabilities are of the model's own distribution, before all of them.

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
        seed: of the request's own random stream; the same seed gives the same tokens in any batch. None for the engine's choice.
        stop: texts at which the completion ends; the text is cut before them.
        stop_token_ids: tokens at which the completion ends.
        include_stop_str_in_output: cut after the stop text (and show the stop token) instead of before.
        ignore_eos: generate beyond the end-of-text token.
        max_tokens: most tokens generated; None for what the context length leaves.
        min_tokens: stop tokens cannot be sampled, and stop texts do not count, before this many tokens.
        logprobs: most probable tokens per position whose log probabilities are returned, beside the sampled token's.
        prompt_logprobs: not supported; must be None.
        bad_words: not supported; must be empty. `logit_bias` forbids single tokens.
        detokenize: make text; False returns token ids only.
        skip_special_tokens: leave special tokens out of the text.
        spaces_between_special_tokens: accepted for compatibility. Fast tokenizers, the only ones used here, put no space
            of their own between special tokens, so it has no effect.
        logit_bias: added to the logits, by token id, each in [-100, 100].
        allowed_token_ids: the only tokens that may be sampled.
        output_kind: what each output of a streaming engine carries.

    Raises:
        InvalidSamplingParams: a value is out of range or contradicts another.
    """

    n: int = 1
    best_of: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = ()
    stop_token_ids: Sequence[int] | None = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    bad_words: Sequence[str] | None = ()
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    logit_bias: Mapping[int, float] | None = field(default_factory=dict)
    allowed_token_ids: Sequence[int] | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    def __post_init__(self) -> None:
        self._set("stop", (self.stop,) if isinstance(self.stop, str) else _texts("stop", self.stop))
        self._set("bad_words", _texts("bad_words", self.bad_words))
        self._set("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids or ()))
        if self.allowed_token_ids is not None:
            self._set("allowed_token_ids", tuple(sorted(set(_token_ids("allowed_token_ids", self.allowed_token_ids)))))
        self._set("logit_bias", _biases(self.logit_bias or {}))
        if self.top_k == -1:
            self._set("top_k", 0)
        self._check_ranges()
        self._check_combinations()

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_ranges(self) -> None:
        _check_int("n", self.n, 1)
        if self.best_of is not None:
            _check_int("best_of", self.best_of, 1)
        _check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_float("repetition_penalty", self.repetition_penalty, 0.0, math.inf, open_low=True)
        _check_float("temperature", self.temperature, 0.0, math.inf)
        _check_float("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _check_int("top_k", self.top_k, 0, hint="0 or -1 keeps all tokens.")
        _check_float("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _check_int("seed", self.seed, None)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1)
        _check_int("min_tokens", self.min_tokens, 0)
        if self.logprobs is not None:
            _check_int("logprobs", self.logprobs, 0)
        if not isinstance(self.output_kind, RequestOutputKind):
            _refuse("output_kind must be a RequestOutputKind", repr(self.output_kind))

    def _check_combinations(self) -> None:
        if self.best_of is not None:
            if self.n > self.best_of:
                _refuse("n must be at most best_of", f"n={self.n}, best_of={self.best_of}")
            if self.best_of > self.n and self.is_greedy:
                _refuse(
                    "best_of above n needs a temperature above 0",
                    f"best_of={self.best_of}, n={self.n}, temperature={self.temperature}",
                    "Greedy completions of one prompt are all the same.",
                )
            if self.best_of > self.n and self.output_kind is RequestOutputKind.DELTA:
                _refuse(
                    "best_of above n cannot be streamed", "output_kind=DELTA", "The best are known only at the end."
                )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            _refuse(
                "min_tokens must be at most max_tokens", f"min_tokens={self.min_tokens}, max_tokens={self.max_tokens}"
            )
        if "" in self.stop_texts:
            _refuse("stop texts must not be empty", repr(self.stop))
        if self.stop_texts and not self.detokenize:
            _refuse(
                "stop texts need detokenize=True",
                f"stop={list(self.stop_texts)}, detokenize=False",
                "Use stop_token_ids, which need no text.",
            )
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            _refuse("allowed_token_ids must name at least one token", "an empty list", "None allows all tokens.")
        if self.prompt_logprobs is not None:
            _refuse("prompt_logprobs is not supported and must be None", repr(self.prompt_logprobs))
        if self.bad_words:
            _refuse(
                "bad_words is not supported and must be empty",
                repr(list(self.bad_words)),
                "Single tokens are forbidden with logit_bias={token_id: -100}.",
            )

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
        values = {parameter.name: getattr(self, parameter.name) for parameter in fields(self)}
        return type(self)(**(values | changes))

    def check_vocab(self, vocab_size: int) -> None:
        """Check all token ids, and the number of log probabilities, against the model's vocabulary.

        Raises:
            InvalidSamplingParams: an id is not in 0..vocab_size - 1, or `logprobs` is above vocab_size.
        """
        for name, token_ids in (
            ("stop_token_ids", self.stop_token_ids),
            ("logit_bias", self.logit_bias),
            ("allowed_token_ids", self.allowed_token_ids),
        ):
            outside = sorted(token_id for token_id in token_ids or () if token_id >= vocab_size)
            if outside:
                _refuse(f"{name} must name tokens in 0..{vocab_size - 1}", repr(outside))
        if self.logprobs is not None and self.logprobs > vocab_size:
            _refuse(f"logprobs must be at most the vocabulary's size, {vocab_size}", repr(self.logprobs))

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
    ) -> SequenceSampling:
        """Return what the worker needs to sample one of the request's completions.

        Args:
            index_of_fork: index of the completion, in 0..num_sequences - 1; each has a stream of its own, derived from the seed.
            default_seed: the request's seed where these parameters name none; distinct requests need distinct ones.
            eos_ids: the model's end-of-text tokens.

        Raises:
            InvalidSamplingParams: only stop tokens are allowed, while `min_tokens` forbids them.
        """
        stop_token_ids = self.all_stop_token_ids(eos_ids)
        allowed = None if self.allowed_token_ids is None else tuple(self.allowed_token_ids)
        if allowed is not None and self.min_tokens and stop_token_ids.issuperset(allowed):
            _refuse(
                "allowed_token_ids must hold a token that may be sampled before min_tokens",
                f"allowed_token_ids={list(allowed)} are all stop tokens, min_tokens={self.min_tokens}",
            )
        logprobs = 0 if self.logprobs is None and self.needs_ranking else self.logprobs
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
            logit_bias=self.logit_bias or {},
            allowed_token_ids=allowed,
            logprobs=logprobs,
        )


def _refuse(problem: str, found: str, hint: str | None = None) -> NoReturn:
    raise InvalidSamplingParams(problem, found=found, hint=hint)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_int(name: str, value: object, low: int | None, hint: str | None = None) -> None:
    legal = "an integer" if low is None else f"an integer of at least {low}"
    if not _is_int(value) or (low is not None and value < low):  # type: ignore[operator]
        _refuse(f"{name} must be {legal}", repr(value), hint)


def _check_float(name: str, value: object, low: float, high: float, *, open_low: bool = False) -> None:
    end = f"{high:g}]" if math.isfinite(high) else "infinity)"
    legal = f"{name} must be a number in {'(' if open_low else '['}{low:g}, {end}"
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        _refuse(legal, repr(value))
    if value < low or value > high or (open_low and value == low):
        _refuse(legal, repr(value))


def _texts(name: str, values: Sequence[str] | str | None) -> tuple[str, ...]:
    texts = (values,) if isinstance(values, str) else tuple(values or ())
    if not all(isinstance(text, str) for text in texts):
        _refuse(f"{name} must be texts", repr(values))
    return texts


def _token_ids(name: str, values: Sequence[int]) -> tuple[int, ...]:
    token_ids = tuple(values)
    if not all(_is_int(token_id) and token_id >= 0 for token_id in token_ids):
        _refuse(f"{name} must be token ids of at least 0", repr(values))
    return token_ids


def _biases(values: Mapping[int, float]) -> dict[int, float]:
    biases = dict(values)
    _token_ids("logit_bias", tuple(biases))
    for token_id, bias in biases.items():
        _check_float(f"logit_bias[{token_id}]", bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
    return biases
