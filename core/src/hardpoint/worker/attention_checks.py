"""What every backend's attention asks of the arrays and tensors that it is given; a check is made before anything is written.

Each raises InvalidBatch, with what was expected and what was found. They are called for each layer of a step that runs eagerly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hardpoint.interfaces.dtypes import DType
from hardpoint.interfaces.errors import InvalidBatch

if TYPE_CHECKING:
    from torch import Tensor

    from hardpoint.interfaces.batch import Int32Array, StepBatch


def check_arrays(batch: StepBatch) -> None:
    """Check that a batch's arrays have the lengths that its sequences and tokens ask for, and that its block table has two dimensions."""
    seqs, tokens = batch.num_seqs, batch.num_tokens
    expected = (
        ("query_start", batch.query_start, seqs + 1),
        ("context_lens", batch.context_lens, seqs),
        ("slot_mapping", batch.slot_mapping, tokens),
    )
    for name, array, length in expected:
        if array.shape != (length,):
            raise InvalidBatch(
                f"cannot prepare a batch of {seqs} sequences and {tokens} tokens",
                found=f"{name} has shape {array.shape} instead of ({length},)",
            )
    if batch.block_table.ndim != 2:
        raise InvalidBatch("a block table has two dimensions", found=f"shape {batch.block_table.shape}")


def check_rows(
    name: str, tensor: Tensor, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> None:
    """Check queries, keys, values or outputs: [tokens, heads, dim], heads and dims contiguous, any stride between tokens."""
    inner = tensor.stride()[1:] == (shape[2], 1) or (shape[1] == 1 and tensor.stride(-1) == 1)
    if tensor.shape != shape or tensor.dtype is not dtype or not inner or tensor.device != device:
        raise InvalidBatch(
            f"{name} is [tokens, heads, dim] = {list(shape)} of {dtype}, heads and dims contiguous, on {device}",
            found=f"{list(tensor.shape)} of {tensor.dtype}, strides {tensor.stride()}, on {tensor.device}",
        )


def check_layer_cache(kv_cache: Tensor, block: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> None:
    """Check a layer's cache: [2, blocks, *block], contiguous; `block` is the shape of a block's keys, in the order of the plan's axes."""
    shape = kv_cache.shape
    if (
        len(shape) != 5
        or shape[0] != 2
        or shape[2:] != block
        or not kv_cache.is_contiguous()
        or kv_cache.dtype is not dtype
        or kv_cache.device != device
    ):
        raise InvalidBatch(
            f"a layer's cache is [2, blocks, {', '.join(map(str, block))}] of {DType.of(dtype)}, contiguous, on {device}",
            found=f"{list(shape)} of {kv_cache.dtype}, strides {kv_cache.stride()}, on {kv_cache.device}",
        )


def check_per_head(name: str, tensor: Tensor | None, wanted: bool, num_heads: int, device: torch.device) -> None:
    """Check sinks or slopes: float32[num_heads], contiguous, where the layer was planned with them, and None where it was not."""
    if tensor is None and not wanted:
        return
    if tensor is None or not wanted:
        asked = "needs" if wanted else "was planned without"
        raise InvalidBatch(f"the layer {asked} {name}", found="none given" if tensor is None else "a tensor")
    if (
        tensor.shape != (num_heads,)
        or tensor.dtype is not torch.float32
        or not tensor.is_contiguous()
        or tensor.device != device
    ):
        raise InvalidBatch(
            f"{name} is float32[{num_heads}], contiguous, on {device}",
            found=f"{list(tensor.shape)} of {tensor.dtype}, on {tensor.device}",
        )


def check_block_pairs(source: Tensor, destination: Tensor, pairs: Int32Array, axis: int) -> None:
    """Check a copy of blocks from one whole cache to another, or within one.

    Args:
        pairs: int32[k, 2], (block of the source, block of the destination), k > 0.
        axis: of blocks in a whole cache.
    """
    if pairs.ndim != 2 or pairs.shape[1] != 2:
        raise InvalidBatch("block pairs are int32[k, 2]", found=f"shape {pairs.shape}")
    shapes = [(*cache.shape[:axis], *cache.shape[axis + 1 :]) for cache in (source, destination)]
    if shapes[0] != shapes[1] or source.dtype is not destination.dtype:
        raise InvalidBatch(
            "caches that exchange blocks differ in the number of blocks only",
            found=f"{list(source.shape)} of {source.dtype} and {list(destination.shape)} of {destination.dtype}",
        )
    for column, cache in enumerate((source, destination)):
        low, high = int(pairs[:, column].min()), int(pairs[:, column].max())
        if low < 0 or high >= cache.shape[axis]:
            raise InvalidBatch(
                f"cannot copy block {low if low < 0 else high} {('from', 'to')[column]} a cache",
                found=f"it has {cache.shape[axis]} blocks, numbered 0 to {cache.shape[axis] - 1}",
            )
