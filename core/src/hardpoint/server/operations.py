"""What operators have asked for and is not over, or was over lately: each an operation with a state and, where it copies, progress."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterator
from enum import StrEnum
from typing import Any
from uuid import uuid4

import msgspec

from hardpoint.interfaces.errors import HardpointError
from hardpoint.server.errors import ApiError

_KEPT = 200


class OperationState(StrEnum):
    """RUNNING until it has SUCCEEDED, FAILED, or was CANCELLED."""

    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Operation:
    """One operation on one model.

    Args:
        work: what it does, given a function of (bytes done, bytes in all).
        cancel: gives it up, where that is safe; None where it never is.
    """

    def __init__(
        self,
        model: str,
        kind: str,
        work: Callable[[Callable[[int, int], None]], Coroutine[Any, Any, Any]],
        cancel: Callable[[], Coroutine[Any, Any, None]] | None = None,
    ) -> None:
        self.id, self.model, self.kind = uuid4().hex, model, kind
        self.state = OperationState.RUNNING
        self.error: HardpointError | ApiError | None = None
        self._result: Any = None
        self._bytes = (0, 0)
        self._started, self._ended = time.time(), 0.0
        self._cancel = cancel
        self.task = asyncio.create_task(self._run(work), name=f"{kind} of {model}")

    async def cancel(self) -> None:
        """Give it up; raises ApiError (409) where it cannot be, or is over."""
        if self._cancel is None or self.state is not OperationState.RUNNING:
            why = (
                "cannot be given up once it has begun" if self.state is OperationState.RUNNING else f"has {self.state}"
            )
            raise ApiError(409, f"the {self.kind} of '{self.model}' {why}", "not_cancellable")
        await self._cancel()
        await asyncio.wait([self.task])
        self.state = OperationState.CANCELLED

    def show(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        done, total = self._bytes
        return {
            "id": self.id,
            "model": self.model,
            "kind": self.kind,
            "state": self.state,
            "started": self._started,
            "seconds": (self._ended or time.time()) - self._started,
            "progress": {"bytes": done, "total": total},
            "result": as_json(self._result),
            "error": None if self.error is None else _told(self.error).body["error"],
        }

    def result(self) -> dict[str, Any]:
        """Return it where it succeeded; raises what made it fail."""
        if self.error is not None:
            raise self.error
        return self.show()

    async def _run(self, work: Callable[[Callable[[int, int], None]], Coroutine[Any, Any, Any]]) -> None:
        try:
            self._result = await work(self._note)
            self.state = OperationState.SUCCEEDED
        except (HardpointError, ApiError) as error:
            self.error, self.state = error, OperationState.FAILED
        except Exception as error:
            self.error = ApiError(500, f"{type(error).__name__}: {error}", "internal_error")
            self.state = OperationState.FAILED
            raise
        finally:
            self._ended = time.time()

    def _note(self, done: int, total: int) -> None:
        self._bytes = done, total


class Operations:
    """The operations of a server, the last few hundred of them."""

    def __init__(self) -> None:
        self._all: OrderedDict[str, Operation] = OrderedDict()

    def __iter__(self) -> Iterator[Operation]:
        return iter(self._all.values())

    def add(self, operation: Operation) -> Operation:
        """Keep an operation; forgets the oldest that is over."""
        self._all[operation.id] = operation
        over = [one.id for one in self if one.state is not OperationState.RUNNING]
        for name in over[: max(len(self._all) - _KEPT, 0)]:
            del self._all[name]
        return operation

    def get(self, name: str) -> Operation:
        """Return an operation by its id; raises ApiError (404)."""
        if name not in self._all:
            raise ApiError(404, "there is no such operation, or it was over long ago", "operation_not_found")
        return self._all[name]


def as_json(value: Any) -> Any:
    """Return a report as JSON has it: objects for dataclasses, texts for enumerations, sorted lists for sets."""
    return msgspec.to_builtins(value, order="deterministic", str_keys=True)


def _told(error: HardpointError | ApiError) -> ApiError:
    return error if isinstance(error, ApiError) else ApiError.of(error)
