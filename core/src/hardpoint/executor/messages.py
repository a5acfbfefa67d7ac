"""Values as bytes: MessagePack, in which a numpy array is an extension. Nothing here executes what it reads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any, TypeAlias

import msgspec
import numpy as np

from hardpoint.interfaces.errors import MalformedMessage

Buffer: TypeAlias = bytes | bytearray | memoryview
"""Contiguous bytes."""

_ARRAY = 1
_LENGTH_BYTES = 4
_DTYPES = {dtype.str: dtype for order in "<>" for kind in "?bhiqBHIQefd" for dtype in (np.dtype(order + kind),)}

_encode_description = msgspec.msgpack.Encoder().encode
_decode_description = msgspec.msgpack.Decoder(tuple[str, tuple[int, ...]]).decode


def encode(value: object) -> list[Buffer]:
    """Return a message as parts to be written one after the other.

    Args:
        value: of dataclasses, msgspec structs, containers, numbers, texts, enumerations, bytes and numpy arrays of numbers.

    Raises:
        MalformedMessage: something else is in it.
    """
    try:
        return [_encoder.encode(value)]
    except (NotImplementedError, TypeError, ValueError, OverflowError) as error:
        raise MalformedMessage("a value cannot be sent to another process", found=str(error)) from error


def decode(message: Buffer, kind: Any) -> Any:
    """Return a message's value, checked to be of the type `kind`; raises MalformedMessage."""
    try:
        return _decoder(kind).decode(message)
    except (msgspec.DecodeError, ValueError, TypeError) as error:
        raise MalformedMessage(
            "a message of another process was not understood", found=f"{error}, expected {kind}"
        ) from error


def _encode_other(item: object) -> object:
    """Return an array as an extension: bytes of its description, the description (dtype and shape), and its own bytes."""
    if isinstance(item, np.generic):
        return item.item()
    if not isinstance(item, np.ndarray) or item.dtype.str not in _DTYPES:
        raise NotImplementedError(f"{type(item).__module__}.{type(item).__qualname__}")
    description = _encode_description((item.dtype.str, item.shape))
    length = len(description).to_bytes(_LENGTH_BYTES, "little")
    return msgspec.msgpack.Ext(_ARRAY, b"".join([length, description, item.tobytes()]))


def _decode_extension(code: int, data: memoryview) -> np.ndarray[Any, Any]:
    if code != _ARRAY:
        raise ValueError(f"extension {code} is not known")
    end = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
    name, shape = _decode_description(data[_LENGTH_BYTES:end])
    dtype, values = _DTYPES.get(name), data[end:]
    if dtype is None or min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != len(values):
        raise ValueError(f"an array of {name}{shape} in {len(values)} bytes")
    array = np.empty(shape, dtype)
    array.reshape(-1).view(np.uint8)[:] = values
    return array


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_other)


@cache
def _decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind, ext_hook=_decode_extension)


def size_of(parts: Sequence[Buffer]) -> int:
    """Return the bytes of a message's parts."""
    return sum(len(part) for part in parts)
