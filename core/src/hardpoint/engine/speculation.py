"""Speculative decoding: what a user decides about it, and the measured times of steps, by which drafts are as long as they are worth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

from msgspec import Meta

from hardpoint.interfaces.batch import EmbeddingKind, SequenceSampling
from hardpoint.interfaces.errors import CapabilityRefused, ConfigError
from hardpoint.interfaces.worker import ModelInfo
from hardpoint.validation import PositiveInt, Validated, shown

if TYPE_CHECKING:
    from hardpoint.models import TokenizerBackend

_DEFAULT_TOKENS = {"ngram": 8, "draft_model": 4}
_DEFAULT_MIN, _DEFAULT_MAX = 2, 5
_MEMORY = 0.98
_MAX_TIMES = 4.0
"""A step that took so many times what was expected was disturbed, and counts as so many times."""


@dataclass(frozen=True)
class SpeculativeConfig(Validated):
    """How next tokens are guessed, for one step of the model to verify several; names are vLLM's.

    A guess is taken exactly where the model's own draw at its place, greedy or random, is that token. So the tokens are those of an engine
    without it where a row's logits do not depend on the rows beside it, as on the CPU; where a device's products of matrices round them
    otherwise, the distribution is the same up to that rounding, and a seed may lead to other tokens.

    Attributes:
        method: "ngram", prompt lookup: what followed the last tokens where they stood before, in the prompt or the output; "draft_model",
            what a smaller model draws, with the random number of the place, after each token. None for the second where there is a model.
        model: of the method "draft_model": a model with the same vocabulary, as the engine's own is named. It is in memory with the same
            tags, so that it sleeps with the engine; after a sleep that discards weights it is loaded again with the first write of weights.
        num_speculative_tokens: most guesses of a sequence in a step; None for 8, of a draft model 4.
        prompt_lookup_max, prompt_lookup_min: most and fewest of the last tokens that are looked for. Where one is given, the other is the
            same; where none is, 5 and 2.
        adaptive: make fewer guesses, or none, where they do not pay; False makes as many as may be.
    """

    _called = "a setting of speculative decoding"
    _inside = "speculative_config."

    method: Literal["ngram", "draft_model"] | None = None
    model: str | None = None
    num_speculative_tokens: Annotated[int, Meta(ge=1, le=64)] | None = None
    prompt_lookup_max: PositiveInt | None = None
    prompt_lookup_min: PositiveInt | None = None
    adaptive: bool = True

    def __post_init__(self) -> None:
        self._check_types()
        if self.uses_model and self.model is None:
            raise ConfigError(
                'speculative_config.method="draft_model" needs a model',
                hint='Give {"method": "draft_model", "model": ...}, or the method "ngram", which needs none',
            )
        if self.model is not None and not self.uses_model:
            raise ConfigError(
                'speculative_config.model is of the method "draft_model"',
                found=f'method="ngram" and model={shown(self.model)}',
                hint="Leave one of them out",
            )
        if self.uses_model and (self.prompt_lookup_min or self.prompt_lookup_max):
            raise ConfigError(
                'prompt_lookup_min and prompt_lookup_max are of the method "ngram"',
                found=f"speculative_config has model={shown(self.model)}",
                hint="Leave them out",
            )
        shortest, longest = self.lookup
        if shortest > longest:
            raise ConfigError(
                "speculative_config.prompt_lookup_min is at most prompt_lookup_max",
                found=f"prompt_lookup_min={shortest}, prompt_lookup_max={longest}",
            )

    @property
    def uses_model(self) -> bool:
        """Guesses are made by a draft model."""
        return self.method == "draft_model" or (self.method is None and self.model is not None)

    @property
    def num_tokens(self) -> int:
        """Most guesses of a sequence in a step."""
        return self.num_speculative_tokens or _DEFAULT_TOKENS["draft_model" if self.uses_model else "ngram"]

    @property
    def lookup(self) -> tuple[int, int]:
        """Fewest and most tokens that are looked for."""
        shortest, longest = self.prompt_lookup_min, self.prompt_lookup_max
        if shortest is None and longest is None:
            return _DEFAULT_MIN, _DEFAULT_MAX
        return shortest or cast(int, longest), longest or cast(int, shortest)

    def scheduler_settings(self, num_draft_slots: int) -> dict[str, Any]:
        """Return what `SchedulerConfig` has of it."""
        shortest, longest = self.lookup
        return {
            "num_lookahead_slots": self.num_tokens,
            "num_speculative_tokens": self.num_tokens,
            "num_draft_slots": num_draft_slots,
            "drafts_by_model": self.uses_model,
            "prompt_lookup_min": shortest,
            "prompt_lookup_max": longest,
        }


def parse_speculative_config(given: SpeculativeConfig | Mapping[str, Any] | None) -> SpeculativeConfig | None:
    """Return what a caller passed; raises what `SpeculativeConfig.parse` raises."""
    return None if given is None else SpeculativeConfig.parse(given)


def check_speculation(config: SpeculativeConfig, model: ModelInfo, *, takes_embeddings: bool) -> None:
    """Raise CapabilityRefused for a model whose guesses could not be taken back, or that generates nothing.

    Args:
        takes_embeddings: prompts may be embeddings.
    """
    reasons = []
    if config.uses_model and (takes_embeddings or EmbeddingKind.IMAGE in model.embedding_kinds):
        reasons.append("prompts may be pictures or embeddings, and a draft model reads tokens alone")
    if model.state_bytes:
        reasons.append(f"{model.architecture} keeps recurrent states, which a wrong guess would have changed for good")
    if model.whole_prompts or not model.is_generative:
        reasons.append(f"{model.architecture} generates no text")
    if reasons:
        raise CapabilityRefused("speculative_config does not fit the model", reasons, hint="Leave it out")


def check_vocabularies(model: TokenizerBackend, draft: TokenizerBackend) -> None:
    """Raise ConfigError where a draft model's tokens do not stand for the texts that the model's do; ModelError, where one has none."""
    if draft == model:
        return
    own, other = model().get_vocab(with_added_tokens=True), draft().get_vocab(with_added_tokens=True)
    if own == other:
        return
    differing = min((token for token in own if other.get(token) != own[token]), key=own.__getitem__, default=None)
    raise ConfigError(
        "a draft model has the vocabulary of the model",
        found=(
            f"{draft.model} has {len(other)} tokens, of which {len(own.keys() & other.keys())} are among the {len(own)} of {model.model}"
            if differing is None
            else f"{shown(differing)} is the token {own[differing]} of {model.model}, and {other.get(differing)} of {draft.model}"
        ),
        hint="Choose a smaller model of the same family",
    )


def takes_drafts(sampling: SequenceSampling) -> bool:
    """Whether several tokens of a sequence can be sampled at once: a token's distribution has of those before it the grammar alone."""
    penalties = (sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty)
    return not (penalties != (1.0, 0.0, 0.0) or sampling.logits_processors or sampling.bad_words)


class StepCosts:
    """What a step takes: a line through the measured times, seconds over tokens, in which older steps count less."""

    def __init__(self, seconds_per_token: float) -> None:
        """Begin with what the start of the engine has measured for a token of a long prompt."""
        self._slope = seconds_per_token
        self._weight = self._tokens = self._seconds = self._squares = self._products = 0.0

    def note(self, tokens: int, seconds: float) -> None:
        """Take the time of a step that computed only decoding sequences."""
        if self._weight:
            fixed, per_token = self.line()
            seconds = min(seconds, _MAX_TIMES * (fixed + per_token * tokens))
        self._weight = _MEMORY * self._weight + 1
        self._tokens = _MEMORY * self._tokens + tokens
        self._seconds = _MEMORY * self._seconds + seconds
        self._squares = _MEMORY * self._squares + tokens * tokens
        self._products = _MEMORY * self._products + tokens * seconds

    def line(self) -> tuple[float, float]:
        """Return the seconds of a step, and of each token beside; (0, 0) before the first step."""
        if not self._weight:
            return 0.0, 0.0
        tokens, seconds = self._tokens / self._weight, self._seconds / self._weight
        spread = self._squares / self._weight - tokens * tokens
        slope = self._slope
        if spread > 0.05:
            slope = (self._products / self._weight - tokens * seconds) / spread
        slope = min(max(slope, self._slope / 4), seconds / tokens)
        return max(seconds - slope * tokens, 0.0), slope
