"""Speculative decoding: what a user decides about it, and the measured times of steps, by which drafts are as long as they are worth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self, cast

from msgspec import Meta

from hardpoint.interfaces.batch import SequenceSampling
from hardpoint.interfaces.errors import CapabilityRefused, ConfigError
from hardpoint.interfaces.worker import ModelInfo
from hardpoint.validation import PositiveInt, Validated, shown

_DEFAULT_TOKENS = 8
_DEFAULT_MIN, _DEFAULT_MAX = 2, 5
_MEMORY = 0.98
_MOST_TIMES = 4.0
"""A step that took so many times what was expected was disturbed, and counts as so many times."""


@dataclass(frozen=True)
class SpeculativeConfig(Validated):
    """How next tokens are guessed, for one step of the model to verify several; names are vLLM's.

    A guess is taken exactly where the model's own draw at its place, greedy or random, is that token. So the tokens are those of an engine
    without it where a row's logits do not depend on the rows beside it, as on the CPU; where a device's products of matrices round them
    otherwise, the distribution is the same up to that rounding, and a seed may lead to other tokens.

    Attributes:
        method: "ngram", prompt lookup: what followed the last tokens where they stood before, in the prompt or the output.
        num_speculative_tokens: most guesses of a sequence in a step; None for 8.
        prompt_lookup_max, prompt_lookup_min: most and fewest of the last tokens that are looked for. Where one is given, the other is the
            same; where none is, 5 and 2.
        adaptive: make fewer guesses, or none, where they do not pay; False makes as many as may be.
    """

    _called = "a setting of speculative decoding"
    _inside = "speculative_config."

    method: Literal["ngram"] = "ngram"
    num_speculative_tokens: Annotated[int, Meta(ge=1, le=64)] | None = None
    prompt_lookup_max: PositiveInt | None = None
    prompt_lookup_min: PositiveInt | None = None
    adaptive: bool = True

    def __post_init__(self) -> None:
        self._check_types()
        shortest, longest = self.lookup
        if shortest > longest:
            raise ConfigError(
                "speculative_config.prompt_lookup_min is at most prompt_lookup_max",
                found=f"prompt_lookup_min={shortest}, prompt_lookup_max={longest}",
            )

    @classmethod
    def parse(cls, given: Self | Mapping[str, Any] | None) -> Self:
        """Return what a caller passed; raises ConfigError, and CapabilityRefused for a draft model."""
        if isinstance(given, Mapping) and given.get("model") is not None:
            raise CapabilityRefused(
                "guesses are not made by a draft model",
                [f"speculative_config has model={shown(given['model'])}"],
                hint='Give {"method": "ngram"}: what the text has said before is looked up, without a second model',
            )
        return super().parse(given)

    @property
    def num_tokens(self) -> int:
        """Most guesses of a sequence in a step."""
        return self.num_speculative_tokens or _DEFAULT_TOKENS

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
            "prompt_lookup_min": shortest,
            "prompt_lookup_max": longest,
        }


def parse_speculative_config(given: SpeculativeConfig | Mapping[str, Any] | None) -> SpeculativeConfig | None:
    """Return what a caller passed; raises what `SpeculativeConfig.parse` raises."""
    return None if given is None else SpeculativeConfig.parse(given)


def check_speculation(model: ModelInfo) -> None:
    """Raise CapabilityRefused for a model whose guesses could not be taken back, or that generates nothing."""
    reasons = []
    if model.state_bytes:
        reasons.append(f"{model.architecture} keeps recurrent states, which a wrong guess would have changed for good")
    if model.whole_prompts or not model.is_generative:
        reasons.append(f"{model.architecture} generates no text")
    if reasons:
        raise CapabilityRefused("speculative_config does not fit the model", reasons, hint="Leave it out")


def takes_drafts(sampling: SequenceSampling) -> bool:
    """Whether several tokens of a sequence can be sampled at once: no token's distribution depends on the tokens drawn before it."""
    penalties = (sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty)
    return not (
        penalties != (1.0, 0.0, 0.0) or sampling.logits_processors or sampling.bad_words or sampling.grammar is not None
    )


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
            seconds = min(seconds, _MOST_TIMES * (fixed + per_token * tokens))
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
