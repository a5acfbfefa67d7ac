"""What the engine asks of an executor."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from hardpoint.interfaces.allocator import MemoryChange, MemoryReport, SleepPlan
from hardpoint.interfaces.batch import StepInput, StepOutput
from hardpoint.interfaces.errors import ConfigError, EngineDead, HardpointError, InvalidTransaction, RanksDiverged
from hardpoint.interfaces.worker import WORKER_CALLS

_ENDINGS = {"commit": "commit", "rollback": "roll back"}


class Executor(ABC):
    """Drives all ranks of one model as if they were one worker."""

    _last_transaction = 0
    _unsettled: tuple[str, str] | None = None

    @abstractmethod
    def submit(self, step: StepInput) -> None:
        """Begin one step on every rank; see `Worker.submit`. What refuses the step on ranks elsewhere is raised by `collect`."""

    @abstractmethod
    def collect(self) -> StepOutput:
        """Return the driver rank's output of the oldest step that was submitted; raises whatever a worker raised, NothingToCollect."""

    @abstractmethod
    def shutdown(self) -> None:
        """End all workers; callable in any state, idempotent."""

    def call(self, name: str, *args: Any) -> list[Any]:
        """Call a worker method by name on every rank; returns the results in the order of ranks.

        Every rank is called, whatever the others answer; then the error of the first rank that failed is raised, with its rank.
        """
        if name not in WORKER_CALLS:
            raise ConfigError(
                f"'{name}' is not a call of the worker contract",
                hint=f"The calls are {', '.join(sorted(WORKER_CALLS))}",
            )
        outcomes = self._call_all(name, args)
        try:
            raise_first(outcomes)
            return outcomes
        finally:
            # An exception's traceback has this frame: if the frame kept it, all tensors of its frames would stay until a collection.
            del outcomes

    def change(self, change: MemoryChange) -> list[MemoryReport]:
        """Put all ranks to sleep, or wake them, or change none; returns their reports in the order of ranks.

        Prepares on all ranks; then commits on all, or rolls back on all if one failed.

        Raises:
            What the first rank that failed raises, with its rank: all are as before.
            RanksDiverged: some ended it and others did not; `settle` tries again.
            EngineDead: a rank is gone.
        """
        self.settle()
        name = "sleep" if isinstance(change, SleepPlan) else "wake"
        self._last_transaction += 1
        # An interrupt may come before the ranks' answers: until all are known to be prepared, the way out is back.
        self._unsettled = "rollback", name
        try:
            raise_first(self._call_all("begin", (self._last_transaction, change)))
        except EngineDead:
            raise
        except BaseException:
            self._end("rollback", name, may_be_over=True)
            raise
        try:
            return self._end("commit", name, may_be_over=False)
        except (RanksDiverged, EngineDead):
            raise
        except BaseException:
            # An interrupt ended the wait, and some ranks may not have been told.
            self.settle()
            raise

    def settle(self) -> None:
        """End the last sleep or wake on the ranks that have not ended it; does nothing where all have. Raises as `change` does."""
        if self._unsettled is not None:
            self._end(*self._unsettled, may_be_over=True)

    def _end(self, call: str, name: str, *, may_be_over: bool) -> list[Any]:
        """Commit or roll back on every rank; with `may_be_over`, ranks on which it is not open are as they should be."""
        self._unsettled = call, name
        outcomes = self._call_all(call, (self._last_transaction,))
        failures = {
            rank: outcome
            for rank, outcome in enumerate(outcomes)
            if isinstance(outcome, BaseException) and not (may_be_over and isinstance(outcome, InvalidTransaction))
        }
        dead = next((rank for rank, failure in failures.items() if isinstance(failure, EngineDead)), None)
        try:
            if dead is not None:
                raise at_rank(failures[dead], dead, len(outcomes))
            if failures:
                raise RanksDiverged.of(f"{_ENDINGS[call]} a {name}", failures) from next(iter(failures.values()))
            self._unsettled = None
            return outcomes
        finally:
            # As in `call`; there may be exceptions among them that are not raised.
            del outcomes, failures

    @abstractmethod
    def _call_all(self, name: str, args: tuple[Any, ...]) -> list[Any]:
        """Call a checked method name on every rank and return one outcome for each, in the order of ranks.

        An outcome is what the method returned, or the exception (as an object, not raised) with which the rank failed. All
        ranks are called even when one fails, and no rank's outcome is lost to another's failure. EngineDead as an outcome says
        that no rank can be used any more. What is raised instead of being returned (KeyboardInterrupt while waiting, say) means
        that no outcome is known; the next call must be answered with its own outcomes all the same.
        """


def raise_first(outcomes: Sequence[Any]) -> None:
    """Raise the first exception among the outcomes of ranks; where there are several ranks, it says which one failed."""
    failed = next((rank for rank, outcome in enumerate(outcomes) if isinstance(outcome, BaseException)), None)
    if failed is None:
        return
    try:
        raise at_rank(outcomes[failed], failed, len(outcomes))
    finally:
        del outcomes


def at_rank(error: BaseException, rank: int, num_ranks: int) -> BaseException:
    """Return the exception with the rank that it came from, unless it says it already or there is only one."""
    if num_ranks > 1:
        if not isinstance(error, HardpointError):
            error.add_note(f"on rank {rank} of {num_ranks}")
        elif error.rank is None:
            error.name_rank(rank)
    return error
