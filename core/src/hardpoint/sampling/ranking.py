"""Exact ranking of rows of logits in one canonical order: the higher logit first, the lower id first among equals.

Equal logits are common, because models compute in 16 bits; an order that leaves them to chance would let the same request
give different tokens in different batches. Only the few best leave the device; on the host, numpy's vectorised selection is used, which
is several times as fast as torch's.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hardpoint.interfaces.batch import FloatArray, Int64Array

_ARGMAX_CHUNK = 64


def top_values(logits: Tensor, k: int) -> FloatArray:
    """Return the k highest logits of each row in falling order: float32[rows, k], 1 ≤ k ≤ columns. NaN counts as highest."""
    columns = logits.shape[1]
    if logits.device.type != "cpu":
        return logits.topk(k, dim=1).values.numpy(force=True)
    values = logits.numpy()
    if k < columns:
        values = np.partition(values, columns - k, axis=1)[:, columns - k :]
    rising: FloatArray = np.sort(values, axis=1)
    return rising[:, ::-1]


def top_k(logits: Tensor, k: int) -> tuple[FloatArray, Int64Array]:
    """Return the k highest logits of each row in canonical order, and their ids: float32 and int64 [rows, k]."""
    values = top_values(logits, k)
    boundary = torch.from_numpy(values[:, -1:].copy()).to(logits.device)
    places = _true_places(logits >= boundary)
    rows, ids = np.divmod(places, logits.shape[1])
    candidates = logits.flatten()[torch.from_numpy(places).to(logits.device)].numpy(force=True)
    order = np.lexsort((ids, -candidates, rows))
    starts = rows.searchsorted(np.arange(len(values)))
    return values, ids[order[starts[:, None] + np.arange(k)]]


def ids_at(logits: Tensor, values: FloatArray, nth: Int64Array) -> Int64Array:
    """Return for each row the id of the `nth` (from 0, rising ids) of its logits that equal `values`: all [rows]."""
    places = _true_places(logits == torch.from_numpy(values).to(logits.device)[:, None])
    columns = logits.shape[1]
    starts = places.searchsorted(np.arange(len(values)) * columns)
    chosen: Int64Array = places[starts + nth] % columns
    return chosen


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


def _true_places(mask: Tensor) -> npt.NDArray[np.int64]:
    """Return the flat indices of what is true, rising, on the host."""
    if mask.device.type == "cpu":
        return np.flatnonzero(mask.numpy())
    return mask.flatten().nonzero()[:, 0].numpy(force=True)
