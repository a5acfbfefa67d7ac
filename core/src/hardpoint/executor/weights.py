"""Tensors on their way to ranks: one message each, so that no more than one is held twice."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from hardpoint.executor.messages import Buffer, decode, encode
from hardpoint.interfaces.dtypes import DType
from hardpoint.interfaces.errors import CorruptWeights, MalformedMessage

if TYPE_CHECKING:
    from torch import Tensor


class _Weight(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    name: str
    dtype: DType
    shape: tuple[int, ...]
    data: Any


def encode_weight(item: object) -> list[Buffer]:
    """Return a (name, tensor) pair as a message, whose large part is the tensor's own memory where it is dense and on the host.

    Raises CorruptWeights for what is no such pair.
    """
    import torch

    if not isinstance(item, (tuple, list)) or len(item) != 2:
        raise CorruptWeights("weights are pairs of a name and a tensor", found=repr(type(item)))
    name, tensor = item
    if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
        found = f"{type(name).__name__} and {type(tensor).__name__}"
        raise CorruptWeights("weights are pairs of a name and a tensor", found=found)
    try:
        dtype = DType.of(tensor.dtype)
    except ValueError:
        raise CorruptWeights(f"'{name}' has an element type that no weight has", found=str(tensor.dtype)) from None
    flat = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
    return encode(_Weight(name, dtype, tuple(tensor.shape), flat.numpy()))


def decode_weight(message: Buffer) -> tuple[str, Tensor]:
    """Return the pair of a message, the tensor a view of it; raises MalformedMessage."""
    import torch

    weight: _Weight = decode(message, _Weight)
    dtype = weight.dtype.to_torch()
    count = 1
    for extent in weight.shape:
        count *= extent
    if min(weight.shape, default=0) < 0 or getattr(weight.data, "nbytes", -1) != count * weight.dtype.itemsize:
        raise MalformedMessage(f"'{weight.name}' has not the bytes of its shape", found=f"{weight.shape}")
    if not count:
        return weight.name, torch.empty(weight.shape, dtype=dtype)
    return weight.name, torch.from_numpy(weight.data).view(dtype).reshape(weight.shape)
