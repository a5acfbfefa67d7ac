"""Moving blocks of a KV cache with torch's own operations, on any device, for backends that have no kernel for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from hardpoint.interfaces.errors import InvalidBatch

if TYPE_CHECKING:
    from torch import Tensor

    from hardpoint.interfaces.batch import Int32Array

_PIECE_BYTES = 64 << 20
"""Most bytes of blocks that are gathered at once."""


def copy_blocks(source: Tensor, destination: Tensor, pairs: Int32Array, axis: int) -> None:
    """Copy whole blocks in all layers, pair by pair, within a cache or from one to another, whose devices may differ.

    Args:
        source, destination: whole caches, which differ in the number of blocks and the device only.
        pairs: int32[k, 2], blocks (of the source, of the destination).
        axis: of blocks in a whole cache.

    Raises:
        InvalidBatch: caches that do not match, or a block outside; nothing was copied.
    """
    if not len(pairs):
        return
    _check(source, destination, pairs, axis)
    # What one pair writes and a later one reads must not be gathered before it is written.
    is_chained = source is destination and bool(np.isin(pairs[:, 0], pairs[:, 1]).any())
    block_bytes = source.nbytes // source.shape[axis]
    numbers = torch.from_numpy(np.ascontiguousarray(pairs, dtype=np.int64))
    for piece in torch.split(numbers, 1 if is_chained else max(1, _PIECE_BYTES // block_bytes)):
        gathered = source.index_select(axis, piece[:, 0].to(source.device))
        destination.index_copy_(axis, piece[:, 1].to(destination.device), gathered.to(destination.device))


def _check(source: Tensor, destination: Tensor, pairs: Int32Array, axis: int) -> None:
    if pairs.ndim != 2 or pairs.shape[1] != 2:
        raise InvalidBatch("block pairs are int32[k, 2]", found=f"shape {pairs.shape}")
    shapes = [(*cache.shape[:axis], *cache.shape[axis + 1 :]) for cache in (source, destination)]
    if shapes[0] != shapes[1] or source.dtype is not destination.dtype:
        raise InvalidBatch(
            "caches that exchange blocks differ in the number of blocks only",
            found=f"{tuple(source.shape)} {source.dtype} and {tuple(destination.shape)} {destination.dtype}",
        )
    for column, cache in enumerate((source, destination)):
        low, high = int(pairs[:, column].min()), int(pairs[:, column].max())
        if low < 0 or high >= cache.shape[axis]:
            raise InvalidBatch(
                f"blocks of a cache are numbered 0 to {cache.shape[axis] - 1}",
                found=f"{low if low < 0 else high} among those to copy {('from', 'to')[column]}",
            )
