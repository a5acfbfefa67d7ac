"""Errors as values: what a rank raised is raised again in the engine's process, as the same class and with the same fields."""

from __future__ import annotations

import builtins
import traceback
from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import structs

from hardpoint.interfaces import errors
from hardpoint.interfaces.errors import HardpointError, WorkerError

_PLAIN = (float, bool, bytes, type(None))


class Failure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An exception of another process.

    Attributes:
        kind: name of a class of `hardpoint.interfaces.errors` or of Python's own exceptions; empty for a foreign class.
        name: of the class itself.
        arguments, state: what it is made of and its attributes, as far as they are plain values.
        trace: its traceback as text.
        cause: what it was raised from.
    """

    kind: str
    name: str
    text: str
    arguments: tuple[Any, ...] = ()
    state: dict[str, Any] = {}  # msgspec copies it
    trace: str = ""
    cause: Failure | None = None


def describe(error: BaseException) -> Failure:
    """Return an exception as a value, with what it was raised from; of a foreign class, the nearest base that both sides know stands
    for it.
    """
    cause = error.__cause__
    return structs.replace(_described(error), cause=None if cause is None else _described(cause))


def _described(error: BaseException) -> Failure:
    known = next((cls for cls in type(error).__mro__ if _is_known(cls)), None)
    arguments = error.args if isinstance(error, HardpointError) else error.__reduce__()[1]
    return Failure(
        kind="" if known is None else known.__name__,
        name=f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins."),
        text=_written(str, error),
        arguments=tuple(map(_plain, arguments)) if isinstance(arguments, tuple) else (),
        state={name: _plain(value) for name, value in vars(error).items() if not name.startswith("_")},
        trace=_sendable("".join(traceback.format_exception(error))),
    )


def rebuild(failure: Failure, where: str) -> Exception:
    """Return the exception again, with a note that says where it was raised and its traceback there.

    Args:
        where: human-readable, for example "rank 1 of 2".
    """
    error = _rebuilt(failure, where)
    if failure.cause is not None:
        error.__cause__ = _rebuilt(failure.cause, where)
    error.add_note(f"Raised by {where}:\n{failure.trace.rstrip()}")
    return error


def _rebuilt(failure: Failure, where: str) -> Exception:
    cls = getattr(errors, failure.kind, None) or getattr(builtins, failure.kind, None) if failure.kind else None
    if cls is None or not _is_known(cls):
        return WorkerError(f"{where} raised {failure.name}", found=failure.text or None)
    arguments = _with_tuples(failure.arguments)
    state = {name: _with_tuples(value) for name, value in failure.state.items()}
    if issubclass(cls, HardpointError):
        restored: Exception = cls.restore(arguments, state)
        return restored
    try:
        error: Exception = cls(*arguments)
        error.__dict__.update(state)
        return error
    except Exception:
        return WorkerError(f"{where} raised {failure.name}", found=failure.text or None)


def _is_known(cls: type) -> bool:
    """Whether a class stands for itself in another process: specific, and an error that may be caught."""
    if not issubclass(cls, Exception) or cls in (Exception, HardpointError):
        return False
    return getattr(errors, cls.__name__, None) is cls or getattr(builtins, cls.__name__, None) is cls


def _plain(value: Any) -> Any:
    if isinstance(value, _PLAIN) or (isinstance(value, int) and -(1 << 63) <= value < 1 << 64):
        return value
    if isinstance(value, str):
        return _sendable(value)
    if isinstance(value, (tuple, list, set, frozenset)):
        return tuple(_plain(item) for item in value)
    return _written(repr, value)


def _written(write: Callable[[Any], str], value: Any) -> str:
    """Return str or repr of what may fail to write itself: who waits for the failure is to learn of it in any case."""
    try:
        return _sendable(write(value))
    except Exception as error:
        return f"<a {type(value).__name__} whose text cannot be made: {type(error).__name__}>"


def _sendable(text: str) -> str:
    """Return a text with lone surrogates (of a file's name that is no UTF-8, say) as escapes: no message takes them."""
    return text.encode(errors="backslashreplace").decode()


def _with_tuples(value: Any) -> Any:
    """Return a value with the tuples that MessagePack has made lists of."""
    return tuple(map(_with_tuples, value)) if isinstance(value, (list, tuple)) else value
