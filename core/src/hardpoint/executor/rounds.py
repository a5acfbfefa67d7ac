"""One call on all ranks: how long it may take, and what the ranks' outcomes mean together."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hardpoint.executor.calls import CallSchema
from hardpoint.executor.messages import decode
from hardpoint.interfaces.allocator import SleepPlan
from hardpoint.interfaces.errors import OutputFailed, WorkerError

NOT_YET = object()
"""Outcome of a rank that has not answered."""

OUT_OF_STEP = "Ranks that are out of step cannot go on, so all were ended; make a new engine"
HANGING = (
    "All ranks were ended; make a new engine. Where the call is slow and not stuck, raise its time limit in rank_limits"
)


class Deadline:
    """The end of the time that a call may take.

    Attributes:
        call: its name.
        seconds: its limit.
    """

    def __init__(self, call: str, seconds: float) -> None:
        self.call, self.seconds = call, seconds
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Return the seconds that are left, 0 where there are none."""
        return max(self._end - time.monotonic(), 0.0)

    def shorten(self, seconds: float) -> None:
        """Let it end so many seconds from now, unless it ends before."""
        self._end = min(self._end, time.monotonic() + seconds)

    def extend(self) -> None:
        """Begin again: there was progress."""
        self._end = time.monotonic() + self.seconds


def results(schema: CallSchema, outcomes: Sequence[Any]) -> list[Any]:
    """Return what ranks answered, messages decoded and exceptions as they are; raises MalformedMessage."""
    return [outcome if isinstance(outcome, BaseException) else decode(outcome, schema.result) for outcome in outcomes]


def without_progress(argument: Any) -> Any:
    """Return a call's argument as the ranks get it whose progress nobody follows."""
    return replace(argument, progress=None) if isinstance(argument, SleepPlan) else argument


def are_in_step(outcomes: Sequence[Any], driver: int) -> bool:
    """Whether the next communication of all ranks of a failed step is the next step's.

    So it is where all raised the same error, since they stopped at the same point, and where the driver alone failed, with the error that
    says that it needed the others no more. Of others it is not known.
    """
    failed = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    if len(failed) == len(outcomes):
        return len(set(map(type, failed))) == 1
    return len(failed) == 1 and isinstance(outcomes[driver], OutputFailed)


def culprit(outcomes: Sequence[Any]) -> tuple[int, Exception]:
    """Return the rank that failed first and its error, where some failed and others did not.

    An error of communication follows from another rank's failure, more often than not.
    """
    errors = {rank: outcome for rank, outcome in enumerate(outcomes) if isinstance(outcome, Exception)}
    rank = next((rank for rank, error in errors.items() if not isinstance(error, WorkerError)), next(iter(errors)))
    return rank, errors[rank]
