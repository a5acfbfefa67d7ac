"""One worker, in the caller's process and thread."""

from __future__ import annotations

from typing import Any

from hardpoint.executor.base import Executor
from hardpoint.interfaces.batch import StepInput, StepOutput
from hardpoint.interfaces.worker import Worker


class InProcessExecutor(Executor):
    """The executor of a single rank: a method call is a method call."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def submit(self, step: StepInput) -> None:
        """Begin one step."""
        self._worker.submit(step)

    def collect(self) -> StepOutput:
        """Return the output of the oldest step that was submitted."""
        return self._worker.collect()

    def shutdown(self) -> None:
        """End the worker."""
        self._worker.shutdown()

    def _call_all(self, name: str, args: tuple[Any, ...]) -> list[Any]:
        try:
            return [getattr(self._worker, name)(*args)]
        except Exception as error:
            return [error]
