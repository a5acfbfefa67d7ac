"""One worker, in the caller's process and thread."""

from __future__ import annotations

from typing import Any

from hardpoint.executor.base import Executor
from hardpoint.interfaces.batch import StepInput, StepOutput
from hardpoint.interfaces.errors import HardpointError, WorkerError
from hardpoint.interfaces.worker import Worker


class InProcessExecutor(Executor):
    """The executor of a single rank: a method call is a method call."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def execute(self, step: StepInput) -> StepOutput:
        """Run one step; any failure of the worker that is not already typed becomes a WorkerError."""
        try:
            return self._worker.execute(step)
        except HardpointError:
            raise
        except Exception as error:
            raise WorkerError(
                "the worker failed in a step", found=f"{type(error).__name__}: {error}", hint="The cause is chained"
            ) from error

    def shutdown(self) -> None:
        """End the worker."""
        self._worker.shutdown()

    def _call(self, name: str, args: tuple[Any, ...]) -> list[Any]:
        return [getattr(self._worker, name)(*args)]
