"""Failing driver calls in every operation of the engine, one at a time and two at a time, and what must hold after them.

For each case of one a pool is filled anew, one call is made to fail, and the operation is run. Then either
- it raised a typed error: every allocation is as it was before (awake or asleep, all its bytes), the driver holds what it held
  before, and the same operation succeeds when it is tried again; or
- it raised nothing, which is right only for calls whose failure costs nothing (a figure of a report, a retry that succeeded, memory
  that the driver takes back later): then the operation has done all its work.
The second phase of a sleep or wake cannot be tried again: a commit raises nothing whatever call fails, and after a rollback that
raised, all bytes are there and a wake finds them.
At the end everything is freed, and the driver holds nothing.

The second failure of a pair meets undoing, more often than not. Then the error is typed, no byte is lost that was not to be dropped, and
once the driver works again a wake brings everything back, as does a sleep and a wake after it.
"""

from __future__ import annotations

import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property, partial
from itertools import count
from threading import Thread
from typing import TypeVar

from hardpoint.interfaces import MemoryTransaction, Policy, SleepPlan, SleepTier
from hardpoint.interfaces.errors import DeviceOutOfMemory, DriverError, HostBudgetExceeded
from hardpoint.memory import DriverQuirks, DriverTable, VirtualPool
from hardpoint_conformance.interposed import InterposedDriver, Replacement
from hardpoint_conformance.memory import assert_holds_nothing

SAMPLE = 4096
"""Bytes at each end of an allocation that are written and looked at."""


class FaultTarget(ABC):
    """One driver under test.

    Attributes:
        name: human-readable; says `simulated` where the vendor's library is one.
        elastic: memory of an allocation can be given back while its addresses stay.
        units: of its granularity, in the largest allocation.
        tolerates: ends of the names of its own calls whose failure an operation may survive, as `_MAY_BE_TOLERATED`.
    """

    name: str
    elastic: bool = True
    units: int = 5
    tolerates: tuple[str, ...] = ()

    @abstractmethod
    def table(self) -> DriverTable:
        """Return the driver, with nothing allocated and no fault armed."""

    @abstractmethod
    def calls(self) -> dict[str, int]:
        """Return how often each call that can fail has been made."""

    def count(self) -> int:
        """Return how many calls have been made, as `fail_calls` counts them."""
        return sum(self.calls().values())

    @abstractmethod
    def fail(self, call: str, nth: int) -> None:
        """Make the nth call from now on fail once."""

    @abstractmethod
    def fail_calls(self, *numbers: int) -> None:
        """Make these calls from now on fail; calls of all kinds are counted together."""

    @abstractmethod
    def disarm(self) -> bool:
        """Let no more calls fail; returns whether all that were armed have failed."""

    @abstractmethod
    def finish(self) -> None:
        """End the use of the driver."""

    def violations(self) -> list[str]:
        """Return the vendor's rules that were broken since `table`; a driver that checks none has none."""
        return []

    @abstractmethod
    def held(self) -> Mapping[str, int]:
        """Return what the driver counts as taken: memory, and where it counts them handles, mappings, addresses, streams."""

    def left(self) -> Mapping[str, int]:
        """Return what is taken when no pool is left: as `held`, and what a pool keeps for its next operation."""
        return self.held()


class InterposedTarget(FaultTarget):
    """Any backend's driver, whose entries fail between it and the core."""

    units = 2
    _never = ("open", "close", "geometry", "quirks")  # called when a pool is made, and by tests

    def __init__(self, name: str, driver: DriverTable, replacements: Mapping[str, Replacement] | None = None) -> None:
        self.name = name
        self._driver = InterposedDriver(driver, replacements)
        self._opened = False
        self.elastic = DriverQuirks.ADDRESS_HOLDS_MEMORY not in self.table().quirks()

    def table(self) -> DriverTable:
        if not self._opened:
            self._driver.open()  # a driver remembers what it found by probing as long as it is open
            self._opened = True
        return self._driver

    def calls(self) -> dict[str, int]:
        return {entry: count for entry, count in self._driver.calls().items() if entry not in self._never}

    def fail(self, call: str, nth: int) -> None:
        self._driver.fail(call, nth)

    def fail_calls(self, *numbers: int) -> None:
        self._driver.fail_calls(*numbers)

    def disarm(self) -> bool:
        return self._driver.disarm()

    def held(self) -> Mapping[str, int]:
        # A pool keeps streams and pinned memory for its next operation.
        held = self._driver.held()
        counts = {name: held[name] for name in ("handles", "reservations", "mappings")}
        return {"used": held["bytes"], "address_space": held["address_bytes"], **counts}

    def violations(self) -> list[str]:
        return [*self._driver.broken_rules(), *map(repr, self._driver.errors)]

    def left(self) -> Mapping[str, int]:
        return {**self.held(), **self._driver.held()}

    def finish(self) -> None:
        self._driver.close()
        self._opened = False
        assert_holds_nothing(self._driver)


@dataclass
class Block:
    """An allocation with the bytes that it must have; None for bytes that are anybody's."""

    address: int
    size: int
    content: bytes | None
    tag: str
    policy: Policy


@dataclass
class World:
    """A pool with something of everything in it."""

    pool: VirtualPool
    directory: str
    blocks: list[Block] = field(default_factory=list)
    transaction: MemoryTransaction | None = None

    @cached_property
    def unit(self) -> int:
        """Bytes in which sizes are given: the driver's granularity, or as many of it as have two samples apart."""
        granularity = self.pool.driver.geometry().granularity
        return granularity * max(1, -(-4 * SAMPLE // granularity))

    def add(
        self, size: int, tag: str, policy: Policy = Policy.PRESERVE, capacity: int = 0, *, shared: bool = False
    ) -> Block:
        """Allocate and fill."""
        address = self.pool.allocate(size, tag, policy, capacity, shared=shared)
        block = Block(address, size, os.urandom(SAMPLE), tag, policy)
        self.blocks.append(block)
        assert block.content is not None
        self.pool.write(address, block.content)
        self.pool.write(address + size - SAMPLE, block.content[::-1])
        return block

    def faults_of_state(self, before: Mapping[int, bool] | None = None) -> Iterator[str]:
        """Yield what is wrong: bytes that changed, and allocations that are not awake or asleep as `before` says."""
        for block in self.blocks:
            asleep = self.pool.is_asleep(block.address)
            if before is not None and asleep is not before[block.address]:
                yield f"{block.tag} is {'asleep' if asleep else 'awake'}"
            if block.content is None:
                continue
            read = self.pool.read_backup if asleep else self.pool.read
            if read(block.address, SAMPLE) != block.content:
                yield f"{block.tag} has lost its first bytes"
            if read(block.address + block.size - SAMPLE, SAMPLE) != block.content[::-1]:
                yield f"{block.tag} has lost its last bytes"

    def asleep(self) -> dict[int, bool]:
        """Return which allocations are asleep, by address."""
        return {block.address: self.pool.is_asleep(block.address) for block in self.blocks}

    def plan(self, **settings: object) -> SleepPlan:
        """Return a plan with the world's directory."""
        return SleepPlan(disk_directory=self.directory, **settings)  # type: ignore[arg-type]

    def forget(self, *tags: str) -> None:
        """Content of these tags is anybody's from now on."""
        for block in self.blocks:
            if block.tag in tags:
                block.content = None

    def close(self) -> None:
        """Free everything."""
        for block in self.blocks:
            self.pool.free(block.address)
        self.blocks.clear()
        self.pool.close()


_KEEP = frozenset({"weights"})
_DROPPED = ("kv_cache", "scratch")

_MAY_BE_TOLERATED = (
    # A report's figure.
    "memoryinfo",
    "memgetinfo",
    "memgetinfov2",
    "getmeminfo",
    # Memory that the driver keeps after others are gone stays in the books; address ranges are taken again.
    "release",
    "freephysical",
    "hostunregister",
    "hostunregisterv2",
    "addressfree",
    "releaseaddress",
    "reserve",
    "addressreserve",
    "reservememaddress",
    "releasememaddress",
    # Parts of every entry, those above included.
    "ctxgetcurrent",
    "ctxsetcurrent",
    "getdevice",
    "setdevice",
    "getcurrentcontext",
    "setcurrentcontext",
    "getlasterror",
)
"""Ends of names (lower case, without underscores) of calls whose failure an operation may survive."""

Step = Callable[[World], object]
Result = TypeVar("Result")


class Ending(Enum):
    """How a transaction ends."""

    COMMIT = "commit"
    ROLLBACK = "rollback"


@dataclass(frozen=True)
class Operation:
    """What is run with a fault, after `prepare` has run without.

    Attributes:
        forgets: tags whose bytes the operation may drop when it succeeds.
        elastic: needs memory that grows and shrinks in place.
        ending: it is the second phase of what `prepare` began.
    """

    name: str
    run: Step
    prepare: Step = lambda world: None
    forgets: tuple[str, ...] = ()
    elastic: bool = False
    ending: Ending | None = None


def _sleep(**settings: object) -> Step:
    return lambda world: world.pool.sleep(world.plan(**settings)) and None


def _wake(tags: tuple[str, ...] | None = None) -> Step:
    return lambda world: world.pool.wake(tags) and None


def _slept(**settings: object) -> Step:
    def run(world: World) -> None:
        world.pool.sleep(world.plan(**settings))
        world.forget(*_DROPPED)

    return run


def _slept_and_woken(world: World) -> None:
    _slept(keep=_KEEP)(world)
    world.pool.wake()


def _begun_sleep(world: World) -> None:
    world.transaction = world.pool.begin_sleep(world.plan())


def _begun_wake(world: World) -> None:
    _slept()(world)
    world.transaction = world.pool.begin_wake()


def _commit(world: World) -> None:
    assert world.transaction is not None
    world.transaction.commit()


def _roll_back(world: World) -> None:
    assert world.transaction is not None
    world.transaction.rollback()


def _allocate(world: World) -> None:
    size = 3 * world.unit
    world.blocks.append(Block(world.pool.allocate(size, "weights"), size, None, "weights", Policy.PRESERVE))


def _resize(units: int) -> Step:
    def run(world: World) -> None:
        block = next(block for block in world.blocks if block.tag == "elastic")
        world.pool.resize(block.address, units * world.unit)
        if units * world.unit < block.size:
            block.content = None

    return run


OPERATIONS = (
    Operation("allocate", _allocate),
    Operation("grow", _resize(7), elastic=True),
    Operation("shrink", _resize(1), elastic=True),
    Operation("sleep to host", _sleep(), forgets=_DROPPED),
    Operation("sleep to disk", _sleep(tier=SleepTier.DISK), forgets=_DROPPED),
    Operation("sleep, weights discarded", _sleep(policies={"weights": Policy.DISCARD}), forgets=(*_DROPPED, "weights")),
    Operation("sleep of one tag", _sleep(tags=frozenset({"weights"}))),
    Operation("sleep of kept weights", _sleep(keep=_KEEP), _slept_and_woken, _DROPPED),
    Operation("sleep of kept weights, verified", _sleep(keep=_KEEP, verify=True), _slept_and_woken, _DROPPED),
    Operation("wake from host", _wake(), _slept()),
    Operation("wake from disk", _wake(), _slept(tier=SleepTier.DISK)),
    Operation("wake of one tag", _wake(("weights",)), _slept()),
    Operation("commit of a sleep", _commit, _begun_sleep, _DROPPED, ending=Ending.COMMIT),
    Operation("rollback of a sleep", _roll_back, _begun_sleep, ending=Ending.ROLLBACK),
    Operation("commit of a wake", _commit, _begun_wake, ending=Ending.COMMIT),
    Operation("rollback of a wake", _roll_back, _begun_wake, ending=Ending.ROLLBACK),
)


@dataclass
class Row:
    """One call in one operation on one driver.

    Attributes:
        cases: values of k tried.
        undone, tolerated: cases that ended with a typed error and the state before, and that ended well in spite of the failure.
        not_reached: cases whose k-th call did not come: threads may share the calls out differently than when they were counted.
        failures: what was wrong, one line each.
    """

    target: str
    operation: str
    call: str
    cases: int = 0
    undone: int = 0
    tolerated: int = 0
    not_reached: int = 0
    failures: list[str] = field(default_factory=list)


def _world(target: FaultTarget, directory: str) -> World:
    world = World(VirtualPool(target.table()), directory)
    unit = world.unit
    world.add(target.units * unit, "weights")
    world.add(3 * unit // 2, "weights")
    world.add(100_000, "weights", shared=True)
    world.add(20_000, "buffers", shared=True)
    world.add(2 * unit, "kv_cache", Policy.DISCARD)
    world.add(unit, "kv_cache", Policy.DISCARD)
    world.add(unit, "scratch", Policy.ZERO)
    world.add(unit, "resident", Policy.RESIDENT)
    world.add(3 * unit, "elastic", capacity=32 * unit if target.elastic else 0)
    return world


def run_target(target: FaultTarget, operations: tuple[Operation, ...] = OPERATIONS, pairs: int = 0) -> Iterator[Row]:
    """Yield a row for every call that an operation makes on a driver, or for its pairs of calls.

    Args:
        pairs: 0 for single calls; n for pairs, each first call with every n-th after it.
    """
    with tempfile.TemporaryDirectory() as directory:
        for operation in operations:
            if operation.elastic and not target.elastic:
                continue
            if pairs:
                yield run_pairs(target, operation, directory, pairs)
            else:
                yield from run_operation(target, operation, directory)
        target.finish()


def run_operation(target: FaultTarget, operation: Operation, directory: str) -> Iterator[Row]:
    """Yield a row for every call that an operation makes on a driver; backups on disk go to the directory."""
    world = _world(target, directory)
    operation.prepare(world)
    before = target.calls()
    operation.run(world)
    counts = {call: count - before.get(call, 0) for call, count in target.calls().items()}
    world.close()
    for call, made in sorted(counts.items()):
        if made <= 0:
            continue
        row = Row(target.name, operation.name, call)
        for k in range(1, made + 1):
            _in_thread(row, f"k={k}", partial(_case, target, operation, call, k, directory, row))
        yield row


def run_pairs(target: FaultTarget, operation: Operation, directory: str, stride: int) -> Row:
    """Return the row of the pairs of an operation's calls: what follows the first has met its failure."""
    row = Row(target.name, operation.name, "pairs")
    for first in count(1):
        # Alone, to learn how many calls follow.
        made = _in_thread(row, f"call {first}", partial(_pair, target, operation, (first,), directory, row))
        if made is None or made < first:
            break
        for second in range(first + 1, made + 1, stride):
            case = partial(_pair, target, operation, (first, second), directory, row)
            _in_thread(row, f"calls {first} and {second}", case)
    return row


def _in_thread(row: Row, name: str, case: Callable[[], Result]) -> Result | None:
    """Return what a case does, None where it failed.

    It runs in a thread of its own: a call that gives the thread's device back may be the one that fails.
    """
    results: list[Result] = []

    def run() -> None:
        try:
            results.append(case())
        except Exception as error:
            row.failures.append(f"{name}: {type(error).__name__}: {error}")

    row.cases += 1
    thread = Thread(target=run)
    thread.start()
    thread.join()
    return results[0] if results else None


def _case(target: FaultTarget, operation: Operation, call: str, k: int, directory: str, row: Row) -> None:
    world = _world(target, directory)
    operation.prepare(world)
    asleep, held = world.asleep(), dict(target.held())
    wrong: list[str] = []
    target.fail(call, k)
    try:
        operation.run(world)
    except (DeviceOutOfMemory, DriverError, HostBudgetExceeded) as error:
        fired = target.disarm()
        if not fired:
            wrong.append(f"an error without a failed call ({error})")
        if operation.ending is None:
            wrong += world.faults_of_state(asleep)
            wrong += _differences(held, target.held())
            operation.run(world)
        elif operation.ending is Ending.COMMIT:
            wrong.append(f"the commit failed ({error})")
        else:
            world.pool.wake()
        row.undone += 1
    else:
        if target.disarm():
            row.tolerated += 1
            tolerated = (*_MAY_BE_TOLERATED, *target.tolerates)
            if operation.ending is None and not call.lower().replace("_", "").endswith(tolerated):
                wrong.append("the failure had no effect")
        else:
            row.not_reached += 1
    world.forget(*operation.forgets)
    wrong += world.faults_of_state()
    world.pool.wake()
    world.forget(*_DROPPED)
    wrong += world.faults_of_state({block.address: False for block in world.blocks})
    world.close()
    wrong += _differences(dict.fromkeys(held, 0), target.held())
    if wrong:
        row.failures.append(f"k={k}: {'; '.join(wrong)}")


def _pair(target: FaultTarget, operation: Operation, numbers: tuple[int, ...], directory: str, row: Row) -> int:
    """Make calls of an operation fail, by their numbers; returns how many it made."""
    world = _world(target, directory)
    operation.prepare(world)
    before = target.count()
    target.fail_calls(*numbers)
    try:
        operation.run(world)
    except (DeviceOutOfMemory, DriverError, HostBudgetExceeded):
        row.undone += 1
    else:
        row.tolerated += 1
        world.forget(*operation.forgets)
    finally:
        made = target.count() - before
        row.not_reached += not target.disarm()
    wrong: list[str] = []
    world.pool.wake()
    wrong += world.faults_of_state({block.address: False for block in world.blocks})
    world.pool.sleep(world.plan())
    world.pool.wake()
    world.forget(*_DROPPED)
    wrong += world.faults_of_state()
    world.close()
    wrong += _differences(dict.fromkeys(target.held(), 0), target.held())
    if wrong:
        row.failures.append(f"calls {numbers}: {'; '.join(wrong)}")
    return made


def _differences(expected: Mapping[str, int], found: Mapping[str, int]) -> Iterator[str]:
    for name, value in expected.items():
        if found[name] != value:
            yield f"the driver holds {found[name]} {name} instead of {value}"
