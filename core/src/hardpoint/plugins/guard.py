"""Running a backend's own code so that whatever it does costs a message and not the process.

The code runs in a thread with a time limit. A thread cannot be ended from outside: one that hangs is left behind (it does not keep
the process from exiting), and the caller goes on.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from typing import TypeVar

from hardpoint.interfaces.errors import HardpointError

TIME_LIMIT = 10.0
"""Seconds that a backend's import, its hook and its probe may take, each."""

_Result = TypeVar("_Result")
_thread = threading.local()


class BackendCodeFailed(Exception):
    """A backend's own code raised, or did not return in time; the traceback is empty in the second case."""

    def __init__(self, reason: str, traceback: str = "") -> None:
        super().__init__(reason)
        self.reason, self.traceback = reason, traceback


def call_backend(what: str, function: Callable[[], _Result], time_limit: float = TIME_LIMIT) -> _Result:
    """Return what `function` returns; raises BackendCodeFailed, whose reason begins with `what`.

    `SystemExit` and `KeyboardInterrupt` raised by the function are failures like any other; an interrupt by the user goes to
    the main thread and is not caught here.
    """
    results: list[_Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        _thread.runs_backend_code = True
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name=f"hardpoint: {what}", daemon=True)
    thread.start()
    thread.join(time_limit)
    if errors:
        raise BackendCodeFailed(_reason(what, errors[0]), format_traceback(errors[0]))
    if not results:
        raise BackendCodeFailed(f"{what} did not return within {time_limit:g} s")
    return results[0]


def in_backend_code() -> bool:
    """Return whether this thread runs a backend's own code."""
    return getattr(_thread, "runs_backend_code", False)


def format_traceback(error: BaseException) -> str:
    """Return an error's traceback as text."""
    return "".join(traceback.format_exception(error))


def _reason(what: str, error: BaseException) -> str:
    ended = f"{what} failed" if isinstance(error, HardpointError) else f"{what} raised {type(error).__name__}"
    return f"{ended}: {' '.join(str(error).split())}".rstrip(": ")
