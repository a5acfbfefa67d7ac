"""Counter-based random numbers: a draw is a function of the stream's seed and the number of the draw, of nothing else.

The mixing function is SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hardpoint.interfaces.sampling import DRAW_BITS

UInt64Array = npt.NDArray[np.uint64]

_GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_MASK = (1 << 64) - 1


def mix(values: UInt64Array) -> UInt64Array:
    """Return SplitMix64's finaliser of each value: a bijection in which every input bit moves every output bit."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(_MIX_1)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(_MIX_2)
    return values ^ (values >> np.uint64(31))


def stream_key(seed: int) -> int:
    """Return the 64-bit key of a seed's stream; neighbouring seeds have unrelated keys. Any integer is a seed (modulo 2^64)."""
    # As `mix`, without numpy, which takes much longer for one number.
    value = seed & _MASK
    value = (value ^ value >> 30) * _MIX_1 & _MASK
    value = (value ^ value >> 27) * _MIX_2 & _MASK
    return value ^ value >> 31


def draws(keys: UInt64Array, counters: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
    """Return draw number `counters[i]` (from 0) of the stream `keys[i]`: int64, uniform in 0..2^48 - 1."""
    state = keys + (counters.astype(np.uint64) + np.uint64(1)) * _GOLDEN_GAMMA
    return (mix(state) >> np.uint64(64 - DRAW_BITS)).astype(np.int64)


def fork_seed(seed: int, fork: int) -> int:
    """Return the seed of a request's fork: the request's own for fork 0, an unrelated stream for each other."""
    if fork == 0:
        return seed & _MASK
    return stream_key(stream_key(seed) + fork)
