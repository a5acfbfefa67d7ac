"""What a sampler on the device reads and writes: the tables of sampled sequences, and the outcome of a sample.

`hardpoint_conformance.sampling_reference` says what sampling means, row by row; a kernel set may offer an implementation
(`KernelSet.sample`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

WEIGHT_BITS = 30
"""A token's weight is an integer: exp((logit - best) / temperature), rounded to float32, times 2^30, rounded down.

Sums of integers do not depend on the order in which they are taken, so a row gives the same token whatever computes it in whatever parts.
"""

TOP_P_BITS = 24
"""top_p is a multiple of 2^-24, rounded down."""

DRAW_BITS = 48
"""A draw is an integer below 2^48; the token is the one at which the running sum of weights, in the order of token ids, exceeds
`total * draw / 2^48`, rounded down."""


class Column(IntEnum):
    """Columns of `SamplingTables.parameters`.

    INVERSE_TEMPERATURE, LOG_MIN_P, REPETITION, FREQUENCY and PRESENCE hold the bits of a float32. INVERSE_TEMPERATURE is 0 for greedy
    sampling, LOG_MIN_P is the logarithm of min_p (minus infinity for none), TOP_P is scaled by `TOP_P_BITS`, TOP_K is the size of the
    vocabulary for none. The last four name rows of the other tables, -1 for none; STOP_MASK counts before MIN_TOKENS tokens are out.
    """

    INVERSE_TEMPERATURE = 0
    TOP_P = 1
    LOG_MIN_P = 2
    TOP_K = 3
    REPETITION = 4
    FREQUENCY = 5
    PRESENCE = 6
    MIN_TOKENS = 7
    ALLOWED_MASK = 8
    STOP_MASK = 9
    BIAS = 10
    HISTORY = 11


class SampleFailure(IntEnum):
    """In place of a token id: why a row has none.

    NO_TOKEN: masks leave no token, or all logits are minus infinity. NOT_FINITE: a logit is NaN or plus infinity, once biases and penalties
    are applied.
    """

    NO_TOKEN = -1
    NOT_FINITE = -2


@dataclass(frozen=True, slots=True)
class SamplingTables:
    """Parameters and state of the sampled sequences, on the device. All are contiguous and may be replaced by larger ones between steps.

    Attributes:
        parameters: int32[rows, 12], see `Column`.
        last_tokens: int64[rows], the token that each row was given last; written by the sampler, 0 where it failed.
        masks: int32[masks, ceil(vocab_size / 32)]; bit i of word w is whether token 32 w + i may be sampled.
        biases: float32[biases, vocab_size], added to the logits.
        history: int32[histories, vocab_size], for penalties: 2 * (how often the token was generated) + (1 if it is in the prompt); the
            sampler counts the tokens that it gives.
    """

    parameters: Tensor
    last_tokens: Tensor
    masks: Tensor
    biases: Tensor
    history: Tensor
