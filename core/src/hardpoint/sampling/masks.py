"""Sets of tokens as bits, as the sampler's masks have them."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from hardpoint.interfaces.batch import Int32Array


def token_mask(vocab_size: int, token_ids: Collection[int]) -> Int32Array:
    """Return int32[ceil(vocab_size / 32)], in which the bits of the given tokens are set."""
    bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    bits[np.fromiter(token_ids, np.int64)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)
