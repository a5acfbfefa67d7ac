"""A worker's sleep or wake between its two phases, and the one that may be open by number."""

from __future__ import annotations

import logging
from collections.abc import Callable

from hardpoint.interfaces.allocator import MemoryReport, MemoryTransaction
from hardpoint.interfaces.errors import HardpointError, InvalidTransaction, MemoryBusy

_log = logging.getLogger("hardpoint")


class MemoryChange(MemoryTransaction):
    """A transaction of an allocator, and what a worker has to note when it ends.

    Args:
        memory: the allocator's.
        on_commit: called after its commit.
        on_end: called last, whichever way it ended and also when that failed.
    """

    def __init__(self, memory: MemoryTransaction, on_commit: Callable[[], None], on_end: Callable[[], None]) -> None:
        self._memory = memory
        self._on_commit = on_commit
        self._on_end = on_end

    def commit(self) -> MemoryReport:
        """Commit, and note it."""
        try:
            report = self._memory.commit()
            self._on_commit()
            return report
        finally:
            self._on_end()

    def rollback(self) -> None:
        """Roll back, and note where that left the memory."""
        try:
            self._memory.rollback()
        finally:
            self._on_end()


class Transactions:
    """The transaction that a worker may have open; its number comes from whoever drives all ranks."""

    def __init__(self) -> None:
        self._last = 0
        self._open: MemoryTransaction | None = None

    def begin(self, number: int, prepare: Callable[[], MemoryTransaction]) -> None:
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
        return self._ended(number, "committed").commit()

    def rollback(self, number: int) -> None:
        """Roll the open transaction back; raises InvalidTransaction for another number."""
        self._ended(number, "rolled back").rollback()

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

    def _ended(self, number: int, how: str) -> MemoryTransaction:
        """Return the open transaction, which is then open no more."""
        if self._open is None or number != self._last:
            raise InvalidTransaction(
                f"the transaction {number} cannot be {how}",
                found="none is open" if self._open is None else f"the open one is {self._last}",
                hint="Nothing was done",
            )
        ended, self._open = self._open, None
        return ended
