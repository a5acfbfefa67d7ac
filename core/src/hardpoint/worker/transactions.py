"""A worker's sleep or wake between its two phases, and the one that may be open by number."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from hardpoint.interfaces.allocator import MemoryReport, MemoryTransaction
from hardpoint.interfaces.errors import HardpointError, InvalidTransaction, MemoryBusy

T = TypeVar("T")

_log = logging.getLogger("hardpoint")


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class PreparedChange:
    """A transaction of an allocator, and what a worker has to note of it. An interrupt may come between any two of these.

    Attributes:
        memory: the allocator's.
        before_commit: notes what the commit loses: what is lost and not noted would be served.
        after_commit: does what is left to do.
        on_end: called last, whichever way it ended and also when that failed.
    """

    memory: MemoryTransaction
    before_commit: Callable[[], None] = _nothing
    after_commit: Callable[[], None] = _nothing
    on_end: Callable[[], None] = _nothing

    def commit(self) -> MemoryReport:
        """Note what is lost, and commit."""
        self.before_commit()
        try:
            report = self.memory.commit()
            self.after_commit()
            return report
        finally:
            self.on_end()

    def rollback(self) -> None:
        """Roll back, and note where that left the memory."""
        try:
            self.memory.rollback()
        finally:
            self.on_end()


class Transactions:
    """The transaction that a worker may have open; its number comes from whoever drives all ranks."""

    def __init__(self) -> None:
        self._last = 0
        self._open: PreparedChange | None = None

    def begin(self, number: int, prepare: Callable[[], PreparedChange]) -> None:
        """Open the transaction that `prepare` returns; what it raises leaves nothing open, and the number used up.

        Raises InvalidTransaction for a number that is not above all before, MemoryBusy while one is open; nothing was done.
        """
        if number <= self._last:
            raise InvalidTransaction(
                f"the transaction {number} cannot begin",
                found=f"its number is not above {self._last}, the latest",
                hint="Numbers begin at 1 and grow",
            )
        self.check_none("begin another transaction")
        self._last = number
        self._open = prepare()

    def commit(self, number: int) -> MemoryReport:
        """Commit the open transaction; raises InvalidTransaction for another number."""
        return self._end(self._checked(number, "committed").commit)

    def rollback(self, number: int) -> None:
        """Roll the open transaction back; raises InvalidTransaction for another number."""
        self._end(self._checked(number, "rolled back").rollback)

    def check_none(self, what: str) -> None:
        """Raise MemoryBusy while a transaction is open; `what` cannot be done then."""
        if self._open is not None:
            raise MemoryBusy(
                f"cannot {what}",
                found=f"the transaction {self._last} over the ranks' memory is open",
                hint="Commit it or roll it back first",
            )

    def abandon(self) -> None:
        """Roll back what is open, if anything, for a worker that ends."""
        abandoned, self._open = self._open, None
        if abandoned is None:
            return
        try:
            abandoned.rollback()
        except HardpointError as error:
            _log.warning("the transaction %d was open at shutdown and could not be rolled back: %s", self._last, error)

    def _checked(self, number: int, how: str) -> PreparedChange:
        if self._open is None or number != self._last:
            raise InvalidTransaction(
                f"the transaction {number} cannot be {how}",
                found="none is open" if self._open is None else f"the open one is {self._last}",
                hint="Nothing was done",
            )
        return self._open

    def _end(self, end: Callable[[], T]) -> T:
        """End the open transaction. One whose end was interrupted stays open: ending it again is right whether it had ended or not."""
        try:
            result = end()
        except Exception:
            self._open = None
            raise
        self._open = None
        return result
