"""A ring of shared memory with one writer and one reader, for frames of any size.

Neither side ever reads a position that the other writes: how many bytes there are, and how many there is room for, is in the counters
of two eventfds. The writer adds to `data` what it has written, the reader adds to `space` what it has taken. So the kernel's own
ordering of these calls orders the memory as well, a wait is a wait for a file descriptor, and nothing has a name that could be left
behind.

A frame is a header (mark, kind, sequence number, number of the call, bytes) and its bytes. A frame larger than the ring is written in
pieces while the reader takes them. Sequence numbers are checked: a frame that is missing, repeated or torn is a MalformedMessage.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Sequence

from hardpoint.executor.messages import Buffer, size_of
from hardpoint.executor.transport import Frame
from hardpoint.interfaces.errors import MalformedMessage

CAPACITY = 1 << 20
"""Bytes of one ring; most steps and all their answers fit several times."""

_HEADER = struct.Struct("<IIQQQ")
_MARK = 0x48504652
_LARGEST = 1 << 38


def make_counters(capacity: int) -> tuple[int, int]:
    """Return two new eventfds, `data` and `space`, for an empty ring."""
    flags = os.EFD_CLOEXEC | os.EFD_NONBLOCK
    data = os.eventfd(0, flags)
    try:
        return data, os.eventfd(capacity, flags)
    except OSError:
        os.close(data)
        raise


def take(counter: int) -> int:
    """Return what was added to an eventfd's counter since it was taken last."""
    try:
        return os.eventfd_read(counter)
    except BlockingIOError:
        return 0


class RingWriter:
    """The writing end.

    Args:
        memory: the ring's bytes.
        data, space: its counters; see `make_counters`.
    """

    def __init__(self, memory: memoryview, data: int, space: int) -> None:
        self._memory, self._data, self._space = memory, data, space
        self._position = self._room = self._written = 0
        self._sequence = 0

    def write(self, kind: int, call: int, parts: Sequence[Buffer], wait: Callable[[int], None]) -> None:
        """Write one frame.

        Args:
            parts: its bytes, one after the other.
            wait: returns when the file descriptor that it is given can be read; what it raises leaves the frame torn.
        """
        self._put(_HEADER.pack(_MARK, kind, self._sequence, call, size_of(parts)), wait)
        for part in parts:
            if part:
                self._put(part, wait)
        self._sequence += 1
        self._publish()

    def _put(self, part: Buffer, wait: Callable[[int], None]) -> None:
        size, capacity, done = len(part), len(self._memory), 0
        view = part if size <= self._room and self._position + size <= capacity else memoryview(part)
        while done < size:
            if not self._room:
                self._publish()
                self._make_room(wait)
            count = min(size - done, self._room, capacity - self._position)
            piece = view if count == size else view[done : done + count]
            self._memory[self._position : self._position + count] = piece
            done += count
            self._room -= count
            self._written += count
            self._position = (self._position + count) % capacity

    def _make_room(self, wait: Callable[[int], None]) -> None:
        while not self._room:
            self._room += take(self._space)
            if not self._room:
                wait(self._space)

    def _publish(self) -> None:
        if self._written:
            os.eventfd_write(self._data, self._written)
            self._written = 0


class RingReader:
    """The reading end; arguments as those of `RingWriter`."""

    def __init__(self, memory: memoryview, data: int, space: int) -> None:
        self._memory, self._data, self._space = memory, data, space
        self._position = self._available = self._taken = 0
        self._sequence = 0
        self._header = bytearray(_HEADER.size)
        self._filled = 0
        self._frame: Frame | None = None

    def fileno(self) -> int:
        """Return the file descriptor that can be read when there is something new."""
        return self._data

    @property
    def has_unread(self) -> bool:
        """Whether there are bytes of which the file descriptor will not tell any more; without them, `read` is worth a wait for it."""
        return self._available > 0

    def read(self) -> Frame | None:
        """Return the next frame, or None where it has not arrived as a whole yet; raises MalformedMessage."""
        self._available += take(self._data)
        if self._frame is None:
            if not self._fill(self._header):
                return None
            self._frame = self._begin()
        if not self._fill(self._frame.payload):
            return None
        frame, self._frame = self._frame, None
        if self._taken * 2 >= len(self._memory):
            self._give_back()
        return frame

    def _begin(self) -> Frame:
        mark, kind, sequence, call, size = _HEADER.unpack(self._header)
        if mark != _MARK or sequence != self._sequence or size > _LARGEST:
            raise MalformedMessage(
                f"frame {self._sequence} was expected from another process",
                found=f"mark {mark:#x}, kind {kind}, number {sequence}, {size} bytes",
            )
        self._sequence += 1
        self._filled = 0
        return Frame(kind, call, bytearray(size))

    def _fill(self, target: bytearray) -> bool:
        """Take what there is into the rest of `target`; returns whether that is full, and is then ready for the next one."""
        capacity, size = len(self._memory), len(target)
        while self._filled < size:
            count = min(size - self._filled, self._available, capacity - self._position)
            if not count:
                # Give back what was read: the writer may be waiting for room.
                self._give_back()
                return False
            piece = self._memory[self._position : self._position + count]
            if count == size:
                target[:] = piece
            else:
                target[self._filled : self._filled + count] = piece
            self._filled += count
            self._available -= count
            self._taken += count
            self._position = (self._position + count) % capacity
        self._filled = 0
        return True

    def _give_back(self) -> None:
        if self._taken:
            os.eventfd_write(self._space, self._taken)
            self._taken = 0
