"""Ctrl-C ends a command with one line and status 130.

KeyboardInterrupt alone does not do that: raised while a module is imported, in a callback from native code, or in a destructor,
it is lost or becomes another error. So it is raised only where there is something to clean up; elsewhere the process is left at
once. This module is light, so that the handler is there before anything large is imported.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn

from hardpoint.cli.exit_codes import ExitCode

_LEAVE, _RAISE, _WAIT = "leave", "raise", "wait"
_SHOW_CURSOR = "\x1b[?25h"


class _Interrupts:
    """What SIGINT does now; a second one leaves at once. Attributes only, so that no signal comes between asking and setting."""

    taken = False
    came = False
    told = False
    effect = _LEAVE


_now = _Interrupts()


def take() -> None:
    """Handle SIGINT from here to the end of the process; it stays ignored where it was, as in a background job."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        _now.taken = True
        signal.signal(signal.SIGINT, _handle)
        sys.unraisablehook = _lost


def are_taken() -> bool:
    """Whether SIGINT is handled here."""
    return _now.taken


def end() -> None:
    """The command is done: SIGINT no longer changes its status."""
    if _now.taken and not _now.came:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def came(error: BaseException) -> bool:
    """Return whether a command that raised this was ended by Ctrl-C; from here on, another one leaves at once."""
    _now.effect = _LEAVE
    return (
        _now.came
        or isinstance(error, KeyboardInterrupt)
        or (isinstance(error, SystemExit) and error.code == ExitCode.INTERRUPTED)
    )


def tell() -> None:
    """Write the line, on standard error; once."""
    if not _now.told:
        _now.told = _now.taken
        # A terminal has echoed ^C, and a progress bar may have hidden its cursor.
        with suppress(OSError):
            os.write(2, f"{_SHOW_CURSOR}\ninterrupted\n".encode() if os.isatty(2) else b"interrupted\n")


def raise_from_here() -> None:
    """Have Ctrl-C raise KeyboardInterrupt: what runs from here on cleans up after itself."""
    _now.effect = _RAISE


def forgive() -> None:
    """A KeyboardInterrupt was caught, and the command goes on."""
    _now.came = False


@contextmanager
def ended_by(clean_up: Callable[[], object]) -> Iterator[None]:
    """A context in which Ctrl-C raises KeyboardInterrupt, and whose end calls `clean_up`; one that comes in that waits for its end."""
    _now.effect = _RAISE
    try:
        yield
    finally:
        _now.effect = _WAIT
        clean_up()
        _now.effect = _LEAVE
        if _now.came:
            raise KeyboardInterrupt


def _handle(number: int, frame: FrameType | None) -> None:
    if _now.came or _now.effect is _LEAVE:
        _leave()
    _now.came = True
    if _now.effect is _RAISE:
        raise KeyboardInterrupt


def _lost(event: Any) -> None:
    """Python could raise an error to nobody; where it was Ctrl-C's, the command must not go on as if nothing had happened."""
    if issubclass(event.exc_type, KeyboardInterrupt):
        _leave()
    sys.__unraisablehook__(event)


def _leave() -> NoReturn:
    _now.came = True
    tell()
    with suppress(Exception):
        sys.stdout.flush()
    os._exit(ExitCode.INTERRUPTED)  # the kernel ends ranks and engines, which are children
