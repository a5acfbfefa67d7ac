"""A model of a pool's books in Python, and random sequences of everything that a pool can do against it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from hardpoint.interfaces import (
    FileExtent,
    LiveRanges,
    MemoryCapabilities,
    MemoryTransaction,
    Policy,
    SleepPlan,
    SleepTier,
)
from hardpoint.interfaces.errors import (
    CapabilityRefused,
    DeviceOutOfMemory,
    DriverError,
    ForeignMemory,
    HostBudgetExceeded,
    InvalidAllocation,
    MemoryAsleep,
    MemoryFault,
)
from hardpoint.memory import ALL_CLAIMS, DriverTable, VirtualPool
from hardpoint_conformance.fault_matrix import FaultTarget
from hardpoint_conformance.memory import content

TAGS = ("weights", "kv_cache", "buffers")
MANY = 12
"""Allocations at a time, so that small devices and slow machines do."""

tags = st.sets(st.sampled_from(TAGS), min_size=1)
policies = st.sampled_from(
    [Policy.PRESERVE, Policy.PRESERVE, Policy.DISCARD, Policy.ZERO, Policy.REBUILD, Policy.RESIDENT]
)


Fault = tuple[int, int] | list[int] | None
"""Of driver calls: one of a kind and which of its calls, or the numbers of several of any kind; None for none."""

faults = (
    st.none()
    | st.tuples(st.integers(0, 40), st.integers(1, 8))
    | st.lists(st.integers(1, 40), min_size=2, max_size=4, unique=True)
    | st.builds(lambda first, number: list(range(first, first + number)), st.integers(1, 40), st.integers(2, 6))
)


class Phases(Enum):
    """How a sleep or wake is made."""

    ONE = "one call"
    TWO = "begun and committed"
    TWO_AFTER_A_ROLLBACK = "begun and rolled back, then begun and committed"


phases = st.sampled_from(Phases)


@dataclass
class Known:
    """Bytes that are certain: (start, bytes) pieces; anything else of an allocation is anybody's."""

    pieces: list[tuple[int, bytes]] = field(default_factory=list)

    def within(self, ranges: list[tuple[int, int]]) -> Known:
        """Return what of it lies in (start, size) ranges."""
        found = []
        for start, data in self.pieces:
            for low, size in ranges:
                first, last = max(start, low), min(start + len(data), low + size)
                if first < last:
                    found.append((first, data[first - start : last - start]))
        return Known(found)


@dataclass
class Block:
    """What the model knows of one allocation."""

    address: int
    size: int
    tag: str
    policy: Policy
    shared: bool
    capacity: int
    known: Known = field(default_factory=Known)
    callback: bool = False
    unsure: bool = False
    """A callback may be declared still, or none."""
    zeroed: bool = False
    asleep: bool = False
    readable: Known = field(default_factory=Known)
    """While asleep: what `read_backup` gives."""


class TrackedPool(VirtualPool):
    """A pool that knows its allocations, so that a test's end can free what the test left."""

    def __init__(self, driver: DriverTable, claims: MemoryCapabilities = ALL_CLAIMS) -> None:
        super().__init__(driver, claims)
        self.living: set[int] = set()

    @property
    def unit(self) -> int:
        """The driver's granularity, bytes."""
        return self.driver.geometry().granularity

    def allocate(
        self,
        size: int,
        tag: str = "weights",
        policy: Policy = Policy.PRESERVE,
        capacity: int = 0,
        *,
        shared: bool = False,
    ) -> int:
        address = super().allocate(size, tag, policy, capacity, shared=shared)
        self.living.add(address)
        return address

    def filled(
        self, data: bytes, tag: str = "weights", policy: Policy = Policy.PRESERVE, *, shared: bool = False
    ) -> int:
        """Allocate and write."""
        address = self.allocate(len(data), tag, policy, shared=shared)
        self.write(address, data)
        return address

    def free(self, address: int) -> None:
        super().free(address)
        self.living.discard(address)

    def free_all(self) -> None:
        """Free what is left and close."""
        for address in sorted(self.living):
            self.free(address)
        self.close()


class MemoryMachine(RuleBasedStateMachine):
    """A pool beside its model."""

    def __init__(self, target: FaultTarget, claims: MemoryCapabilities = ALL_CLAIMS) -> None:
        super().__init__()
        self.target = target
        self.tiers = sorted(claims.tiers, key=lambda tier: tier.value)
        self.elastic = target.elastic and claims.elastic
        self.directory = tempfile.TemporaryDirectory()
        self.pool = TrackedPool(target.table(), claims)
        self.unit = self.pool.unit
        self.blocks: dict[int, Block] = {}
        self.seed = 0
        self.faulted = False

    # Helpers

    def fresh(self, size: int) -> bytes:
        self.seed += 1
        return content(size, self.seed)

    def pick(self, index: int) -> Block:
        return self.blocks[list(self.blocks)[index % len(self.blocks)]]

    def attempt(self, fault: Fault, call: Callable[[], object]) -> bool:
        """Make a call with driver calls failing, again without when that was too much.

        Returns False where undoing it failed, too: everything was woken then instead, which brings all bytes back.
        """
        calls = sorted(self.target.calls())
        if not calls:
            fault = None
        before = self.target.count()
        if isinstance(fault, list):
            self.target.fail_calls(*fault)
        elif fault:
            self.target.fail(calls[fault[0] % len(calls)], fault[1])
        failed = False
        try:
            call()
        except (DeviceOutOfMemory, DriverError, HostBudgetExceeded):
            assert fault, "an error without a fault"
            failed = True
        finally:
            if fault:
                reached = self.target.disarm()
                fired = reached if isinstance(fault, tuple) else self.target.count() - before >= min(fault)
                self.faulted |= fired
        if not failed:
            return True
        assert fired, "an error without a failed call"
        if isinstance(fault, list) and self.is_otherwise_asleep():
            self.pool.wake()
            self.note_awake(None)
            self.bytes_are_as_known()
            return False
        self.bytes_are_as_known()
        call()
        return True

    def is_otherwise_asleep(self) -> bool:
        """Return whether memory sleeps that the model says is awake; never the other way round."""
        states = {(block.asleep, self.pool.is_asleep(block.address)) for block in self.blocks.values()}
        assert (True, False) not in states
        return (False, True) in states

    def note_awake(self, chosen: set[str] | None) -> None:
        """Note in the model that tags woke; None for all."""
        for block in self.blocks.values():
            if block.asleep and (chosen is None or block.tag in chosen):
                block.asleep, block.readable = False, Known()
                block.callback = block.callback and not block.zeroed
                block.zeroed = False

    def change(
        self, fault: Fault, phases: Phases, at_once: Callable[[], object], begin: Callable[[], MemoryTransaction]
    ) -> bool:
        """Sleep or wake, in one call or in two phases, as `attempt` makes a call."""
        if phases is Phases.ONE:
            return self.attempt(fault, at_once)
        if phases is Phases.TWO_AFTER_A_ROLLBACK:
            begin().rollback()
            self.bytes_are_as_known()
        return self.attempt(fault, lambda: begin().commit())

    def bytes_are_as_known(self) -> None:
        for block in self.blocks.values():
            assert self.pool.is_asleep(block.address) is block.asleep
            read = self.pool.read_backup if block.asleep else self.pool.read
            for start, data in (block.readable if block.asleep else block.known).pieces:
                for at in {0, len(data) // 2, max(len(data) - 200, 0)}:
                    part = data[at : at + 200]
                    assert read(block.address + start + at, len(part)) == part, (block.tag, block.policy, start, at)

    # Rules

    @precondition(lambda self: len(self.blocks) < MANY)
    @rule(
        units=st.integers(0, 3),
        more=st.sampled_from([0, 1, 700, -1, 5000]),
        tag=st.sampled_from(TAGS),
        policy=policies,
        kind=st.sampled_from(["own", "own", "shared", "elastic"]),
        fault=faults,
    )
    def allocate(self, units: int, more: int, tag: str, policy: Policy, kind: str, fault: Fault) -> None:
        size = 300 + 977 * units if kind == "shared" else max(1, units * self.unit + more)
        if policy is Policy.REBUILD and kind == "shared":
            kind = "own"
        capacity = 6 * self.unit if kind == "elastic" else 0
        if capacity and not self.elastic:
            with pytest.raises(CapabilityRefused):
                self.pool.allocate(size, tag, policy, capacity)
            return
        made: list[int] = []
        self.attempt(
            fault, lambda: made.append(self.pool.allocate(size, tag, policy, capacity, shared=kind == "shared"))
        )
        block = Block(made[-1], size, tag, policy, kind == "shared", capacity)
        assert block.address not in self.blocks
        self.blocks[block.address] = block
        self.write(list(self.blocks).index(block.address))
        if policy is Policy.REBUILD:
            self.declare_callback(list(self.blocks).index(block.address))

    @precondition(lambda self: self.blocks)
    @rule(index=st.integers(0, 99))
    def write(self, index: int) -> None:
        block = self.pick(index)
        data = self.fresh(block.size)
        if block.asleep:
            with pytest.raises(MemoryAsleep):
                self.pool.write(block.address, data)
            return
        self.pool.write(block.address, data)
        block.known = Known([(0, data)])
        block.callback = False
        block.unsure = False
        # A shared allocation's sources go together, and it is not seen from here which blocks share one.
        for other in self.blocks.values():
            if block.shared and other.shared and (other.tag, other.policy) == (block.tag, block.policy):
                other.unsure |= other.callback
                other.callback = False

    @precondition(lambda self: self.blocks)
    @rule(index=st.integers(0, 99), fault=faults)
    def free(self, index: int, fault: Fault) -> None:
        block = self.pick(index)
        del self.blocks[block.address]
        self.attempt(fault, lambda: self.pool.free(block.address))
        with pytest.raises(ForeignMemory):
            self.pool.free(block.address)

    @precondition(lambda self: any(block.capacity for block in self.blocks.values()))
    @rule(
        index=st.integers(0, 99),
        units=st.integers(1, 6),
        fault=faults,
    )
    def resize(self, index: int, units: int, fault: Fault) -> None:
        elastic = [block for block in self.blocks.values() if block.capacity]
        block, size = elastic[index % len(elastic)], units * self.unit
        if block.asleep:
            with pytest.raises(MemoryAsleep):
                self.pool.resize(block.address, size)
            return
        if not self.attempt(fault, lambda: self.pool.resize(block.address, size)):
            return
        if size < block.size:
            block.known = block.known.within([(0, size)])
        outgrown = block.callback and size > block.size
        block.size = size
        if outgrown:  # the callback is the source of a part only
            self.write(list(self.blocks).index(block.address))

    @precondition(lambda self: any(not block.asleep for block in self.blocks.values()))
    @rule(index=st.integers(0, 99), offset=st.integers(0, 5000))
    def declare_file(self, index: int, offset: int) -> None:
        """Part of the bytes are in a file, in two extents with a gap, as in a checkpoint."""
        block = self.pick(index)
        if block.asleep or block.policy is Policy.REBUILD or [start for start, _ in block.known.pieces] != [0]:
            return
        data = block.known.pieces[0][1]
        file = Path(self.directory.name) / f"source{self.seed}-{index}"
        file.write_bytes(b"h" * offset + data)
        third = len(data) // 3
        extents = [(0, third), (2 * third, len(data) - 2 * third)]
        self.pool.declare_source(
            block.address, block.size, [FileExtent(at, size, str(file), offset + at) for at, size in extents if size]
        )
        block.callback = False

    @precondition(lambda self: any(not block.asleep for block in self.blocks.values()))
    @rule(index=st.integers(0, 99))
    def declare_callback(self, index: int) -> None:
        block = self.pick(index)
        if block.asleep or block.known.pieces == [] or len(block.known.pieces[0][1]) != block.size:
            return
        data = block.known.pieces[0][1]
        address = block.address
        self.pool.declare_source(address, block.size, lambda: self.pool.write(address, data[: block.size]))
        block.callback = True

    @rule(chosen=tags)
    def mark_written(self, chosen: set[str]) -> None:
        self.pool.mark_written(sorted(chosen))
        for block in self.blocks.values():
            if block.tag in chosen:
                block.callback = block.unsure = False

    @rule(
        chosen=st.none() | tags,
        overrides=st.dictionaries(st.sampled_from(TAGS), policies, max_size=2),
        tier_index=st.integers(0, 11),
        keep=st.sets(st.sampled_from(TAGS)),
        verify=st.booleans(),
        narrowed=st.booleans(),
        fault=faults,
        phases=phases,
    )
    def sleep(
        self,
        chosen: set[str] | None,
        overrides: dict[str, Policy],
        tier_index: int,
        keep: set[str],
        verify: bool,
        narrowed: bool,
        fault: Fault,
        phases: Phases,
    ) -> None:
        tier = self.tiers[tier_index % len(self.tiers)]
        plan = SleepPlan(
            tags=None if chosen is None else frozenset(chosen),
            policies=overrides,
            tier=tier,
            keep=frozenset(keep),
            verify=verify,
            disk_directory=self.directory.name,
        )
        sleeping = [
            (block, overrides.get(block.tag, block.policy))
            for block in self.blocks.values()
            if not block.asleep and (chosen is None or block.tag in chosen)
        ]
        sleeping = [(block, policy) for block, policy in sleeping if policy is not Policy.RESIDENT]
        live: dict[int, list[tuple[int, int]]] = {}
        if narrowed:
            for block, policy in sleeping[::2]:
                if policy is Policy.PRESERVE:
                    live[block.address] = [(0, block.size // 3), (block.size // 2, block.size // 4)]
        plan = replace(plan, live=tuple(LiveRanges(address, ranges) for address, ranges in live.items()))
        if any(policy is Policy.REBUILD and not block.callback for block, policy in sleeping):
            with pytest.raises(InvalidAllocation):
                self.pool.sleep(plan)
            return
        if not self.change(fault, phases, lambda: self.pool.sleep(plan), lambda: self.pool.begin_sleep(plan)):
            return
        for block, policy in sleeping:
            block.asleep = True
            known = block.known.within(live[block.address]) if block.address in live else block.known
            if policy in (Policy.DISCARD, Policy.ZERO):
                block.known = Known([(0, bytes(block.size))]) if policy is Policy.ZERO else Known()
                block.zeroed = policy is Policy.ZERO
                block.readable = Known()
            elif policy is Policy.REBUILD or (tier is SleepTier.SOURCE and (block.callback or block.unsure)):
                block.known, block.readable = known, Known()
            else:
                block.known = block.readable = known

    @rule(chosen=st.none() | tags, fault=faults, phases=phases)
    def wake(self, chosen: set[str] | None, fault: Fault, phases: Phases) -> None:
        named = None if chosen is None else sorted(chosen)
        if self.change(fault, phases, lambda: self.pool.wake(named), lambda: self.pool.begin_wake(named)):
            self.note_awake(chosen)

    @rule(chosen=tags)
    def discard_backup(self, chosen: set[str]) -> None:
        self.pool.discard_backup(sorted(chosen))
        for block in self.blocks.values():
            if block.asleep and block.tag in chosen:
                block.known, block.readable, block.zeroed = Known(), Known(), False

    @rule()
    def trim(self) -> None:
        self.pool.trim()
        assert self.pool.books().host_held >= self.pool.books().host_used

    @rule(plan_tags=st.none() | tags)
    def prepare(self, plan_tags: set[str] | None) -> None:
        chosen = None if plan_tags is None else frozenset(plan_tags)
        self.pool.prepare_sleep(SleepPlan(tags=chosen, tier=self.tiers[-1], disk_directory=self.directory.name))

    @precondition(lambda self: any(block.asleep for block in self.blocks.values()))
    @rule(index=st.integers(0, 99))
    def read_awake_or_asleep(self, index: int) -> None:
        block = self.pick(index)
        if block.asleep:
            with pytest.raises(MemoryAsleep):
                self.pool.read(block.address, 1)
        else:
            with pytest.raises(MemoryFault):
                self.pool.read_backup(block.address, 1)

    # What always holds

    @invariant()
    def bytes_and_addresses_agree(self) -> None:
        self.bytes_are_as_known()

    @invariant()
    def books_agree(self) -> None:
        stats, books = self.pool.stats(), self.pool.books()
        for tag in TAGS:
            own = [block for block in self.blocks.values() if block.tag == tag]
            found = stats.tags[tag]
            assert found.allocated == sum(block.size for block in own)
            assert found.allocations == len(own)
            assert (tag in stats.asleep) is any(block.asleep for block in own)
        mapped = sum(tag.mapped for tag in stats.tags.values())
        if self.target.elastic or not self.faulted:
            # Where memory goes with its addresses, a failure to give those back holds memory that the books count as returned.
            assert self.target.held()["used"] == mapped + books.unreturned
        if not self.faulted and "address_space" in self.target.held():
            assert self.target.held()["address_space"] == books.reserved

    def teardown(self) -> None:
        self.pool.free_all()
        del self.pool
        self.directory.cleanup()
        held = dict(self.target.left())
        assert held == dict.fromkeys(held, 0)
        assert self.target.violations() == []


def run_model(
    target: FaultTarget, examples: int, seed: int | None = None, claims: MemoryCapabilities = ALL_CLAIMS
) -> None:
    """Run random sequences; raises what the first one raises that the model contradicts.

    Args:
        examples: how many.
        seed: of the sequences, which are then not made shorter; None for others every time, and the shortest that fails.
        claims: what may be asked of the pool; levels 1 and 2 at least.
    """

    def machine() -> MemoryMachine:
        return MemoryMachine(target, claims)

    factory: Any = machine if seed is None else hypothesis.seed(seed)(machine)
    run_state_machine_as_test(
        factory,
        settings=settings(
            max_examples=examples,
            stateful_step_count=30,
            deadline=None,
            print_blob=True,
            database=None,
            phases=(Phase.generate,) if seed is not None else tuple(Phase),
            suppress_health_check=list(HealthCheck),
        ),
    )
