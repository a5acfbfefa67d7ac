"""Exact ranking of rows of logits in one canonical order: the higher logit first, the lower id first among equals.

Equal logits are common, because models compute in 16 bits; an order that leaves them to chance would let the same request
give different tokens in different batches. Nothing here waits for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

_ARGMAX_CHUNK = 64
_LOW_WORD = (1 << 32) - 1


def canonical_keys(logits: Tensor) -> Tensor:
    """Return int64[rows, columns] of float32: distinct numbers that fall in canonical order; those of NaN are above all or below all."""
    # Adding zero makes one of the two zeros.
    bits = (logits + 0.0).view(torch.int32)
    # The bits of a negative number rise with its magnitude.
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    ids = torch.arange(logits.shape[1], device=logits.device)
    return (ordered << 32) + (_LOW_WORD - ids)


def ids_of(keys: Tensor) -> Tensor:
    """Return the ids of `canonical_keys`: int64."""
    return _LOW_WORD - (keys & _LOW_WORD)


def top_k(logits: Tensor, k: int) -> Tensor:
    """Return the ids of the k highest logits of each row in canonical order: int64[rows, k]."""
    return ids_of(canonical_keys(logits).topk(k, dim=1).values)


def logprobs(logits: Tensor, token_ids: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return log probabilities of the distribution of each row.

    Args:
        logits: float32[rows, columns].
        token_ids: int64[rows], the tokens that stand first.
        count: of the best that follow.

    Returns:
        Ids, int64[rows, 1 + count]; log probabilities, float32[rows, 1 + count]; ranks of `token_ids`, from 1, int64[rows].
    """
    first = token_ids.clamp(min=0)[:, None]
    ranks = (logits > logits.gather(1, first)).sum(1) + 1
    ids = torch.cat((first, top_k(logits, count)), dim=1) if count else first
    return ids, torch.log_softmax(logits, dim=1).gather(1, ids), ranks


def argmax(logits: Tensor) -> Tensor:
    """Return the lowest id of the highest logit in each row: int64[rows], of float32[rows, columns].

    Highest value of each chunk, then first chunk with the highest of those, then first place in it; torch's own argmax tracks
    indices through the whole row, which takes several times as long.
    """
    rows, columns = logits.shape
    num_chunks = columns // _ARGMAX_CHUNK
    if num_chunks < 2:
        return logits.argmax(1)
    whole = num_chunks * _ARGMAX_CHUNK
    maxima = logits[:, :whole].view(rows, num_chunks, _ARGMAX_CHUNK).amax(2)
    starts = maxima.argmax(1, keepdim=True) * _ARGMAX_CHUNK
    ids = starts + torch.arange(_ARGMAX_CHUNK, device=logits.device)
    if whole < columns:
        tail = torch.arange(whole, columns, device=logits.device).expand(rows, -1)
        ids = torch.cat((ids, tail), dim=1)
    best: Tensor = ids.gather(1, logits.gather(1, ids).argmax(1, keepdim=True))[:, 0]
    return best
