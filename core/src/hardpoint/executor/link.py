"""What the engine and one rank's process share: two rings, and a counter that shows that the rank's interpreter runs.

All of it is in one piece of memory without a name and four eventfds, which the rank's process inherits by number.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hardpoint.executor.messages import Buffer
from hardpoint.executor.ring import CAPACITY, RingReader, RingWriter, make_counters, take
from hardpoint.executor.transport import Frame, Kind

TRACE_SIGNAL = signal.SIGUSR1
"""Makes a rank write the traceback of all its threads to standard error."""

_HEARTBEAT = 64
"""Offset of the heartbeat in the first page; the page is written by the rank alone."""


@dataclass(frozen=True)
class LinkFiles:
    """File descriptors of a link: the memory, data and space of the ring to the rank and of the one from it, and `failure_event`.

    `failure_event` can be read when the rank has sent a failure, for those who do not wait for its other answers.
    """

    memory: int
    requests: tuple[int, int]
    replies: tuple[int, int]
    failure_event: int
    capacity: int = CAPACITY

    @classmethod
    def make(cls, capacity: int = CAPACITY) -> LinkFiles:
        """Make them for an empty link."""
        made: list[int] = []
        try:
            made.append(os.memfd_create("hardpoint-rank", os.MFD_CLOEXEC))
            os.ftruncate(made[0], mmap.PAGESIZE + 2 * capacity)
            made += make_counters(capacity)
            made += make_counters(capacity)
            made.append(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
        except OSError:
            for fd in made:
                os.close(fd)
            raise
        return cls.parse(",".join(map(str, (*made, capacity))))

    @property
    def all(self) -> tuple[int, ...]:
        """All of them, in the order in which `parse` takes them."""
        return (self.memory, *self.requests, *self.replies, self.failure_event)

    def close(self) -> None:
        """Close all of them, except for those that are closed."""
        for fd in self.all:
            with contextlib.suppress(OSError):
                os.close(fd)

    def to_text(self) -> str:
        """Return it as an argument of the rank's process."""
        return ",".join(map(str, (*self.all, self.capacity)))

    @classmethod
    def parse(cls, text: str) -> LinkFiles:
        """Read what `to_text` wrote."""
        memory, *counters, failure_event, capacity = map(int, text.split(","))
        return cls(memory, (counters[0], counters[1]), (counters[2], counters[3]), failure_event, capacity)


class Link:
    """One side of it. The engine writes requests and reads replies, the rank the other way round."""

    def __init__(self, files: LinkFiles, *, is_rank: bool) -> None:
        self._files = files
        self._memory = mmap.mmap(files.memory, mmap.PAGESIZE + 2 * files.capacity)
        whole = memoryview(self._memory)
        first = whole[mmap.PAGESIZE : mmap.PAGESIZE + files.capacity]
        second = whole[mmap.PAGESIZE + files.capacity :]
        self._heartbeat = whole[_HEARTBEAT : _HEARTBEAT + 8].cast("Q")
        self._views = [self._heartbeat, first, second, whole]
        written, read = ((second, files.replies), (first, files.requests))
        if not is_rank:
            written, read = (first, files.requests), (second, files.replies)
        self._writer = RingWriter(written[0], *written[1])
        self._reader = RingReader(read[0], *read[1])

    def fileno(self) -> int:
        """Return the file descriptor that can be read when something has arrived."""
        return self._reader.fileno()

    def send(self, kind: Kind, call: int, parts: Sequence[Buffer], wait: Callable[[int], None]) -> None:
        """Send one frame; see `RingWriter.write`."""
        self._writer.write(kind, call, parts, wait)
        if kind == Kind.FAILURE:
            os.eventfd_write(self._files.failure_event, 1)

    @property
    def has_unread(self) -> bool:
        """Whether something has arrived of which the file descriptor will not tell any more."""
        return self._reader.has_unread

    def receive(self) -> Frame | None:
        """Return the next frame, None where there is none yet; raises MalformedMessage."""
        frame = self._reader.read()
        if frame is not None and frame.kind == Kind.FAILURE:
            take(self._files.failure_event)
        return frame

    @property
    def failure_event(self) -> int:
        """The file descriptor that can be read when the rank has sent a failure that was not received yet."""
        return self._files.failure_event

    @property
    def heartbeat(self) -> int:
        """How often the rank has said that it runs."""
        return self._heartbeat[0]

    def beat(self) -> None:
        """Say that this rank runs."""
        self._heartbeat[0] += 1

    def close(self) -> None:
        """Give back memory and file descriptors; idempotent."""
        for view in self._views:
            view.release()
        self._views.clear()
        with contextlib.suppress(BufferError):  # A traceback may hold a piece of it; it goes with that.
            self._memory.close()
        self._files.close()
        self._files = LinkFiles(-1, (-1, -1), (-1, -1), -1)
