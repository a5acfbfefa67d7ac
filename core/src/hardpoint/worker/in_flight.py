"""Steps that were submitted and whose outcome was not collected yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from hardpoint.interfaces.batch import StepOutput
from hardpoint.interfaces.errors import NothingToCollect, WorkerError


class StepsInFlight:
    """The outcomes of submitted steps, the oldest first: outputs, or the exceptions with which steps failed."""

    def __init__(self, depth: int = 0) -> None:
        """Begin with none.

        Args:
            depth: see `ModelInfo.steps_in_flight`.
        """
        self._depth = depth
        self._outcomes: deque[StepOutput | Exception] = deque()

    def check_room(self) -> None:
        """Raise WorkerError where as many steps wait to be collected as may."""
        if len(self._outcomes) > self._depth:
            raise WorkerError(
                "a step was submitted too early",
                found=f"{len(self._outcomes)} steps wait to be collected",
                hint="Collect the oldest one first",
            )

    def add(self, compute: Callable[[], StepOutput]) -> None:
        """Compute a step and keep its outcome."""
        # Without a name for the exception that outlives it: its traceback leads to this frame, and the two would keep the step's tensors.
        try:
            self._outcomes.append(compute())
        except Exception as error:
            self._outcomes.append(error)

    def collect(self) -> StepOutput:
        """Return the oldest step's output, or raise what it failed with; raises NothingToCollect."""
        if not self._outcomes:
            raise NothingToCollect("there is no step whose output could be collected", hint="Submit one first")
        outcome = self._outcomes.popleft()
        if isinstance(outcome, Exception):
            try:
                raise outcome
            finally:
                # The exception leads to this frame: if the frame led back to it, the step's tensors would stay until a collection.
                del outcome
        return outcome
