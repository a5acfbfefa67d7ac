"""What carries frames between an engine and its ranks; the two implementations are processes of this machine and Ray actors."""

from __future__ import annotations

import logging
import struct
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from hardpoint.executor.limits import RankLimits
from hardpoint.executor.messages import Buffer
from hardpoint.executor.ranks import RankSpec
from hardpoint.interfaces.errors import RankFailed

_log = logging.getLogger("hardpoint")

NAME_BYTES = 64
"""Length of a call's name at the beginning of its frame, padded with zeros; the arguments' message follows."""

PROGRESS = struct.Struct("<qq")
"""Bytes done, and bytes in all."""

_HANGING = (
    "All ranks were ended; make a new engine. Where the call is slow and not stuck, raise its time limit in rank_limits"
)


class Kind(IntEnum):
    """Kinds of frames.

    To a rank. START: make the worker of a `RankSpec`. STEP: submit a step; COLLECT: answer all steps up to this one, also where the
    worker could take further ones first. CALL: a name and arguments. WEIGHT, WEIGHTS_END, WEIGHTS_FAILED: a tensor for the call under
    way, the end of them, and what the engine's iterator raised. CONTINUE, CANCEL: the answer to a report of progress, with what the
    engine's callback raised. STOP: end the worker and the process.

    From a rank. RESULT, FAILURE: the answer to START, STEP or CALL. PROGRESS: as `PROGRESS` packs it; the rank waits for the answer.

    An engine's process is started, called and answers in the same way, a command at a time (`hardpoint.engine.process_main`). NESTED: a
    command from within what the engine waits for. From the engine, EVENTS: of its steps. WANT_WEIGHT: the next tensor for a call;
    PARTICIPANT: what a participant of sleeps is told. The engine waits for the answers to both.
    """

    START = 1
    STEP = 2
    CALL = 3
    WEIGHT = 4
    WEIGHTS_END = 5
    WEIGHTS_FAILED = 6
    CONTINUE = 7
    CANCEL = 8
    STOP = 9
    COLLECT = 10
    NESTED = 11
    RESULT = 101
    FAILURE = 102
    PROGRESS = 103
    EVENTS = 104
    WANT_WEIGHT = 105
    PARTICIPANT = 106


WITHIN_CALL = frozenset({Kind.WEIGHT, Kind.WEIGHTS_END, Kind.WEIGHTS_FAILED, Kind.CONTINUE, Kind.CANCEL})
"""Frames to a rank that belong to a call under way, and mean nothing when it is over."""


@dataclass(frozen=True, slots=True)
class Frame:
    """What arrives.

    Attributes:
        kind: a `Kind`, or what else arrived as one.
        call: number of the call that it belongs to.
    """

    kind: int
    call: int
    payload: bytearray


class Deadline:
    """The end of the time that a call may take.

    Attributes:
        call: its name.
        seconds: its limit.
    """

    def __init__(self, call: str, seconds: float) -> None:
        self.call, self.seconds = call, seconds
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Return the seconds that are left, 0 where there are none."""
        return max(self._end - time.monotonic(), 0.0)

    def shorten(self, seconds: float) -> None:
        """Let it end the given number of seconds from now, unless it ends before."""
        self._end = min(self._end, time.monotonic() + seconds)

    def extend(self) -> None:
        """Begin again: there was progress."""
        self._end = time.monotonic() + self.seconds


class Transport(ABC):
    """The processes of all ranks of one engine, and frames to and from them; what frames mean is not known here.

    The first failure of a rank ends all of them. It is kept, and everything that needs the ranks raises it from then on.
    """

    def __init__(self, limits: RankLimits | None) -> None:
        self.limits = limits or RankLimits()
        self._failure: RankFailed | None = None
        self._is_closing = False
        self._lock = threading.Lock()

    @abstractmethod
    def start(self, deadline: Deadline) -> list[RankSpec]:
        """Start the processes, and return what each rank is; whatever it raises, `close` leaves nothing behind."""

    @property
    @abstractmethod
    def pids(self) -> list[int]:
        """Process ids in the order of ranks, each on its machine."""

    @abstractmethod
    def send(self, ranks: Sequence[int], kind: Kind, call: int, parts: Sequence[Buffer], deadline: Deadline) -> None:
        """Send one frame to each of these ranks; `parts` are its bytes, one after the other.

        Raises RankFailed. Where anything else ends it (an interrupt, say), a frame may be torn: the ranks have to be ended.
        """

    @abstractmethod
    def wait(self, seconds: float, first: int | None = None) -> bool:
        """Wait until frames have arrived, and return whether they have; raises RankFailed. An interrupt does no harm.

        Args:
            first: until this rank has answered, or any has failed, answers of others need not end the wait.
        """

    @abstractmethod
    def receive(self) -> Sequence[tuple[int, Frame]]:
        """Return the frames that have arrived, with their ranks, without waiting; raises as `send` does."""

    @abstractmethod
    def trace(self, rank: int) -> str:
        """Return where a rank that does not answer stands, as far as it says so: the tracebacks of its threads."""

    @abstractmethod
    def kill(self) -> None:
        """End all ranks, and wait a moment until they are gone; callable in any state and from any thread."""

    @abstractmethod
    def close(self, patience: float = 0.0) -> None:
        """Give the ranks the given number of seconds to end by themselves, end them, and give back all that is held. Idempotent."""

    @abstractmethod
    def is_watcher(self) -> bool:
        """Whether this is a thread of the transport's own, which cannot close it."""

    def where(self, rank: int) -> str:
        """Return which machine a rank is on, in parentheses, where there are several."""
        return ""

    def check(self) -> None:
        """Raise RankFailed where a rank has failed."""
        failure = self._failure
        if failure is not None:
            self.kill()
            raise RankFailed.of(failure.rank or 0, failure.ended, failure.output, failure.hint or "")

    def expect_end(self) -> None:
        """From here on, the end of a rank is no failure."""
        with self._lock:
            self._is_closing = True

    def fail(self, rank: int, ended: str, output: str = "", hint: str = "") -> RankFailed:
        """Note that a rank has failed, unless one has before, and end all; returns the first failure.

        Args:
            output: what it left.
        """
        with self._lock:
            failure = self._failure or RankFailed.of(rank, ended + self.where(rank), output, hint)
            if self._is_closing:
                return failure
            if self._failure is None:
                self._failure = failure
                _log.error("%s", failure)
        self.kill()
        return failure

    def fail_hanging(self, rank: int, deadline: Deadline) -> RankFailed:
        """Note that a rank has not answered in time; it is asked first where it stands."""
        if self._failure is not None:
            return self._failure
        trace = self.trace(rank)
        return self.fail(rank, f"it has not answered '{deadline.call}' within {deadline.seconds:g} s", trace, _HANGING)

    def fail_malformed(self, rank: int, what: object) -> RankFailed:
        """Note that a rank has sent what cannot be understood."""
        return self.fail(rank, f"its messages cannot be understood: {what}")
