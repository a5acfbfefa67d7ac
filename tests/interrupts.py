"""Ctrl-C at a chosen or a random moment of a call, for tests of what an interrupt leaves behind."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Collection
from types import FrameType, TracebackType
from typing import Any, Self


class _Interrupt:
    """A context in which SIGINT raises KeyboardInterrupt as it does at a terminal, and which takes that.

    Attributes:
        came: it came; without it, the calls in the context were made to their end.
    """

    came = False

    def __enter__(self) -> Self:
        # A job in the background ignores SIGINT.
        self._handler = signal.signal(signal.SIGINT, self._raise)
        self._begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self._end()
        signal.signal(signal.SIGINT, self._handler)
        return self.came and isinstance(error, KeyboardInterrupt)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        self.came = True
        raise KeyboardInterrupt

    def _begin(self) -> None: ...

    def _end(self) -> None: ...


class InterruptAt(_Interrupt):
    """A signal before the n-th line of hardpoint's own code that this thread runs, counted from 1.

    Args:
        inside: beginnings of the names of modules whose lines count.
        functions: names of functions whose lines count; empty for all.
        returns: count ends of functions as lines, so that a signal comes after all that a function did, too.

    Attributes:
        where: the line.
    """

    where = ""

    def __init__(
        self,
        nth: int,
        *,
        inside: tuple[str, ...] = ("hardpoint",),
        functions: Collection[str] = (),
        returns: bool = False,
    ) -> None:
        self._left, self._inside, self._functions = nth, inside, functions
        self._events = ("line", "return") if returns else ("line",)

    def _begin(self) -> None:
        self._tracer = sys.gettrace()  # a measurement of coverage
        sys.settrace(self._enter)

    def _end(self) -> None:
        sys.settrace(self._tracer)

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not self._left or not frame.f_globals.get("__name__", "").startswith(self._inside):
            return None
        return self._step if not self._functions or frame.f_code.co_name in self._functions else None

    def _step(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event in self._events and self._left > 0:
            self._left -= 1
            if self._left == 0:
                self.where = f"{frame.f_globals['__name__']}:{frame.f_lineno} ({event} in {frame.f_code.co_name})"
                signal.raise_signal(signal.SIGINT)
        return self._step


class InterruptAfter(_Interrupt):
    """A signal from another thread, so many seconds after the context began; none comes where the calls are made by then."""

    def __init__(self, seconds: float) -> None:
        self._timer = threading.Thread(target=self._send)
        self._seconds = seconds
        self._is_inside = False

    def _begin(self) -> None:
        # The signal is sent in the midst of Python code, not after the 5 ms for which it keeps other threads waiting.
        self._interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)
        self._timer.start()
        self._is_inside = True

    def _end(self) -> None:
        self._is_inside = False
        self._timer.join()
        sys.setswitchinterval(self._interval)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        # At the context's own beginning and end nothing could take it.
        if self._is_inside and frame is not None and frame.f_code.co_filename != __file__:
            super()._raise(number, frame)

    def _send(self) -> None:
        time.sleep(self._seconds)
        if self._is_inside:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
