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

    @property
    def num_ranks(self) -> int:
        """One."""
        return 1

    def execute(self, step: StepInput) -> StepOutput:
        """Run one step."""
        return self._worker.execute(step)

    def shutdown(self) -> None:
        """End the worker."""
        self._worker.shutdown()

    def _call_all(self, name: str, args: tuple[Any, ...]) -> list[Any]:
        try:
            return [getattr(self._worker, name)(*args)]
        except Exception as error:
            return [error]
