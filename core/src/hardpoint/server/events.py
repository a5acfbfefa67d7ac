"""How the parts of a stream are written: as server-sent events of declared types."""

from __future__ import annotations

from collections.abc import Callable
from uuid import uuid4

import msgspec
from pydantic import BaseModel

_TEXT = uuid4().hex
"""What stands where an event's text will be; nothing else of an event has it."""


def written(event: BaseModel) -> bytes:
    """Return a server-sent event."""
    return b"data: " + event.model_dump_json(exclude_unset=True).encode() + b"\n\n"


class TextEvents:
    """Writes the events of a stream that differ in their text alone, which most do: one for each token.

    To make a declared type and write it takes 5 µs, of which the text takes 0.1; the rest is written once here for each completion.

    Args:
        make: returns such an event for the index of a completion and a text, which is in it once.
    """

    def __init__(self, make: Callable[[int, str], BaseModel]) -> None:
        self._make = make
        self._around: dict[int, tuple[bytes, bytes]] = {}

    def written(self, index: int, text: str) -> bytes:
        """Return the event that brings a text."""
        if index not in self._around:
            before, after = written(self._make(index, _TEXT)).split(b'"%s"' % _TEXT.encode())
            self._around[index] = before, after
        before, after = self._around[index]
        return before + msgspec.json.encode(text) + after
