"""What is asked of a server, and when."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeAlias

import numpy as np

from hardpoint.interfaces.errors import ConfigError
from hardpoint.validation import INT32_MAX

Ask: TypeAlias = dict[str, Any]
"""The fields of one request that are its own: `prompt` or `messages`, and `max_tokens`."""

_TOKEN_IDS = 1000, 30_000
"""Ordinary tokens in every vocabulary of today's models."""

_WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem hand part place case "
    "week company system program question work government number night point home water room mother area money story fact month lot "
    "right study book eye job word business issue side kind head house service friend father power hour game line end member law car"
)
"""About one token each."""


@dataclass(frozen=True)
class Lengths:
    """How many tokens: drawn evenly from `low` to `high`, or by a lognormal distribution of this median and sigma, cut off at both ends."""

    low: int
    high: int
    median: float | None = None
    sigma: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read "128", "32:256" or "lognormal:MEDIAN:SIGMA:MOST"; raises ValueError."""
        kind, *rest = text.split(":")
        try:
            if kind == "lognormal":
                median, sigma, most = rest
                result = cls(1, int(most), float(median), float(sigma))
            else:
                low, *high = map(int, (kind, *rest))
                result = cls(low, *(high or [low]))
        except (ValueError, TypeError):
            raise ValueError(f"{text!r} is neither a number, nor 32:256, nor lognormal:MEDIAN:SIGMA:MOST") from None
        if not 1 <= result.low <= result.high <= INT32_MAX:
            raise ValueError(f"{text!r} is not a rising range of at least 1, at most {INT32_MAX}")
        if result.median is not None and not (1 <= result.median <= result.high and 0 <= result.sigma <= 10):
            raise ValueError(f"{text!r}: a median from 1 to {result.high} and a sigma from 0 to 10 are needed")
        return result

    def draw(self, generator: np.random.Generator, count: int) -> list[int]:
        """Return `count` lengths."""
        if self.median is None:
            return [int(length) for length in generator.integers(self.low, self.high + 1, count)]
        drawn = generator.lognormal(np.log(self.median), self.sigma, count)
        return [int(length) for length in np.clip(np.rint(drawn), self.low, self.high)]

    def __str__(self) -> str:
        if self.median is not None:
            return f"lognormal:{self.median:g}:{self.sigma:g}:{self.high}"
        return str(self.low) if self.low == self.high else f"{self.low}:{self.high}"


def random_asks(
    generator: np.random.Generator, count: int, inputs: Lengths, outputs: Lengths, *, chat: bool
) -> list[Ask]:
    """Return requests that share no beginning: of random tokens, or for chat of random words of about one token each."""
    asks: list[Ask] = []
    for length, most in zip(inputs.draw(generator, count), outputs.draw(generator, count), strict=True):
        if chat:
            text = " ".join(generator.choice(_WORDS.split(), length))
            asks.append({"messages": [{"role": "user", "content": text}], "max_tokens": most})
        else:
            asks.append({"prompt": generator.integers(*_TOKEN_IDS, length).tolist(), "max_tokens": most})
    return asks


def read_asks(path: Path, generator: np.random.Generator, count: int, outputs: Lengths, *, chat: bool) -> Sequence[Ask]:
    """Return requests of a JSONL file, from its first line on and again from there until there are `count`.

    A line is an object with `prompt` (text or token ids) or, for chat, `messages`. Its `max_tokens`, where given, go before `outputs`.

    Raises:
        ConfigError: the file cannot be read, is empty, or has a line that is no such object.
    """
    try:
        # Nothing else ends a line: JSON's texts may have other ends of line in them.
        lines = path.read_text("utf-8-sig").split("\n")
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"the dataset '{path}' cannot be read", found=str(error)) from error
    read = [
        _ask(line, f"line {number} of '{path}'", chat=chat)
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not read:
        raise ConfigError(f"the dataset '{path}' is empty", hint="Give a file with one JSON object on each line")
    most = outputs.draw(generator, count)
    return [{"max_tokens": most[number]} | read[number % len(read)] for number in range(count)]


def _ask(line: str, where: str, *, chat: bool) -> Ask:
    hint = f"""A line is {'{"messages": [...]} or ' if chat else ""}{{"prompt": "..."}}, with "max_tokens" or without"""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not JSON", found=str(error), hint=hint) from error
    found = found if isinstance(found, dict) else {}
    name, kinds = ("messages", list) if chat else ("prompt", (str, list))
    given = found.get(name)
    if chat and given is None and isinstance(found.get("prompt"), str):
        given = [{"role": "user", "content": found["prompt"]}]
    if not isinstance(given, kinds):
        raise ConfigError(f"{where} has no {name}", found=line[:100], hint=hint)
    asked = {name: given}
    most = found.get("max_tokens")
    if most is None:
        return asked
    if not isinstance(most, int) or isinstance(most, bool) or not 1 <= most <= INT32_MAX:
        raise ConfigError(f"{where}: max_tokens must be a number of at least 1", found=repr(most), hint=hint)
    return asked | {"max_tokens": most}


def arrivals(generator: np.random.Generator, count: int, rate: float | None, burstiness: float) -> list[float]:
    """Return the seconds after the start at which requests are sent: all at once, or at a rate with random gaps.

    Args:
        rate: requests per second, on the average; None for all at once.
        burstiness: shape of the gaps' gamma distribution: 1 is a Poisson process, less is burstier, more is more even.
    """
    if rate is None:
        return [0.0] * count
    gaps = generator.gamma(burstiness, 1 / (rate * burstiness), count)
    return [0.0, *np.cumsum(gaps[:-1]).tolist()][:count]
