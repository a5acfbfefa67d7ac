"""Sleep and wake over ranks: all or none, whichever rank fails in whichever phase, and whatever is lost on the way."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from core.tests.executor.helpers import RanksWithoutSteps
from hardpoint.executor import InProcessExecutor
from hardpoint.interfaces.allocator import (
    MemoryChange,
    MemoryReport,
    MemoryStats,
    MemoryTransaction,
    SleepPlan,
)
from hardpoint.interfaces.errors import (
    ConfigError,
    DriverError,
    EngineDead,
    HardpointError,
    InvalidTransaction,
    MemoryBusy,
    RanksDiverged,
    WorkerError,
)
from hardpoint.interfaces.worker import WorkerStatus
from hardpoint.worker.memory_changes import PreparedChange, Transactions


class Fault(Enum):
    """What goes wrong in one call of one rank."""

    BEFORE = "it fails and has done nothing"
    LOST = "it is done, and the answer is lost"


@dataclass
class Change(MemoryTransaction):
    """A change of a rank's one bit of state, which is there only when it is committed."""

    rank: Rank
    asleep: bool

    def commit(self) -> MemoryReport:
        self.rank.asleep = self.asleep
        return MemoryReport(1, 0, 0, {"total": 0.5}, 0, 0)

    def rollback(self) -> None:
        pass


@dataclass(eq=False)
class Rank:
    """A worker's two phases without memory; `faults` are by call, each met once."""

    asleep: bool = False
    transactions: Transactions = field(default_factory=Transactions)
    faults: dict[str, Fault] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)

    def answer(self, name: str, args: tuple[Any, ...]) -> Any:
        self.calls.append(name)
        fault = self.faults.pop(name, None)
        if fault is Fault.BEFORE and name in ("commit", "rollback"):
            raise WorkerError("the message was not understood")
        if fault is Fault.BEFORE:
            self.transactions.take(args[0])
            raise DriverError("unmap", 1, "stuck")
        result = getattr(self, name)(*args)
        if fault is Fault.LOST:
            raise WorkerError("the answer was lost")
        return result

    def begin(self, transaction: int, change: MemoryChange) -> None:
        self.transactions.take(transaction)
        self.transactions.open = PreparedChange(Change(self, isinstance(change, SleepPlan)))

    def commit(self, transaction: int) -> MemoryReport:
        return self.transactions.commit(transaction)

    def rollback(self, transaction: int) -> None:
        self.transactions.rollback(transaction)

    def status(self) -> WorkerStatus:
        return WorkerStatus(MemoryStats({}, 0))


class Ranks(RanksWithoutSteps):
    """Ranks in one thread; `interrupt` is (call, how many ranks hear of it before the wait for the answers is interrupted)."""

    def __init__(self, count: int) -> None:
        self.ranks = [Rank() for _ in range(count)]
        self.interrupt: tuple[str, int] | None = None

    def _call_all(self, name: str, args: tuple[Any, ...]) -> list[Any]:
        outcomes: list[Any] = []
        for rank in self.ranks:
            if self.interrupt == (name, len(outcomes)):
                self.interrupt = None
                raise KeyboardInterrupt
            try:
                outcomes.append(rank.answer(name, args))
            except HardpointError as error:
                outcomes.append(error)
        if self.interrupt == (name, len(outcomes)):
            self.interrupt = None
            raise KeyboardInterrupt
        return outcomes

    @property
    def asleep(self) -> set[bool]:
        return {rank.asleep for rank in self.ranks}

    def is_free(self) -> bool:
        """Whether no rank has a transaction open."""
        try:
            for rank in self.ranks:
                rank.transactions.check_none("go on")
        except MemoryBusy:
            return False
        return True


PLAN = SleepPlan()


@pytest.mark.parametrize("count", [1, 3])
def test_all_ranks_prepare_and_then_all_commit(count: int) -> None:
    ranks = Ranks(count)
    assert [report.preserved for report in ranks.sleep(PLAN)] == [1] * count
    assert ranks.asleep == {True}
    ranks.wake(["weights"])
    assert ranks.asleep == {False}
    assert all(rank.calls == ["begin", "commit", "begin", "commit"] for rank in ranks.ranks)


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_one_rank_that_cannot_prepare_rolls_back_all(failing: int) -> None:
    ranks = Ranks(3)
    ranks.ranks[failing].faults["begin"] = Fault.BEFORE
    with pytest.raises(DriverError, match=f"rank {failing}: ") as caught:
        ranks.sleep(PLAN)
    assert caught.value.rank == failing
    assert (ranks.asleep, ranks.is_free()) == ({False}, True)
    assert all(rank.calls == ["begin", "rollback"] for rank in ranks.ranks), "all are asked, whoever fails"
    ranks.sleep(PLAN)
    assert ranks.asleep == {True}


def test_a_rank_that_does_not_roll_back_is_named_and_settled_later() -> None:
    ranks = Ranks(3)
    ranks.ranks[0].faults["begin"] = Fault.BEFORE
    ranks.ranks[2].faults["rollback"] = Fault.BEFORE
    with pytest.raises(RanksDiverged, match="roll back a sleep on every rank: rank 2: WorkerError") as caught:
        ranks.sleep(PLAN)
    assert caught.value.ranks == (2,)
    assert isinstance(caught.value.__context__, DriverError)
    assert not ranks.is_free()
    ranks.settle()
    assert (ranks.asleep, ranks.is_free()) == ({False}, True)


def test_a_rank_that_does_not_commit_is_named_and_settled_later() -> None:
    ranks = Ranks(2)
    ranks.ranks[1].faults["commit"] = Fault.BEFORE
    with pytest.raises(RanksDiverged, match="commit a sleep on every rank: rank 1") as caught:
        ranks.sleep(PLAN)
    assert caught.value.ranks == (1,)
    assert ranks.asleep == {True, False}
    ranks.wake()  # settles first
    assert (ranks.asleep, ranks.is_free()) == ({False}, True)


@pytest.mark.parametrize("call", ["begin", "rollback", "commit"])
def test_a_rank_that_is_gone_is_an_engine_that_is_dead(call: str) -> None:
    ranks = Ranks(2)

    def gone(transaction: int, *_: object) -> None:
        raise EngineDead("a rank is gone", found="rank 1 was killed")

    setattr(ranks.ranks[1], call, gone)
    if call == "rollback":
        ranks.ranks[0].faults["begin"] = Fault.BEFORE
    with pytest.raises(EngineDead, match="was killed") as caught:
        ranks.sleep(PLAN)
    assert caught.value.rank == 1


faults = st.dictionaries(st.sampled_from(["begin", "commit", "rollback"]), st.sampled_from(Fault), max_size=2)
interrupts = st.none() | st.tuples(st.sampled_from(["begin", "commit", "rollback"]), st.integers(0, 3))


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 3), st.lists(st.tuples(st.booleans(), st.lists(faults, max_size=3), interrupts), max_size=8))
def test_whatever_happens_ranks_end_in_one_state(
    count: int, operations: list[tuple[bool, list[dict[str, Fault]], tuple[str, int] | None]]
) -> None:
    """After an operation all ranks are as asked, or it raised and all are as before, or it raised RanksDiverged (or was interrupted
    in the end) and settling brings all to one of the two; nothing stays open, and a retry does what was asked."""
    ranks = Ranks(count)
    for to_sleep, faults_of, interrupt in operations:
        (before,) = ranks.asleep
        for rank, own in zip(ranks.ranks, faults_of, strict=False):
            rank.faults = dict(own)
        ranks.interrupt = interrupt

        def operate(to_sleep: bool = to_sleep) -> list[MemoryReport]:
            return ranks.sleep(PLAN) if to_sleep else ranks.wake()

        try:
            assert len(operate()) == count
        except (RanksDiverged, KeyboardInterrupt) as error:
            if isinstance(error, KeyboardInterrupt) and not any(faults_of):
                assert ranks.is_free(), "an interrupt alone is settled at once"
            for rank in ranks.ranks:
                rank.faults = {}
            ranks.interrupt = None
            ranks.settle()
            assert ranks.asleep in ({before}, {to_sleep})
        except HardpointError:
            assert ranks.asleep == {before}
        else:
            assert ranks.asleep == {to_sleep}
        assert ranks.is_free()
        for rank in ranks.ranks:
            rank.faults = {}
        ranks.interrupt = None
        operate()
        assert ranks.asleep == {to_sleep}


def test_a_call_reaches_every_rank_and_names_the_one_that_failed() -> None:
    ranks = Ranks(3)
    assert ranks.call("status") == [WorkerStatus(MemoryStats({}, 0))] * 3
    ranks.ranks[1].faults["status"] = ranks.ranks[2].faults["status"] = Fault.LOST
    with pytest.raises(WorkerError, match=r"^rank 1: the answer was lost") as caught:
        ranks.call("status")
    assert caught.value.rank == 1
    assert [rank.calls for rank in ranks.ranks] == [["status"] * 2] * 3
    with pytest.raises(ConfigError, match="not a call of the worker contract"):
        ranks.call("vendor_trick")


@pytest.mark.parametrize("error", [DriverError("copy", 1, "stuck"), LookupError("nobody")])
def test_a_single_rank_raises_what_its_worker_raises(error: Exception) -> None:
    class Failing:
        def status(self) -> WorkerStatus:
            raise error

    with pytest.raises(type(error)) as caught:
        InProcessExecutor(Failing()).call("status")  # type: ignore[arg-type]
    assert caught.value is error
    assert getattr(error, "rank", None) is None


def test_numbers_grow_and_are_used_up_by_failures() -> None:
    transactions = Transactions()
    for number in (0, -3):
        with pytest.raises(InvalidTransaction):
            transactions.take(number)
    transactions.take(2)
    with pytest.raises(InvalidTransaction, match="not above 2"):
        transactions.take(2)
    transactions.take(7)
    transactions.open = PreparedChange(Change(Rank(), True))
    with pytest.raises(MemoryBusy, match="7"):
        transactions.take(8)
    transactions.rollback(7)
    transactions.take(8)
    transactions.open = PreparedChange(Change(Rank(), True))
    transactions.abandon()
    transactions.abandon()
    with pytest.raises(InvalidTransaction, match="none is open"):
        transactions.commit(8)
