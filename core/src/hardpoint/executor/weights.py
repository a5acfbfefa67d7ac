"""Tensors on their way to ranks: one message each, so that no more than one is held twice.

A message is the number of bytes of its description, the description (name, element type, shape), zeros up to a multiple of 64 bytes, and
the tensor's own bytes.
"""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING

import msgspec

from hardpoint.executor.messages import Buffer, decode, encode
from hardpoint.interfaces.dtypes import DType
from hardpoint.interfaces.errors import CorruptWeights, MalformedMessage

if TYPE_CHECKING:
    from torch import Tensor

_LENGTH = struct.Struct("<Q")
_ALIGNMENT = 64


class _Weight(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    name: str
    dtype: DType
    shape: tuple[int, ...]


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
    description = b"".join(encode(_Weight(name, dtype, tuple(tensor.shape))))
    padding = bytes(-(_LENGTH.size + len(description)) % _ALIGNMENT)
    flat = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
    return [_LENGTH.pack(len(description)), description, padding, flat.numpy().data]


def decode_weight(message: Buffer) -> tuple[str, Tensor]:
    """Return the pair of a message, the tensor a view of it; raises MalformedMessage."""
    import torch

    view = memoryview(message)
    try:
        (size,) = _LENGTH.unpack_from(view)
    except struct.error as error:
        raise MalformedMessage("a tensor is not understood", found=str(error)) from error
    end = _LENGTH.size + size
    weight: _Weight = decode(view[_LENGTH.size : end], _Weight)
    data = view[end + -end % _ALIGNMENT :]
    if min(weight.shape, default=0) < 0 or len(data) != math.prod(weight.shape) * weight.dtype.itemsize:
        raise MalformedMessage(f"'{weight.name}' has not the bytes of its shape", found=f"{weight.shape}")
    dtype = weight.dtype.to_torch()
    if not data:
        return weight.name, torch.empty(weight.shape, dtype=dtype)
    return weight.name, torch.frombuffer(data, dtype=dtype).reshape(weight.shape)
