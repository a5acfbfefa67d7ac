"""Which bytes of a KV cache count."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from hardpoint.interfaces.attention import KVCacheSpec


def live_ranges(blocks: Sequence[int], spec: KVCacheSpec, num_blocks: int) -> list[tuple[int, int]]:
    """Return (first byte, number of bytes) of these blocks in a cache of `num_blocks`, rising, neighbours joined.

    A block has one piece for each layer and each axis value before the block axis (keys and values, in the usual layout).
    """
    if len(blocks) == 0:
        return []
    shape = spec.shape(num_blocks)
    axis = spec.axes.index("block") + 1
    piece = prod(shape[axis + 1 :]) * spec.dtype.itemsize
    ordered = np.unique(np.asarray(blocks, np.int64))
    first = np.concatenate([[True], np.diff(ordered) != 1])
    starts = ordered[first]
    lengths = np.diff(np.append(np.flatnonzero(first), len(ordered)))
    outer = np.arange(prod(shape[:axis]), dtype=np.int64) * num_blocks
    begins = (outer[:, None] + starts).reshape(-1)
    ends = (outer[:, None] + starts + lengths).reshape(-1)
    # The last block of one piece and the first of the next are neighbours.
    joined = np.concatenate([[True], begins[1:] != ends[:-1]])
    begins, ends = begins[joined], ends[np.append(np.flatnonzero(joined)[1:] - 1, len(ends) - 1)]
    return list(zip((begins * piece).tolist(), ((ends - begins) * piece).tolist(), strict=True))
