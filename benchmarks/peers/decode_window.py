"""What one run of many equal requests says of decoding, the same for every system: tokens by the time at which they came.

Standard library only: it runs in environments that share nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def window_of(
    emissions: Sequence[tuple[float, int]], first_token: float, first_end: float, start: float
) -> dict[str, Any]:
    """Return the times of a run, and the tokens of its window: the time in which every request decodes and none is prefilled.

    Args:
        emissions: (seconds, tokens that came then), in order.
        first_token: when the last request had its first token; the window begins after it.
        first_end: when the first request had its last token; the window ends with it.
        start: when the requests were submitted.

    Returns:
        prefill_s: from submission to the window; whole_s: to the last token; window_s and window_tokens.
    """
    inside = [(at, tokens) for at, tokens in emissions if first_token < at <= first_end]
    return {
        "prefill_s": first_token - start,
        "whole_s": emissions[-1][0] - start,
        "window_s": inside[-1][0] - first_token if inside else 0.0,
        "window_tokens": sum(tokens for _, tokens in inside),
    }
