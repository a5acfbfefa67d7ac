"""What a client notes of one answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise


@dataclass(slots=True)
class Answer:
    """What became of one request; times in seconds of `time.perf_counter`.

    Attributes:
        times: when each part with text came.
        prompt_tokens, output_tokens: as the server counts them; where it does not, 0 and the parts with text.
        error: kind of the failure; None where the answer is whole.
        detail: of the failure.
        is_counted: the server said how many tokens there were.
    """

    started: float
    times: list[float] = field(default_factory=list)
    ended: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None
    detail: str = ""
    is_counted: bool = True

    @property
    def ttft(self) -> float | None:
        """Seconds from sending to the first text."""
        return self.times[0] - self.started if self.times else None

    @property
    def itl(self) -> list[float]:
        """Seconds between neighbouring parts of the text."""
        return [later - earlier for earlier, later in pairwise(self.times)]

    @property
    def tpot(self) -> float | None:
        """Seconds per output token after the first; None where there is one, or none."""
        if len(self.times) < 2 or self.output_tokens < 2:
            return None
        return (self.times[-1] - self.times[0]) / (self.output_tokens - 1)

    @property
    def e2e(self) -> float:
        """Seconds from sending to the end."""
        return self.ended - self.started
