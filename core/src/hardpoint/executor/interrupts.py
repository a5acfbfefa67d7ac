"""When Ctrl-C may end a call: not between two changes that belong together, but wherever it waits for others."""

from __future__ import annotations

# The C part of `signal`, without the conversions to enumerations and back, which take ten times as long: every step defers interrupts.
import _signal  # type: ignore[import-not-found]
import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import ContextDecorator
from types import FrameType
from typing import Self, TypeVar

T = TypeVar("T")

_SIGINT = int(signal.SIGINT)

_active: DeferredInterrupts | None = None
"""What defers interrupts now; only the main thread, which alone takes signals, reads and writes it."""


class DeferredInterrupts(ContextDecorator):
    """A context or decorator in whose body no KeyboardInterrupt is raised: a SIGINT meanwhile is given to its handler at the end.

    Does nothing in other threads than the main one, in another one's body, and where SIGINT has no handler in Python.
    """

    def __enter__(self) -> None:
        global _active
        if _active is None and _is_main() and callable(handler := _signal.getsignal(_SIGINT)):
            self._handler = handler
            self._came: list[FrameType | None] = []
            _signal.signal(_SIGINT, self._note)
            _active = self

    def __exit__(self, *_: object) -> None:
        global _active
        if _active is self:
            _active = None
            self._let_through()

    def _recreate_cm(self) -> Self:
        return type(self)()  # a decorated function may call itself

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came.append(frame)

    def _let_through(self) -> None:
        _signal.signal(_SIGINT, self._handler)
        came, self._came = self._came, []
        for frame in came:
            self._handler(_SIGINT, frame)


class AllowedInterrupts:
    """A context in whose body, within one that defers them, interrupts are raised at once, as is one that came before."""

    def __enter__(self) -> None:
        global _active
        self._deferring = _active if _is_main() else None
        if self._deferring is None:
            return
        _active = None
        try:
            self._deferring._let_through()
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        global _active
        if self._deferring is None:
            return
        try:
            _signal.signal(_SIGINT, self._deferring._note)
        except BaseException:
            # A signal had arrived, and Python ran its handler, which raised, before it set the new one.
            _signal.signal(_SIGINT, self._deferring._note)
            raise
        finally:
            _active = self._deferring


def raise_deferred() -> None:
    """Raise an interrupt that came and was deferred, if there is one."""
    with AllowedInterrupts():
        pass


def allow_between(items: Iterable[T]) -> Iterator[T]:
    """Yield items that take their time to come; interrupts are allowed while one is waited for."""
    iterator, end = iter(items), object()
    while True:
        with AllowedInterrupts():
            item = next(iterator, end)
        if item is end:
            return
        yield item  # type: ignore[misc]


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()
