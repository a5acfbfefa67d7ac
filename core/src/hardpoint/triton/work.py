"""How a step's work is divided, on the host: mirrors what the kernels compute for themselves from a sequence's length.

Nothing here depends on what else is in the batch but the order of the items, so a sequence has the same bits in any.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from hardpoint.interfaces.batch import Int32Array


@dataclass(frozen=True)
class SplitRule:
    """How a decode's context is split.

    Attributes:
        block_n: keys of a tile.
        min_tiles: tiles of a part, at least.
        max_splits: parts, at most.
    """

    block_n: int
    min_tiles: int
    max_splits: int

    def splits(self, contexts: Int32Array, window: int | None = None) -> Int32Array:
        """Return into how many parts each context is split; a part is no shorter than `min_tiles`, but for the last.

        Args:
            contexts: int32[n], keys; 0 has no part.
            window: keys that are visible; None for all.
        """
        tiles = -(-contexts // self.block_n)
        if window is not None:
            tiles = tiles - np.maximum(contexts - window, 0) // self.block_n
        length = np.maximum(-(-tiles // self.max_splits), self.min_tiles)
        return (-(-tiles // length)).astype(np.int32, copy=False)

    def most(self, max_context: int) -> int:
        """Return into how many parts any context up to this length is split at most; a longer one may have fewer parts than a shorter."""
        tiles = -(-max_context // self.block_n)
        return min(self.max_splits, -(-tiles // self.min_tiles))


def decode_items(splits: Int32Array) -> Int32Array:
    """Return int32[items, 2]: each sequence with each of its parts."""
    total = int(splits.sum())
    items = np.empty((total, 2), np.int32)
    items[:, 0] = np.repeat(np.arange(len(splits), dtype=np.int32), splits)
    items[:, 1] = np.arange(total, dtype=np.int32) - np.repeat(np.cumsum(splits) - splits, splits)
    return items


def prefill_items(queries: Int32Array, contexts: Int32Array, group: int, block_m: int, first: int = 0) -> Int32Array:
    """Return int32[items, 2]: each sequence with each of its tiles of `block_m` rows, those with the longest context first.

    Args:
        queries, contexts: int32[n], of the sequences from `first` on; a sequence without queries has no tile.
        group: rows of a query.
    """
    tiles = (-(-queries * group // block_m)).astype(np.int32)
    items = decode_items(tiles)
    keys = (contexts - queries)[items[:, 0]] + items[:, 1] * block_m // group
    items = items[np.argsort(-keys, kind="stable")]
    items[:, 0] += first
    return items


def padded_items(items: Int32Array, room: int, sequence: int) -> Int32Array:
    """Return int32[room, 2]: the items, and behind them the first tile of `sequence`, which has no queries, as often as there is room."""
    padded = np.zeros((room, 2), np.int32)
    padded[: len(items)] = items
    padded[len(items) :, 0] = sequence
    return padded
