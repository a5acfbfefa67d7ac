"""Values as bytes: MessagePack with the bytes of arrays beside it, not within it. Nothing here executes what it reads.

A message is a 16-byte header (bytes of MessagePack, bytes of padding before the arrays), the MessagePack, and the arrays, each at a
multiple of 64 bytes from the first. In the MessagePack an array is an extension that says its dtype, shape and offset. So arrays are
written from where they lie, and those that are read are views of the message.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeAlias

import msgspec
import numpy as np

from hardpoint.interfaces.errors import MalformedMessage

Buffer: TypeAlias = bytes | bytearray | memoryview
"""Contiguous bytes."""

_ARRAY = 1
_ALIGNMENT = 64
_PADDING = bytes(_ALIGNMENT)
_HEADER = struct.Struct("<QQ")
_KINDS = frozenset("biuf")


class _ArrayPlace(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[int, ...]
    offset: int


_encode_place = msgspec.msgpack.Encoder().encode
_decode_place = msgspec.msgpack.Decoder(_ArrayPlace).decode


def encode(value: object) -> list[Buffer]:
    """Return a message as parts to be written one after the other; arrays are not copied unless they have gaps.

    Args:
        value: of dataclasses, msgspec structs, containers, numbers, texts, enumerations, bytes and numpy arrays of numbers.

    Raises:
        MalformedMessage: something else is in it.
    """
    arrays: list[Buffer] = []
    end = 0

    def place(item: object) -> object:
        nonlocal end
        if not isinstance(item, np.ndarray) or item.dtype.kind not in _KINDS:
            if isinstance(item, np.generic):
                return item.item()
            raise NotImplementedError(f"{type(item).__module__}.{type(item).__qualname__}")
        array = item if item.flags.c_contiguous else np.ascontiguousarray(item)
        gap = -end % _ALIGNMENT
        if gap:
            arrays.append(_PADDING[:gap])
        described = _ArrayPlace(array.dtype.str, item.shape, end + gap)
        end += gap + array.nbytes
        if array.nbytes:
            arrays.append(array.reshape(-1).view(np.uint8).data)
        return msgspec.msgpack.Ext(_ARRAY, _encode_place(described))

    try:
        body = msgspec.msgpack.Encoder(enc_hook=place).encode(value)
    except (NotImplementedError, TypeError, ValueError, OverflowError) as error:
        raise MalformedMessage("a value cannot be sent to another process", found=str(error)) from error
    gap = -(_HEADER.size + len(body)) % _ALIGNMENT if arrays else 0
    return [_HEADER.pack(len(body), gap), body, _PADDING[:gap], *arrays]


def decode(message: Buffer, kind: Any) -> Any:
    """Return a message's value, checked to be of the type `kind`; its arrays are views of the message.

    Raises MalformedMessage.
    """
    try:
        size, gap = _HEADER.unpack_from(message)
        if _HEADER.size + size + gap > len(message):
            raise ValueError(f"{size} bytes of MessagePack in a message of {len(message)} bytes")
        view = memoryview(message)
        start = _HEADER.size + size + gap
        body = view[_HEADER.size : _HEADER.size + size]
        if start == len(view):
            return _decoder(kind).decode(body)
        return msgspec.msgpack.Decoder(kind, ext_hook=_array_reader(view[start:])).decode(body)
    except (struct.error, msgspec.DecodeError, ValueError, TypeError) as error:
        raise MalformedMessage(
            "a message of another process was not understood", found=f"{error}, expected {kind}"
        ) from error


@cache
def _decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind, ext_hook=_array_reader(memoryview(b"")))


def _array_reader(blob: memoryview) -> Callable[[int, memoryview], np.ndarray[Any, Any]]:
    def read(code: int, data: memoryview) -> np.ndarray[Any, Any]:
        if code != _ARRAY:
            raise ValueError(f"extension {code} is not known")
        place = _decode_place(data)
        dtype = np.dtype(place.dtype)
        if dtype.kind not in _KINDS or min(place.shape, default=0) < 0 or place.offset < 0:
            raise ValueError(f"an array of {place.dtype}{place.shape} at {place.offset}")
        count = 1
        for extent in place.shape:
            count *= extent
        if not count:
            return np.empty(place.shape, dtype)
        return np.frombuffer(blob, dtype, count, place.offset).reshape(place.shape)

    return read


def size_of(parts: Sequence[Buffer]) -> int:
    """Return the bytes of a message's parts."""
    return sum(len(part) for part in parts)
